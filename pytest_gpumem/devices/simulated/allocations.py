"""The simulated device's memory: placed, freed, counted and seen as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pytest_gpumem.devices import checks
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.process_memory import is_mapped
from pytest_gpumem.devices.protocol import (
    Allocation,
    Allocator,
    HostMemory,
    OutOfMemory,
    Stream,
    Unsupported,
)
from pytest_gpumem.devices.simulated.content import backed, backing, memory_name, prefix
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.roofline import Roofline
from pytest_gpumem.devices.simulated.streams import ALLOCATE, Facet, Timeline
from pytest_gpumem.records.what_ran import Step, StepKind
from pytest_gpumem.units import GiB, MiB

_PINNABLE = 0.9  # share of the host's memory that the system lets a process lock
_ALLOCATED = {"cudaHostAlloc": MemoryKind.PINNED, "cudaHostRegister": MemoryKind.REGISTERED}


class SimulatedMemory(Facet):
    """Allocates memory of every kind and counts it."""

    def __init__(self, timeline: Timeline, roofline: Roofline) -> None:
        super().__init__(timeline, roofline)
        self._live: dict[int, Allocation] = {}
        self._used = dict.fromkeys(MemoryKind, 0)
        self._ends = {"device": 0x7F00_0000_0000, "host": 0x5500_0000_0000}

    def _address(self, side: str, nbytes: int) -> int:
        """Return a new address, aligned to 512 bytes, or to 2 MiB for 1 MiB and more."""
        alignment = 512 if nbytes < MiB else 2 * MiB
        address = -(-self._ends[side] // alignment) * alignment
        self._ends[side] = address + nbytes
        return address

    def allocate(self, nbytes: int, kind: MemoryKind, **flags: bool) -> Allocation:
        self._timeline.forbid_capture("it allocates memory")
        checks.check_size(nbytes)
        if kind.on_peer:
            raise Unsupported("one GPU is simulated: there is no peer to copy to")
        self._take(nbytes, kind)
        address = host_address = 0
        if kind.on_host:
            host_address = self._address("host", nbytes)
        if not kind.on_host or kind is MemoryKind.REGISTERED:
            address = self._address("device", nbytes)
        elif kind.locked and flags.get("mapped", True):
            address = host_address
        if kind.managed:
            host_address = address
        return self._made(Allocation(kind, nbytes, address, host_address, backing(nbytes)))

    def _made(self, allocation: Allocation, room: float = math.inf) -> Allocation:
        self._live[id(allocation)] = allocation
        if allocation.kind.managed:
            self._roofline.pages[id(allocation)] = Pages(room)
        self._watch(StepKind.ALLOCATION, allocation)
        self._timeline.host += ALLOCATE
        return allocation

    def _watch(self, kind: StepKind, allocation: Allocation) -> None:
        step = Step(kind, memory=memory_name(allocation), nbytes=allocation.nbytes)
        self._timeline.watch(step)

    def _take(self, nbytes: int, kind: MemoryKind) -> None:
        free = self.free_bytes(kind)
        if nbytes > free:
            problem = f"{nbytes / GiB:.3g} GiB of {kind.value} memory asked for, "
            problem += f"{free / GiB:.3g} GiB are free on the simulated device"
            raise OutOfMemory(problem)
        self._used[kind] += nbytes

    def pooled(self, nbytes: int, pool: Callable[[int], Any]) -> Allocation:
        raise Unsupported("the simulated device has no memory of other libraries' pools")

    def oversubscribe(self, nbytes: int) -> Allocation:
        self._timeline.forbid_capture("it allocates memory")
        checks.check_oversubscription(nbytes, self._roofline.sheet.host_memory_bytes)
        room = self.free_bytes(MemoryKind.MANAGED)
        self._used[MemoryKind.MANAGED] += nbytes
        address = self._address("device", nbytes)
        content = backing(nbytes)
        return self._made(Allocation(MemoryKind.MANAGED, nbytes, address, address, content), room)

    def part(self, allocation: Allocation, offset: int, nbytes: int) -> Allocation:
        part = checks.part_of(allocation, offset, nbytes)
        part.backing = backed(allocation)[offset : offset + nbytes]
        return part

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        self._timeline.forbid_capture("it registers host memory")
        checks.check_host_array(array)
        kind, address = MemoryKind.PAGEABLE, 0
        if register:
            kind, address = MemoryKind.REGISTERED, self._address("device", array.nbytes)
        self._take(array.nbytes, kind)
        content = array.reshape(-1).view(np.uint8)[: len(backing(array.nbytes))]
        return self._made(Allocation(kind, array.nbytes, address, array.ctypes.data, content))

    def free(self, allocation: Allocation) -> None:
        if allocation.freed:
            return
        self._timeline.forbid_capture("it frees memory")
        self._watch(StepKind.FREE, allocation)
        allocation.freed = True
        allocation.backing = None
        self._used[allocation.kind] -= allocation.nbytes
        self._live.pop(id(allocation), None)
        self._roofline.l2.forget(allocation)
        self._roofline.pages.pop(id(allocation), None)
        self._timeline.host += ALLOCATE

    def free_bytes(self, kind: MemoryKind) -> int:
        if not kind.beyond_link:
            sheet = self._roofline.sheet
            used = sum(nbytes for each, nbytes in self._used.items() if not each.beyond_link)
            return max(0, sheet.memory_bytes - sheet.context_bytes - used)
        host = self.host()
        if kind.locked:
            return min(int(host.total * _PINNABLE) - host.locked, host.available)
        return host.available

    def host(self) -> HostMemory:
        total = self._roofline.sheet.host_memory_bytes
        used = sum(nbytes for kind, nbytes in self._used.items() if kind.on_host)
        locked = sum(nbytes for kind, nbytes in self._used.items() if kind.locked)
        return HostMemory(total, total - used, locked)

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        self._take(sum(sizes), MemoryKind.DEVICE)
        self._used[MemoryKind.DEVICE] -= sum(sizes)
        made: dict[int, Allocation] = {}
        for index in np.random.default_rng(seed).permutation(len(sizes)):
            made[int(index)] = self.allocate(sizes[index], MemoryKind.DEVICE)
        return [made[index] for index in range(len(sizes))]

    def make_room(self, *, unless_free: float = 1.0) -> bool:
        return False

    def settle(self) -> None:
        """Nothing: freed memory costs nothing here."""

    def kind_at(self, address: int) -> MemoryKind | None:
        for allocation in self._live.values():
            for begin in (allocation.address, allocation.host_address):
                if begin and begin <= address < begin + allocation.nbytes:
                    # A driver knows no pools.
                    return MemoryKind.DEVICE if allocation.kind.on_device else allocation.kind
        return None if is_mapped(address) is False else MemoryKind.PAGEABLE

    @contextmanager
    def near_host(self, node: int | None) -> Iterator[int | None]:
        if node not in (None, 0):
            raise Unsupported(f"numa={node}: the host has no such NUMA node; it has: 0")
        yield 0

    def allocator(self, name: str) -> Allocator:
        checks.check_allocator(name)
        return SimulatedAllocator(self, _ALLOCATED.get(name, MemoryKind.DEVICE))

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return prefix(allocation, dtype, size)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        name = getattr(like, "__name__", repr(like))
        if name != "numpy":
            raise Unsupported(f"the simulated device gives arrays of numpy alone, not of {name}")
        if allocation.kind.on_device:
            problem = "NumPy cannot see device memory; choose managed or pinned memory"
            raise Unsupported(f"{problem}, or another library")
        if allocation.kind.managed:
            self._timeline.wait(None)
            self._timeline.host += self._roofline.host_access(allocation, writes=True)
        size, row = math.prod(shape), math.prod(shape[1:])
        array = self.view(allocation, dtype, size)
        if array.size == size:
            return array.reshape(shape)
        if array.size < row:
            return array
        # Partly backed: as many whole rows as there are.
        return array[: array.size // row * row].reshape(-1, *shape[1:])


class SimulatedAllocator:
    """One way of allocating; all take the same time here."""

    def __init__(self, memory: SimulatedMemory, kind: MemoryKind) -> None:
        self._memory = memory
        self._kind = kind

    def cycle(self, nbytes: int, stream: Stream) -> None:
        self._memory.free(self._memory.allocate(nbytes, self._kind))

    def close(self) -> None:
        """Nothing is kept."""
