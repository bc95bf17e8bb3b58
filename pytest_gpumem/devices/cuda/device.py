"""A CUDA device: the protocol's verbs, each handed to the module that knows how."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from weakref import WeakSet

import cupy
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import activity, graphs, guests, holds, host, l2, links, managed
from pytest_gpumem.devices.cuda import content as contents
from pytest_gpumem.devices.cuda.allocations import Allocations
from pytest_gpumem.devices.cuda.allocators import allocator
from pytest_gpumem.devices.cuda.beacon import Beacon
from pytest_gpumem.devices.cuda.comparing import Comparing
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.counters import Counters
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, check, message, translated
from pytest_gpumem.devices.cuda.graphs import CudaGraph
from pytest_gpumem.devices.cuda.launches import Launches, copied
from pytest_gpumem.devices.cuda.nvml import ConditionReader
from pytest_gpumem.devices.cuda.streams import CudaEvent, CudaStream, current_stream, default_streams, elapsed
from pytest_gpumem.devices.parts import check_part
from pytest_gpumem.devices.persistence import check_window
from pytest_gpumem.devices.protocol import (
    Advice,
    Allocation,
    Allocator,
    DeviceError,
    Event,
    Foreign,
    Graph,
    Hold,
    HostMemory,
    Launch,
    MemoryKind,
    Stream,
    WindowSpec,
)
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import Activity


class CudaDevice:
    """One GPU through CuPy and cuda-bindings. Opening it creates (or joins) the primary context and makes the device current."""

    def __init__(self, index: int, facts: DeviceFacts) -> None:
        self._index = index
        self._facts = facts
        with translated(f"opening device {index}"):
            cupy.cuda.Device(index).use()
            runtime.free(0)  # creates the context now
        # cuda-bindings carries a runtime of its own; both share the primary context.
        check(R.cudaSetDevice(index), f"opening device {index}")
        self._compiler = Compiler()
        self._launches = Launches(self._compiler)
        self._allocations = Allocations(index, facts)
        self._content = contents.Content(self._compiler, facts)
        self._comparing = Comparing(self._compiler, facts)
        self._capturing = graphs.Capturing()
        self._holds: holds.Holds | None = None
        self._conditions = ConditionReader(facts)
        self._beacon = Beacon(index)
        self._counters = Counters(index, self._beacon)
        self._streams: WeakSet[CudaStream] = WeakSet()

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    # Streams, events, graphs

    def stream(self) -> Stream:
        with translated("creating a stream"):
            stream = CudaStream()
        self._streams.add(stream)
        return stream

    def default_streams(self) -> tuple[Stream, ...]:
        return default_streams()

    def visible_streams(self) -> tuple[Stream, ...]:
        with translated("asking for the current stream"):
            seen = (*default_streams(), current_stream(), *self._streams)
        return tuple({stream.handle: stream for stream in seen}.values())

    def event(self) -> Event:
        with translated("creating an event"):
            return CudaEvent()

    def record(self, event: Event, stream: Stream) -> None:
        try:
            self._capturing.record(cast(CudaEvent, event), cast(CudaStream, stream))
        except CUPY_ERRORS as error:
            raise DeviceError(message(error.status, str(error), "recording an event")) from error

    def elapsed(self, start: Event, end: Event) -> float:
        with translated("reading the time between two events"):
            return elapsed(cast(CudaEvent, start), cast(CudaEvent, end))

    def synchronize(self, stream: Stream | None = None) -> None:
        with translated("waiting for the device" if stream is None else "waiting for a stream"):
            if stream is None:
                runtime.deviceSynchronize()
            else:
                runtime.streamSynchronize(stream.handle)
        if self._holds is not None:
            self._holds.settle(cast("CudaStream | None", stream))

    def join(self, stream: Stream, other: Stream) -> None:
        try:  # not `translated`: samples repeat it
            mark = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(mark.ptr, other.handle)
            # The driver keeps what the wait needs: the event may go at once (CUDA Runtime API, cudaEventDestroy).
            runtime.streamWaitEvent(stream.handle, mark.ptr)
        except CUPY_ERRORS as error:
            raise DeviceError(message(error.status, str(error), "making a stream wait for another")) from error

    def capture(self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None) -> Graph:
        if window is not None:
            check_window(window, self._facts)
        return self._capturing.capture(cast(CudaStream, stream), body, window)

    def graph_windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        return graphs.windows(cast(CudaGraph, graph))

    def replay(self, graph: Graph, stream: Stream) -> None:
        with translated("replaying a graph"):
            self._capturing.replay(cast(CudaGraph, graph), cast(CudaStream, stream))

    def hold(self, stream: Stream, timeout: float) -> Hold:
        with translated("holding a stream"):
            if self._holds is None:
                self._holds = holds.Holds(self._compiler.private(holds.SOURCE, "gpumem_hold"), self._allocations)
            return self._holds.hold(cast(CudaStream, stream), timeout)

    def now(self) -> float:
        return time.perf_counter()

    # Work

    def compile(self, launch: Launch) -> None:
        if launch.kernel.source is not None:
            self._launches.prepared(launch)

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        queue = cast(CudaStream, stream)
        if window is not None:
            check_window(window, self._facts)
        if launch.kernel.source is None:
            contents.copy(*copied(launch), queue)
            return
        prepared = self._launches.prepared(launch)
        try:  # not `translated`: this is what samples repeat
            prepared.queue(queue, window)
        except CUPY_ERRORS as error:
            raise DeviceError(message(error.status, str(error), f"launching kernel {launch.kernel.name!r}")) from error

    def call(self, foreign: Foreign, stream: Stream) -> None:
        with guests.current(self._index, cast(CudaStream, stream)):
            foreign.function()

    # Memory

    def allocate(
        self, nbytes: int, kind: MemoryKind, *, mapped: bool = True, write_combined: bool = False, portable: bool = True
    ) -> Allocation:
        return self._allocations.allocate(nbytes, kind, mapped=mapped, write_combined=write_combined, portable=portable)

    def part(self, allocation: Allocation, offset: int, nbytes: int) -> Allocation:
        check_part(allocation, offset, nbytes)
        device, on_host = (at + offset if at else 0 for at in (allocation.address, allocation.host_address))
        # The whole stands behind it, so that NumPy's memory outlives a part of it.
        return Allocation(allocation.kind, nbytes, device, on_host, backing=allocation)

    def allocator(self, name: str) -> Allocator:
        return allocator(name, self._index)

    def memory_kind(self, address: int) -> MemoryKind | None:
        return self._allocations.memory_kind(address)

    def host_memory(self) -> HostMemory:
        return self._allocations.host_memory()

    def near_host(self, node: int | None) -> AbstractContextManager[int | None]:
        return host.on_node(node, links.nearest_node(self._index))

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        return links.peer_access(self._index, allowed)

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        return self._allocations.scatter(sizes, seed)

    def entropy(self, seed: int) -> int:
        return secrets.randbits(64)

    def make_room(self) -> None:
        self._allocations.drop_spare()

    def settle(self) -> None:
        self._allocations.settle()

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        return self._allocations.adopt(array, register=register)

    def free(self, allocation: Allocation) -> None:
        self._allocations.free(allocation)

    def free_bytes(self, kind: MemoryKind) -> int:
        return self._allocations.free_bytes(kind)

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return self._allocations.view(allocation, dtype, size)

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return contents.to_host(allocation, dtype, size)

    def from_host(self, allocation: Allocation, content: Any) -> None:
        contents.from_host(allocation, content)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        return guests.guest(self._allocations, allocation, dtype, shape, like)

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        if allocation.kind is MemoryKind.PEER:  # a kernel of this GPU may not reach it
            self._fill_peer(allocation, dtype, seed, cast(CudaStream, stream))
            return
        self._content.fill_random(allocation, dtype, seed, cast(CudaStream, stream))

    def _fill_peer(self, allocation: Allocation, dtype: str, seed: int, stream: CudaStream) -> None:
        here = self.allocate(allocation.nbytes, MemoryKind.DEVICE)
        try:
            self._content.fill_random(here, dtype, seed, stream)
            contents.copy(allocation, here, allocation.nbytes, stream)
            self.synchronize(stream)
        finally:
            self.free(here)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream) -> None:
        self._content.fill_cycle(allocation, node_bytes, seed, cast(CudaStream, stream))

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        if allocation.kind is MemoryKind.PEER:
            self.synchronize(stream)
            with translated("poisoning the other GPU's memory"):
                links.set_bytes_on_peer(allocation.address, 0xFF, allocation.nbytes, self._allocations.peer)
            return
        self._content.poison(allocation, cast(CudaStream, stream))

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
        contents.copy(destination, source, nbytes, cast(CudaStream, stream))

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        return self._comparing.mismatch(actual, expected, relative_tolerance)

    # Persisting L2

    def set_aside(self) -> int:
        return l2.set_aside()

    def request_set_aside(self, nbytes: int) -> int:
        return l2.request_set_aside(nbytes, self._facts)

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        l2.set_window(cast(CudaStream, stream), window, self._facts)

    def window(self, stream: Stream) -> WindowSpec | None:
        return l2.window(cast(CudaStream, stream))

    def reset_persisting(self) -> None:
        l2.reset_persisting()

    # Managed memory

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        managed.prefetch(allocation, self._index, to_host, cast(CudaStream, stream), self._facts)

    def oversubscribe(self, nbytes: int) -> Allocation:
        return self._allocations.oversubscribe(nbytes)

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        managed.advise(allocation, self._index, advice, to_host, self._facts, on=on)

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        managed.discard(allocation, cast(CudaStream, stream), self._facts)

    def count_pages(self, work: Callable[[], None]) -> PageCounts:
        return self._counters.count(work)

    def count_activity(self, work: Callable[[], None]) -> Activity:
        return activity.count(self._counters, work)

    # Conditions

    def conditions(self) -> Conditions:
        return self._conditions.read()

    def close(self) -> None:
        try:
            if self._holds is not None:
                self._holds.release_all()
            runtime.deviceSynchronize()
            self._beacon.close()
            self._allocations.drop_spare()
        except CUPY_ERRORS:
            pass  # a lost context: there is nothing left to free
        self._holds = None
        self._conditions.close()
