"""The simulated device's memory and its content. The first bytes of an allocation are real: its
`backing` is a NumPy array of bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_gpumem.devices import protocol, values
from pytest_gpumem.devices.memory_kinds import MemoryKind, is_mapped
from pytest_gpumem.devices.protocol import Advice, Allocation, Unsupported
from pytest_gpumem.devices.simulated import streams
from pytest_gpumem.devices.simulated.roofline import Pages
from pytest_gpumem.devices.simulated.streams import Facet, Operation, Timeline
from pytest_gpumem.kernels.kernel import Access
from pytest_gpumem.kernels.latency import NODE_BYTES, random_cycle
from pytest_gpumem.records.what_ran import Step
from pytest_gpumem.units import KiB, MiB

BACKED_BYTES = 256 * KiB  # the largest allocation that is real as a whole
PREFIX_BYTES = 32 * KiB  # what is real of larger ones: each launch computes its result
NO_PEER = "one GPU is simulated: there is no peer to copy to"

_PINNABLE = 0.9  # share of the host's memory that the system lets a process lock
_ALLOCATED = {"cudaHostAlloc": MemoryKind.PINNED, "cudaHostRegister": MemoryKind.REGISTERED}
_ENGINES = {"D2H": streams.DEVICE_TO_HOST, "D2D": streams.COMPUTE}


def _backing(nbytes: int) -> NDArray[np.uint8]:
    if nbytes > BACKED_BYTES:
        nbytes = min(nbytes, PREFIX_BYTES)
    return np.zeros(nbytes, np.uint8)


def _backed(allocation: Allocation) -> NDArray[np.uint8]:
    if allocation.freed:
        raise protocol.DeviceError("the memory was freed")
    whole = allocation.backing
    if isinstance(whole, Allocation):
        offset = allocation.address - whole.address or allocation.host_address - whole.host_address
        return _backed(whole)[offset : offset + allocation.nbytes]
    memory: NDArray[np.uint8] = whole
    return memory


def _direction(source: Allocation, destination: Allocation) -> str:
    begin = "H" if source.kind.on_host else "D"
    end = "H" if destination.kind.on_host else "D"
    return f"{begin}2{end}"


def prefix(allocation: Allocation, dtype: str, size: int) -> NDArray[Any]:
    """An array over the first `size` elements, or over those that are backed."""
    memory, itemsize = _backed(allocation), np.dtype(dtype).itemsize
    return memory[: min(size, len(memory) // itemsize) * itemsize].view(dtype)


def memory_name(allocation: Allocation) -> str:
    """The kind of an allocation as in `Step.memory`."""
    return "pinned" if allocation.kind.locked else allocation.kind.value


class SimulatedMemory(Facet, protocol.DeviceMemory):
    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._live: dict[int, Allocation] = {}
        self._ends = {"device": 0x7F00_0000_0000, "host": 0x5500_0000_0000}

    def _address(self, side: str, nbytes: int) -> int:
        """A new address, aligned to 512 bytes, or to 2 MiB for 1 MiB and more."""
        alignment = 512 if nbytes < MiB else 2 * MiB
        address = -(-self._ends[side] // alignment) * alignment
        self._ends[side] = address + nbytes
        return address

    def allocate(
        self, nbytes: int, kind: MemoryKind, *, mapped: bool = True, **flags: bool
    ) -> Allocation:
        if kind.on_peer:
            raise Unsupported(NO_PEER)
        protocol.check_free(nbytes, kind, self.free_bytes(kind))
        return self._allocate(nbytes, kind, mapped)

    def _allocate(self, nbytes: int, kind: MemoryKind, mapped: bool = False) -> Allocation:
        address = host_address = 0
        if kind.on_host:
            host_address = self._address("host", nbytes)
        if not kind.on_host or kind is MemoryKind.REGISTERED:
            address = self._address("device", nbytes)
        elif kind.locked and mapped:
            address = host_address
        if kind.managed:
            host_address = address
        return self._made(Allocation(kind, nbytes, address, host_address, _backing(nbytes)))

    def _made(self, allocation: Allocation) -> Allocation:
        self._timeline.call(streams.ALLOCATE, "it allocates memory")
        self._live[id(allocation)] = allocation
        if allocation.kind.managed:
            self._roofline.pages[id(allocation)] = Pages(self._roofline)
        return allocation

    def oversubscribe(self, nbytes: int) -> Allocation:
        protocol.check_oversubscription(nbytes, self._roofline.sheet.host_memory_bytes)
        return self._allocate(nbytes, MemoryKind.MANAGED)

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        kind, address = MemoryKind.PAGEABLE, 0
        if register:
            kind, address = MemoryKind.REGISTERED, self._address("device", array.nbytes)
        protocol.check_free(array.nbytes, kind, self.free_bytes(kind))
        content = array.reshape(-1).view(np.uint8)[: len(_backing(array.nbytes))]
        return self._made(Allocation(kind, array.nbytes, address, array.ctypes.data, content))

    def free(self, allocation: Allocation) -> None:
        if allocation.freed:
            return
        self._timeline.call(streams.ALLOCATE, "it frees memory")
        allocation.freed = True
        allocation.backing = None
        del self._live[id(allocation)]
        self._roofline.forget(allocation)
        self._roofline.pages.pop(id(allocation), None)

    def free_bytes(self, kind: MemoryKind) -> int:
        if not kind.beyond_link:
            sheet = self._roofline.sheet
            used = sum(each.nbytes for each in self._live.values() if not each.kind.beyond_link)
            return max(0, sheet.memory_bytes - sheet.context_bytes - used)
        total, locked = self.host()
        available = total - sum(each.nbytes for each in self._live.values() if each.kind.on_host)
        return min(int(total * _PINNABLE) - locked, available) if kind.locked else available

    def host(self) -> tuple[int, int]:
        locked = sum(each.nbytes for each in self._live.values() if each.kind.locked)
        return self._roofline.sheet.host_memory_bytes, locked

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        protocol.check_free(sum(sizes), MemoryKind.DEVICE, self.free_bytes(MemoryKind.DEVICE))
        made: dict[int, Allocation] = {}
        for index in np.random.default_rng(seed).permutation(len(sizes)):
            made[index] = self.allocate(sizes[index], MemoryKind.DEVICE)
        return [made[index] for index in sorted(made)]

    def kind_at(self, address: int) -> MemoryKind | None:
        for allocation in self._live.values():
            for begin in (allocation.address, allocation.host_address):
                if begin and begin <= address < begin + allocation.nbytes:
                    # A driver knows no pools.
                    return MemoryKind.DEVICE if allocation.kind.on_device else allocation.kind
        return MemoryKind.PAGEABLE if is_mapped(address) else None

    def allocator(self, name: str) -> AbstractContextManager[protocol.AllocFree]:
        """All take the same time."""
        kind = _ALLOCATED.get(name, MemoryKind.DEVICE)

        def cycle(nbytes: int, stream: Any) -> None:
            self.free(self.allocate(nbytes, kind))

        return nullcontext(cycle)

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return prefix(allocation, dtype, size)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        name = getattr(like, "__name__", repr(like))
        if name != "numpy":
            raise Unsupported(f"the simulated device gives arrays of numpy alone, not of {name}")
        if allocation.kind.on_device:
            raise Unsupported("NumPy cannot see device memory; choose managed or pinned memory")
        if allocation.kind.managed:
            self._touched_by_host(allocation)
        size, row = math.prod(shape), math.prod(shape[1:])
        array = prefix(allocation, dtype, size)
        return array[: array.size // row * row].reshape(-1, *shape[1:])


class SimulatedContent(Facet, protocol.Content):
    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Any) -> None:
        target = prefix(allocation, values.plain_type(dtype)[0], allocation.nbytes)
        self._fill(allocation, partial(values.fill, target, seed), stream)

    def fill_cycle(self, allocation: Allocation, stream: Any) -> None:
        words = NODE_BYTES // 4
        nodes = prefix(allocation, "i4", allocation.nbytes)
        nodes = nodes[: len(nodes) // words * words].reshape(-1, words)

        def fill() -> None:
            nodes[:, 0] = random_cycle(len(nodes))

        self._fill(allocation, fill, stream)

    def poison(self, allocation: Allocation, stream: Any) -> None:
        self._fill(allocation, partial(_backed(allocation).fill, 0xFF), stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Any) -> None:
        nbytes = allocation.nbytes
        if not allocation.address:
            self._timeline.forbid_capture("it writes memory on the host")
            self._timeline.wait(stream)
            effect()
            return
        traffic = self._roofline.traffic([(Access("", "write", nbytes, nbytes), allocation)])
        ran = Step("memset", memory=memory_name(allocation), nbytes=nbytes)
        work = Operation(streams.COMPUTE, partial(self._roofline.kernel, traffic), effect, ran)
        self._timeline.queue(stream, work, streams.LAUNCH)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Any) -> None:
        protocol.check_copy(destination, source, nbytes)
        target, origin = _backed(destination)[:nbytes], _backed(source)[:nbytes]
        real = min(len(target), len(origin))
        waits = destination.kind.pageable or source.kind.pageable
        if waits:
            self._timeline.forbid_capture("a copy with pageable memory makes the host wait")
        direction = _direction(source, destination)
        ran = Step(
            "copy",
            direction,
            source=memory_name(source),
            memory=memory_name(destination),
            nbytes=nbytes,
        )
        seconds = partial(self._roofline.copy, destination, source, nbytes)
        effect = partial(np.copyto, target[:real], origin[:real])
        engine = _ENGINES.get(direction, streams.HOST_TO_DEVICE)  # also "H2H"
        self._timeline.queue(stream, Operation(engine, seconds, effect, ran), streams.LAUNCH)
        if waits:
            self._timeline.wait(stream)

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._timeline.forbid_capture("it reads memory on the host")
        content = prefix(allocation, dtype, size)
        self._touched_by_host(allocation)
        return content.copy()

    def copies(self, wanted: Sequence[tuple[Allocation, str, int]]) -> list[Any]:
        return [self.to_host(*each) for each in wanted]

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._timeline.forbid_capture("it writes memory from the host")
        memory = _backed(allocation)
        array = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._touched_by_host(allocation)
        memory[: array.nbytes] = array[: len(memory)]

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Any) -> None:
        self._timeline.forbid_capture("a prefetch cannot be captured")
        engine = streams.DEVICE_TO_HOST if to_host else streams.HOST_TO_DEVICE
        work = Operation(engine, partial(self._roofline.prefetch, allocation, to_host))
        self._timeline.queue(stream, work, streams.LAUNCH)

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        self._timeline.call()
        self._roofline.pages[id(allocation)].advise(advice, to_host, on=on)

    def discard(self, allocation: Allocation, stream: Any) -> None:
        """Take the call, and keep the content."""
        self._timeline.call(streams.LAUNCH, "a discard cannot be captured")

    def mismatch(self, actual: Any, expected: Any, tolerance: float) -> tuple[int, int] | None:
        left = np.ascontiguousarray(actual).reshape(-1)
        right = np.ascontiguousarray(expected, dtype=left.dtype).reshape(-1)
        size = min(left.size, right.size)  # of what is backed
        return values.mismatch(left[:size], right[:size], tolerance)
