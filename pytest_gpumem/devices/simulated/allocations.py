"""The simulated device's memory: placed, freed, counted; and what allocating costs the host."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_gpumem.devices.checks import (
    check_allocator,
    check_host_array,
    check_oversubscription,
    check_size,
    part_of,
)
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
from pytest_gpumem.devices.simulated.machine import SimulatedMachine
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.streams import ALLOCATE, Facet, Timeline
from pytest_gpumem.records.what_ran import Step, StepKind

SMALL_BYTES = 2**20
"""Below this an allocation shares a 2 MiB page with others; from here on it starts on a page of
its own."""
SMALL_ALIGNMENT = 512
PAGE_BYTES = 2 * 2**20


class _Heap:
    """Free ranges of one address range, lowest first."""

    def __init__(self, base: int, alignment: int) -> None:
        self._free: list[tuple[int, int]] = [(base, 2**44)]
        self._alignment = alignment
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(start + size, length - size)] if length > size else []
                self._taken[start] = size
                return start
        raise MemoryError("the simulated address range is full")

    def give_back(self, address: int) -> bool:
        size = self._taken.pop(address, None)
        if size is None:
            return False
        insort(self._free, (address, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
        return True


class AddressSpace:
    """Addresses that look like a driver's: distinct, aligned, used again after a free."""

    def __init__(self, base: int) -> None:
        self._small = _Heap(base, SMALL_ALIGNMENT)
        self._large = _Heap(base + 2**45, PAGE_BYTES)

    def take(self, nbytes: int) -> int:
        """An address aligned to 512 bytes, or to 2 MiB for 1 MiB and more."""
        return (self._small if nbytes < SMALL_BYTES else self._large).take(nbytes)

    def give_back(self, address: int) -> None:
        _ = self._small.give_back(address) or self._large.give_back(address)


_PINNABLE = 0.9  # share of the host's memory that the system lets one process lock


@dataclass(frozen=True)
class Cost:
    """Virtual seconds of one allocation and its free."""

    kind: MemoryKind
    by_driver: bool  # every cycle goes to the driver, as `allocate` and `free` of the device do
    call: float = 0.0  # where it does not: the calls themselves
    first: float = 0.0  # where it does not: growing the pool, once for each size, or after every synchronisation that empties it
    keeps: bool = False  # memory stays in the pool across synchronisations


COSTS = {
    "cudaMalloc": Cost(MemoryKind.DEVICE, by_driver=True),
    "cudaMallocAsync": Cost(MemoryKind.DEVICE, by_driver=False, call=6e-6, first=130e-6),
    "cudaMallocAsync, kept": Cost(
        MemoryKind.DEVICE, by_driver=False, call=6e-6, first=130e-6, keeps=True
    ),
    "CuPy pool": Cost(MemoryKind.DEVICE, by_driver=False, call=5.5e-6, first=120e-6, keeps=True),
    "cudaHostAlloc": Cost(MemoryKind.PINNED, by_driver=True),
    "cudaHostRegister": Cost(MemoryKind.REGISTERED, by_driver=True),
}


class SimulatedMemory(Facet):
    """Allocates memory of every kind and counts it."""

    def __init__(self, timeline: Timeline, machine: SimulatedMachine) -> None:
        super().__init__(timeline, machine)
        self._live: dict[int, Allocation] = {}
        self._used = dict.fromkeys(MemoryKind, 0)
        self._device_addresses = AddressSpace(0x7F00_0000_0000)
        self._host_addresses = AddressSpace(0x5500_0000_0000)

    def allocate(
        self,
        nbytes: int,
        kind: MemoryKind,
        *,
        mapped: bool = True,
        write_combined: bool = False,
        portable: bool = True,
    ) -> Allocation:
        self._timeline.forbid_capture("it allocates memory")
        check_size(nbytes)
        if kind.on_peer:
            raise Unsupported("one GPU is simulated: there is no peer to copy to")
        self._take(nbytes, kind)
        if kind.on_host:
            host_address = self._host_addresses.take(nbytes)
            address = host_address if kind.locked and mapped else 0
        else:
            address = self._device_addresses.take(nbytes)
            host_address = address if kind.managed else 0
        if kind.locked and kind.traits.adopted:
            address = self._device_addresses.take(nbytes)
        allocation = self._made(Allocation(kind, nbytes, address, host_address, backing(nbytes)))
        if kind.managed:
            self._machine.pages[id(allocation)] = Pages(nbytes)
        if write_combined:
            self._machine.write_combined.add(id(allocation))
        self._watch(StepKind.ALLOCATION, allocation)
        return allocation

    def _made(self, allocation: Allocation) -> Allocation:
        self._live[id(allocation)] = allocation
        self._timeline.host += ALLOCATE + self._locking(allocation.nbytes, allocation.kind)
        return allocation

    def pooled(self, nbytes: int, pool: Callable[[int], Any]) -> Allocation:
        raise Unsupported("the simulated device has no memory of other libraries' pools")

    def _watch(self, kind: StepKind, allocation: Allocation) -> None:
        self._timeline.watch(Step(kind, memory=memory_name(allocation), nbytes=allocation.nbytes))

    def oversubscribe(self, nbytes: int) -> Allocation:
        """Managed memory, whatever the device has free; half of the host's memory at most."""
        self._timeline.forbid_capture("it allocates memory")
        check_oversubscription(nbytes, self._machine.sheet.host_memory_bytes)
        room = max(0, self.free_bytes(MemoryKind.MANAGED))
        self._used[MemoryKind.MANAGED] += nbytes
        address = self._device_addresses.take(nbytes)
        allocation = self._made(
            Allocation(MemoryKind.MANAGED, nbytes, address, address, backing(nbytes))
        )
        self._machine.pages[id(allocation)] = Pages(nbytes, room=room)
        return allocation

    def _locking(self, nbytes: int, kind: MemoryKind) -> float:
        """Seconds for locking pages: the system goes through them one by one."""
        if not kind.locked:
            return 0.0
        sheet = self._machine.sheet
        return nbytes / (sheet.registering if kind is MemoryKind.REGISTERED else sheet.page_locking)

    def part(self, allocation: Allocation, offset: int, nbytes: int) -> Allocation:
        part = part_of(allocation, offset, nbytes)
        part.backing = backed(allocation)[offset : offset + nbytes]
        return part

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        self._timeline.forbid_capture("it registers host memory")
        check_host_array(array)
        kind = MemoryKind.REGISTERED if register else MemoryKind.PAGEABLE
        self._take(array.nbytes, kind)
        address = self._device_addresses.take(array.nbytes) if register else 0
        allocation = Allocation(
            kind, array.nbytes, address, array.ctypes.data, backing(array.nbytes, array)
        )
        self._live[id(allocation)] = allocation
        self._timeline.host += ALLOCATE + self._locking(array.nbytes, kind) if register else 0.0
        return allocation

    def free(self, allocation: Allocation) -> None:
        if allocation.freed:
            return
        self._timeline.forbid_capture("it frees memory")
        self._watch(StepKind.FREE, allocation)
        self._timeline.run()
        allocation.freed = True
        self._used[allocation.kind] -= allocation.nbytes
        self._machine.l2.forget(allocation)
        self._live.pop(id(allocation), None)
        self._machine.pages.pop(id(allocation), None)
        self._machine.write_combined.discard(id(allocation))
        self._device_addresses.give_back(allocation.address)
        self._host_addresses.give_back(allocation.host_address)
        allocation.backing = None
        self._timeline.host += ALLOCATE

    def free_bytes(self, kind: MemoryKind) -> int:
        if not kind.beyond_link:
            sheet = self._machine.sheet
            used = sum(nbytes for each, nbytes in self._used.items() if not each.beyond_link)
            return max(0, sheet.memory_bytes - sheet.context_bytes - used)
        host = self.host()
        return (
            min(int(host.total * _PINNABLE) - host.locked, host.available)
            if kind.locked
            else host.available
        )

    def _take(self, nbytes: int, kind: MemoryKind) -> None:
        free = self.free_bytes(kind)
        if nbytes > free:
            raise OutOfMemory(
                f"{nbytes / 2**30:.3g} GiB of {kind.value} memory asked for, {free / 2**30:.3g} GiB are free on the simulated device"
            )
        self._used[kind] += nbytes

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        needed, free = sum(sizes), self.free_bytes(MemoryKind.DEVICE)
        if needed > free:
            raise OutOfMemory(
                f"{needed / 2**30:.3g} GiB asked for, {free / 2**30:.3g} GiB are free on the simulated device"
            )
        made: dict[int, Allocation] = {}
        for which in np.random.default_rng(seed).permutation(len(sizes)):
            made[int(which)] = self.allocate(sizes[which], MemoryKind.DEVICE)
        return [made[which] for which in range(len(sizes))]

    def make_room(self, *, unless_free: float = 1.0) -> bool:
        """Nothing is kept here."""
        return False

    def settle(self) -> None:
        """Nothing: freed memory costs nothing here."""

    def kind_at(self, address: int) -> MemoryKind | None:
        for allocation in self._live.values():
            for start in (allocation.address, allocation.host_address):
                if start and start <= address < start + allocation.nbytes:
                    return (
                        MemoryKind.DEVICE if allocation.kind.on_device else allocation.kind
                    )  # a driver knows no pools
        return MemoryKind.PAGEABLE if is_mapped(address) in (True, None) else None

    def host(self) -> HostMemory:
        locked = sum(nbytes for kind, nbytes in self._used.items() if kind.locked)
        used = sum(nbytes for kind, nbytes in self._used.items() if kind.on_host)
        total = self._machine.sheet.host_memory_bytes
        return HostMemory(total, total - used, locked)

    @contextmanager
    def near_host(self, node: int | None) -> Iterator[int | None]:
        if node not in (None, 0):
            raise Unsupported(f"numa={node}: the host has no such NUMA node; it has: 0")
        yield 0

    def allocator(self, name: str) -> Allocator:
        check_allocator(name)
        return SimulatedAllocator(self, self._timeline, name)

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return prefix(allocation, dtype, size)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        name = getattr(like, "__name__", None)
        if name != "numpy":
            asked = name if isinstance(name, str) else repr(like)
            raise Unsupported(f"the simulated device gives arrays of numpy alone, not of {asked}")
        if allocation.kind.on_device:
            raise Unsupported(
                "NumPy cannot see device memory; choose managed or pinned memory, or another library"
            )
        if allocation.kind.managed:
            self._timeline.wait()
            self._timeline.host += self._machine.host_access(allocation, writes=True)
        array = self.view(allocation, dtype, math.prod(shape))
        if array.size == math.prod(shape):
            return array.reshape(shape)
        # Partly backed: as many whole rows as there are.
        row = math.prod(shape[1:])
        return (
            array[: array.size // row * row].reshape(-1, *shape[1:]) if array.size >= row else array
        )


class SimulatedAllocator:
    """One way of allocating on the simulated device."""

    def __init__(self, memory: SimulatedMemory, timeline: Timeline, name: str) -> None:
        self._memory = memory
        self._timeline = timeline
        self._cost = COSTS[name]
        self._kept = 0

    def cycle(self, nbytes: int, stream: Stream) -> None:
        memory, cost = self._memory, self._cost
        if cost.by_driver:
            memory.free(memory.allocate(nbytes, cost.kind))
            return
        if nbytes > memory.free_bytes(cost.kind):
            memory.allocate(nbytes, cost.kind)  # raises, in its own words
        if nbytes > self._kept:
            self._timeline.host += cost.first
        self._kept = max(self._kept, nbytes) if cost.keeps else 0
        self._timeline.host += cost.call

    def close(self) -> None:
        self._kept = 0
