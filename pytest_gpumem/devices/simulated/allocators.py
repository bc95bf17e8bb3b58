"""What allocating costs the host, by allocator. Assumptions of the right size, not fitted; memory is booked while it is held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpumem.devices.protocol import MemoryKind, Stream

if TYPE_CHECKING:
    from pytest_gpumem.devices.simulated.device import SimulatedDevice


@dataclass(frozen=True)
class Cost:
    """Virtual seconds of one allocation and its free."""

    kind: MemoryKind
    by_driver: bool
    """Every cycle goes to the driver, as `allocate` and `free` of the device do."""
    call: float = 0.0
    """Where it does not: the calls themselves."""
    first: float = 0.0
    """Where it does not: growing the pool, once for each size, or after every synchronisation that empties it."""
    keeps: bool = False
    """Memory stays in the pool across synchronisations."""


COSTS = {
    "cudaMalloc": Cost(MemoryKind.DEVICE, by_driver=True),
    "cudaMallocAsync": Cost(MemoryKind.DEVICE, by_driver=False, call=4e-6, first=120e-6),
    "cudaMallocAsync, kept": Cost(MemoryKind.DEVICE, by_driver=False, call=4e-6, first=120e-6, keeps=True),
    "CuPy pool": Cost(MemoryKind.DEVICE, by_driver=False, call=1.5e-6, first=120e-6, keeps=True),
    "cudaHostAlloc": Cost(MemoryKind.PINNED, by_driver=True),
    "cudaHostRegister": Cost(MemoryKind.REGISTERED, by_driver=True),
}


class SimulatedAllocator:
    """One way of allocating on the simulated device."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device = device
        self._cost = COSTS[name]
        self._kept = 0

    def cycle(self, nbytes: int, stream: Stream) -> None:
        """Allocate and free once. Errors as `Device.allocate`."""
        device, cost = self._device, self._cost
        if cost.by_driver:
            device.free(device.allocate(nbytes, cost.kind))
            return
        if nbytes > device.free_bytes(cost.kind):
            device.allocate(nbytes, cost.kind)  # raises, in its own words
        if nbytes > self._kept:
            device.spend(cost.first)
        self._kept = max(self._kept, nbytes) if cost.keeps else 0
        device.spend(cost.call)

    def close(self) -> None:
        """Give back what the pool keeps."""
        self._kept = 0
