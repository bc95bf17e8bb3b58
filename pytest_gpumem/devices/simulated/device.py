"""A simulated device: the protocol's verbs on virtual time.

Results are computed in the order of the calls, when work is queued: a valid order, because streams meet only where the host waits.
Times are found when the host waits for them. Memory is backed by its first bytes only (`content.BACKED_BYTES`), while the model of
the time sees its full size.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from pytest_gpumem.devices.parts import check_part
from pytest_gpumem.devices.persistence import check_window, unsupported
from pytest_gpumem.devices.process_memory import is_mapped
from pytest_gpumem.devices.protocol import (
    Advice,
    Allocation,
    Allocator,
    CannotCapture,
    Device,
    DeviceError,
    Event,
    Foreign,
    Graph,
    Hold,
    HoldExpired,
    HostMemory,
    Launch,
    MemoryKind,
    OutOfMemory,
    Stream,
    Unsupported,
    WindowSpec,
)
from pytest_gpumem.devices.simulated.addresses import AddressSpace
from pytest_gpumem.devices.simulated.allocators import COSTS, SimulatedAllocator
from pytest_gpumem.devices.simulated.content import Computation, Content, content
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.engine import (
    COMPUTE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Engine,
    HoldItem,
    Item,
    Mark,
    Record,
    SimulatedEvent,
    SimulatedStream,
    Wait,
    Work,
)
from pytest_gpumem.devices.simulated.memory import L2
from pytest_gpumem.devices.simulated.noise import Noise
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.devices.simulated.timing import Timing, work_of
from pytest_gpumem.devices.simulated.timing import Work as LaunchWork
from pytest_gpumem.kernels.kernel import Access, LaunchShape
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse

# Virtual seconds that a call takes on the host, from Python. Fit set: event pairs without a hold read 3 to 6 us above held ones.
_RECORD = 1.0e-6
_LAUNCH = 4.5e-6
_REPLAY = 8.0e-6
_SYNCHRONIZE = 4.0e-6
_ALLOCATE = 60.0e-6
_CALL = 0.2e-6
_SUBMIT = 2.0e-6
"""From a host call's end to the start of its work on an idle device."""
_IDLE = 0.1
"""Seconds without work after which a device has to warm up again."""
_JOIN = 1.5e-6
"""An event recorded and waited for."""
_PINNABLE = 0.9
"""Share of the host's memory that the system lets one process lock."""
_WRITE_COMBINED_READ = 0.02
"""Speed of host reads of write-combined memory over cached memory: each one bypasses the caches."""
_PREPARED = 512
"""Launches kept ready."""


@dataclass(eq=False)
class _Step:
    """One piece of queued work: what it does to memory, and how long it takes."""

    item: Item
    effect: Callable[[], None] | None = None


@dataclass(eq=False)
class SimulatedGraph:
    """Captured steps; each replay does all of them again."""

    steps: list[_Step]
    windows: tuple[WindowSpec | None, ...]
    """The window of each of its kernels."""


@dataclass(eq=False)
class _Capture:
    """A capture that is under way."""

    stream: SimulatedStream
    window: WindowSpec | None
    """Of every kernel, where one is given."""
    steps: list[_Step] = field(default_factory=list)
    windows: list[WindowSpec | None] = field(default_factory=list)


class SimulatedHold:
    """A stream that waits."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream, item: HoldItem) -> None:
        self._device = device
        self._stream = stream
        self._item = item

    def release(self) -> None:
        self._device._release(self._stream, self._item)


@dataclass(frozen=True)
class _Prepared:
    """A launch made ready: its result and its work."""

    launch: Launch
    computation: Computation
    duration: Callable[[WindowSpec | None], Callable[[float], float]]
    engine: str
    waits: bool
    """The host waits for it: a copy with pageable memory."""
    use: KernelUse | CopyUse
    """What a watcher is told of it."""


class SimulatedDevice:
    """A device made after a datasheet.

    Args:
        datasheet: what it is made of.
        seed: of its noise. The same seed and the same calls give exactly the same times.
    """

    def __init__(self, datasheet: Datasheet, *, seed: int = 0) -> None:
        self._sheet = datasheet
        self._facts = datasheet.facts()
        self._engine = Engine(submit=_SUBMIT, record=datasheet.record, visibility=datasheet.visibility, tick=datasheet.tick)
        self._l2 = L2(datasheet)
        self._timing = Timing(datasheet, self._l2)
        self._noise = Noise(seed)
        self._host = 0.0
        self._busy_until = 0.0
        self._windows: dict[SimulatedStream, WindowSpec | None] = {}
        self._pages: dict[int, Pages] = {}
        self._write_combined: set[int] = set()
        self._live: dict[int, Allocation] = {}
        self._used = dict.fromkeys(MemoryKind, 0)
        self._device_addresses = AddressSpace(0x7F00_0000_0000)
        self._host_addresses = AddressSpace(0x5500_0000_0000)
        self._prepared: OrderedDict[int, _Prepared] = OrderedDict()
        self._capturing: _Capture | None = None
        self._cannot: CannotCapture | None = None
        self._watching: list[KernelUse | CopyUse] | None = None

    @property
    def facts(self) -> DeviceFacts:
        return self._facts

    # Streams, events, graphs

    def stream(self) -> Stream:
        self._host += _CALL
        return self._engine.stream()

    def default_streams(self) -> tuple[Stream, ...]:
        return ()

    def visible_streams(self) -> tuple[Stream, ...]:
        return tuple(self._windows)

    def event(self) -> Event:
        self._host += _CALL
        return SimulatedEvent()

    def record(self, event: Event, stream: Stream) -> None:
        self._queue(_own_stream(stream), _Step(Record(_own_event(event))), _RECORD)

    def elapsed(self, start: Event, end: Event) -> float:
        first, last = _own_event(start), _own_event(end)
        if first.pending or last.pending:
            self._engine.run()
        times = []
        for which, event in (("first", first), ("second", last)):
            if event.time is None and not event.pending:
                raise DeviceError(f"the {which} event was never recorded")
            if event.pending or event.time is None or event.time > self._host:
                raise DeviceError(f"the {which} event has not completed: synchronize before reading the time")
            times.append(event.time)
        return times[1] - times[0]

    def synchronize(self, stream: Stream | None = None) -> None:
        self._forbid_capture("it synchronises")
        streams = self._engine.streams if stream is None else [_own_stream(stream)]
        self._wait(streams)
        if any(s.expired for s in streams):
            for s in streams:
                s.expired = False
            raise HoldExpired("a held stream ran into its time-out: the work between waited for the device")

    def join(self, stream: Stream, other: Stream) -> None:
        waiting, marked = _own_stream(stream), _own_stream(other)
        if waiting is marked:
            return
        if self._capturing is not None:
            self._refuse("it uses another stream")
        mark = Mark(marked)
        self._queue(marked, _Step(mark), _JOIN)
        self._queue(waiting, _Step(Wait(mark)), 0.0)

    def capture(self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None) -> Graph:
        if self._capturing is not None:
            raise CannotCapture("another capture is under way")
        if window is not None:
            check_window(window, self._facts)
        capture = _Capture(_own_stream(stream), window)
        self._capturing, self._cannot = capture, None
        try:
            body()
        except Exception as error:
            # A function may dress the refusal up in an error of its own.
            if self._cannot is not None and self._cannot is not error:
                raise self._cannot from error
            raise
        finally:
            self._capturing = None
        if self._cannot is not None:
            raise self._cannot
        if not capture.steps:
            raise CannotCapture("it queued nothing on the stream that is captured")
        return SimulatedGraph(capture.steps, tuple(capture.windows))

    def graph_windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        if not isinstance(graph, SimulatedGraph):
            raise DeviceError("the graph belongs to another device")
        return graph.windows

    def _window_of_kernel(self, stream: SimulatedStream, own: WindowSpec | None = None) -> WindowSpec | None:
        """The window of a kernel that is queued now: its graph's, else its launch's own, else its stream's."""
        if own is None:
            own = self._windows.get(stream)
        if self._capturing is not None:
            if self._capturing.window is not None:
                own = self._capturing.window
            self._capturing.windows.append(own)
        return own

    def replay(self, graph: Graph, stream: Stream) -> None:
        if not isinstance(graph, SimulatedGraph):
            raise DeviceError("the graph belongs to another device")
        self._forbid_capture("it replays a graph")
        own = _own_stream(stream)
        self._host += _REPLAY
        for step in graph.steps:
            if step.effect is not None:
                step.effect()
            self._engine.queue(own, step.item, self._host)

    def hold(self, stream: Stream, timeout: float) -> Hold:
        self._forbid_capture("it holds the stream")
        own, item = _own_stream(stream), HoldItem(timeout)
        self._queue(own, _Step(item), _LAUNCH)
        return SimulatedHold(self, own, item)

    def now(self) -> float:
        self._host += _CALL
        return self._host

    def _release(self, stream: SimulatedStream, item: HoldItem) -> None:
        self._host += _CALL
        self._engine.run()
        if item.released is None:
            item.released = self._host
            if self._engine.held(stream) is item:
                over = self._engine.hold_start(stream) + item.timeout
                if self._host > over:
                    item.released, item.expired = over, True

    def _wait(self, streams: Sequence[SimulatedStream]) -> None:
        """The host waits for streams; a hold that nobody released runs into its time-out."""
        self._engine.run()
        for stream in streams:
            while (held := self._engine.holding(stream)) is not None:
                item = self._engine.held(held)
                assert item is not None
                item.released, item.expired = self._engine.hold_start(held) + item.timeout, True
                self._engine.run()
            self._host = max(self._host, stream.ready)
        self._host += _SYNCHRONIZE

    def _queue(self, stream: SimulatedStream, step: _Step, cost: float) -> None:
        """Do a step in stream order: now, or at every replay of the graph that is being captured."""
        if self._capturing is not None:
            if stream is not self._capturing.stream:
                self._refuse("it uses another stream")
            self._capturing.steps.append(step)
            return
        self._host += cost
        if step.effect is not None:
            step.effect()
        self._engine.queue(stream, step.item, self._host)

    def _forbid_capture(self, reason: str) -> None:
        if self._capturing is not None:
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        if self._cannot is None:
            self._cannot = CannotCapture(reason)
        raise self._cannot

    # Work

    def compile(self, launch: Launch) -> None:
        kernel, dtype = launch.kernel, next(iter(launch.call.arrays.values())).dtype
        if dtype not in kernel.dtypes and kernel.source is not None:
            raise DeviceError(f"{kernel.name} is not made for {dtype}; accepted: {', '.join(kernel.dtypes)}")

    def launch(self, launch: Launch, stream: Stream, *, window: WindowSpec | None = None) -> None:
        own = _own_stream(stream)
        if window is not None:
            check_window(window, self._facts)
        for name, allocation in launch.arrays.items():
            if allocation.freed:
                raise DeviceError(f"{launch.kernel.name}: the memory of {name} was freed")
        prepared = self._prepared.get(id(launch))
        if prepared is None:
            prepared = self._prepare(launch)
            self._prepared[id(launch)] = prepared
            if len(self._prepared) > _PREPARED:
                self._prepared.popitem(last=False)
        if prepared.waits:
            self._forbid_capture("a copy with pageable memory makes the host wait")
        duration = prepared.duration(None if launch.kernel.source is None else self._window_of_kernel(own, window))
        duration = partial(self._watched, prepared.use, duration)
        self._queue(own, _Step(Work(prepared.engine, duration), prepared.computation.run), _LAUNCH)
        if prepared.waits:
            self._wait([own])

    def _prepare(self, launch: Launch) -> _Prepared:
        computation = Computation(launch)
        kernel, call = launch.kernel, launch.call
        if kernel.source is None:
            read = [a.argument for a in kernel.accesses(call) if a.direction == "read"]
            written = [a.argument for a in kernel.accesses(call) if a.direction == "write"]
            if len(read) != 1 or len(written) != 1:
                raise DeviceError(f"{kernel.name}: a copy reads one array and writes one")
            destination, source = launch.arrays[written[0]], launch.arrays[read[0]]
            duration, engine, waits = self._copying(destination, source, call.arrays[read[0]].nbytes)
            copied = _copied(destination, source, call.arrays[read[0]].nbytes)
            return _Prepared(launch, computation, lambda _: duration, engine, waits, copied)
        for name, allocation in launch.arrays.items():
            if not allocation.address:
                raise DeviceError(f"{kernel.name}: {name} is {allocation.kind.value} memory, which kernels cannot see")
        accesses = kernel.accesses(call)
        steps = kernel.accesses_per_launch(call) if kernel.accesses_per_launch is not None else None
        work = work_of(
            self._sheet,
            [
                (a, launch.arrays[a.argument], call.arrays[a.argument].itemsize, self._pages.get(id(launch.arrays[a.argument])))
                for a in accesses
            ],
            launch.shape,
            kernel.loads_in_flight * launch.shape.vectors * _elements_of_a_load(launch),
            steps,
            kernel.on_chip_cycles(call) if kernel.on_chip_cycles is not None else 0.0,
            kernel.on_chip_loads(call) if kernel.on_chip_loads is not None else 0.0,
        )
        use = _launched(kernel.name, launch.shape)
        return _Prepared(launch, computation, lambda window: partial(self._run_kernel, work, window), COMPUTE, False, use)

    def call(self, foreign: Foreign, stream: Stream) -> None:
        if foreign.reference is None:
            raise Unsupported("a function of the user's own cannot run on the simulated device unless its Case brings a reference")
        own = _own_stream(stream)
        accesses: list[tuple[Access, Allocation, int, Pages | None]] = []
        for i, access in enumerate(foreign.accesses):
            known = i < len(foreign.allocations)
            memory = foreign.allocations[i] if known else Allocation(MemoryKind.DEVICE, access.footprint, 0, 0)
            accesses.append((access, memory, 4, self._pages.get(id(memory))))
        for memory in foreign.allocations[len(foreign.accesses) :]:
            # Known to be touched, not how: once, to be read.
            access = Access("memory", "read", memory.nbytes, memory.nbytes)
            accesses.append((access, memory, 4, self._pages.get(id(memory))))
        full = LaunchShape(self._facts.sm_count * (self._facts.max_threads_per_sm // 256), 256)
        work = work_of(self._sheet, accesses, full, 4, None)
        duration: Callable[[float], float] = partial(self._run_kernel, work, self._window_of_kernel(own))
        duration = partial(self._watched, _launched("reference", full), duration)
        self._queue(own, _Step(Work(COMPUTE, duration), partial(_run_reference, foreign.reference)), 2 * _LAUNCH)

    def _run_kernel(self, work: LaunchWork, window: WindowSpec | None, start: float) -> float:
        if start - self._busy_until > _IDLE:
            self._noise.rest()
        seconds = self._timing.kernel(work, window)
        seconds *= self._noise.placement(work.addresses, work.reach) * self._noise.sample(seconds) * self._noise.warm_up()
        self._busy_until = start + seconds
        return seconds

    def _run_copy(self, destination: Allocation, source: Allocation, nbytes: int, start: float) -> float:
        for memory in (destination, source):
            pages = self._pages.get(id(memory))
            if pages is not None:
                pages.to_device()
        self._l2.forget(destination)
        seconds = self._sheet.launch + self._timing.copy(destination, source, nbytes)
        seconds *= self._noise.sample(seconds)
        self._busy_until = start + seconds
        return seconds

    def _copying(self, destination: Allocation, source: Allocation, nbytes: int) -> tuple[Callable[[float], float], str, bool]:
        """Duration, engine, and whether the host waits for a copy."""
        waits = MemoryKind.PAGEABLE in (destination.kind, source.kind)
        if source.kind.on_host:
            return partial(self._run_copy, destination, source, nbytes), HOST_TO_DEVICE, waits
        if destination.kind.on_host:
            # One copy engine serves both directions in turn (asyncEngineCount; Best Practices Guide, 9.1.2).
            engine = DEVICE_TO_HOST if self._sheet.async_engines > 1 else HOST_TO_DEVICE
            return partial(self._run_copy, destination, source, nbytes), engine, waits
        read = Access("source", "read", nbytes, nbytes)
        write = Access("destination", "write", nbytes, nbytes)
        return self._touching([(read, source), (write, destination)]), COMPUTE, False

    def _touching(self, accesses: Sequence[tuple[Access, Allocation]]) -> Callable[[float], float]:
        """Duration of a driver's own kernel, such as a fill."""
        full = LaunchShape(self._facts.sm_count * (self._facts.max_threads_per_sm // 256), 256)
        work = work_of(self._sheet, [(a, m, 4, self._pages.get(id(m))) for a, m in accesses], full, 4, None)
        return partial(self._run_kernel, work, None)

    # Memory

    def allocate(
        self, nbytes: int, kind: MemoryKind, *, mapped: bool = True, write_combined: bool = False, portable: bool = True
    ) -> Allocation:
        self._forbid_capture("it allocates memory")
        if nbytes <= 0:
            raise DeviceError(f"an allocation of {nbytes} bytes: at least 1 is needed")
        if kind is MemoryKind.PEER:
            raise Unsupported("one GPU is simulated: there is no peer to copy to")
        self._take(nbytes, kind)
        address = host_address = 0
        if kind is MemoryKind.DEVICE:
            address = self._device_addresses.take(nbytes)
        elif kind is MemoryKind.MANAGED:
            address = host_address = self._device_addresses.take(nbytes)
        else:
            host_address = self._host_addresses.take(nbytes)
            if kind is MemoryKind.PINNED:
                address = host_address if mapped else 0
            elif kind is MemoryKind.REGISTERED:
                address = self._device_addresses.take(nbytes)
        allocation = Allocation(kind, nbytes, address, host_address, Content(nbytes))
        if kind is MemoryKind.MANAGED:
            self._pages[id(allocation)] = Pages(nbytes)
        if write_combined:
            self._write_combined.add(id(allocation))
        self._live[id(allocation)] = allocation
        self._host += _ALLOCATE + self._locking(nbytes, kind)
        return allocation

    def _locking(self, nbytes: int, kind: MemoryKind) -> float:
        """Seconds for locking pages: the system goes through them one by one."""
        return nbytes / self._sheet.host_bandwidth if kind.locked else 0.0

    def part(self, allocation: Allocation, offset: int, nbytes: int) -> Allocation:
        check_part(allocation, offset, nbytes)
        device, on_host = (at + offset if at else 0 for at in (allocation.address, allocation.host_address))
        return Allocation(allocation.kind, nbytes, device, on_host, _live(allocation).part(offset, nbytes))

    def allocator(self, name: str) -> Allocator:
        if name not in COSTS:
            raise DeviceError(f"no allocator {name!r}; there are: {', '.join(COSTS)}")
        return SimulatedAllocator(self, name)

    def spend(self, seconds: float) -> None:
        """The host is busy for some seconds of virtual time."""
        self._host += seconds

    def memory_kind(self, address: int) -> MemoryKind | None:
        for allocation in self._live.values():
            for start in (allocation.address, allocation.host_address):
                if start and start <= address < start + allocation.nbytes:
                    return allocation.kind
        return MemoryKind.PAGEABLE if is_mapped(address) in (True, None) else None

    def host_memory(self) -> HostMemory:
        locked = self._used[MemoryKind.PINNED] + self._used[MemoryKind.REGISTERED]
        total = self._sheet.host_memory_bytes
        return HostMemory(total, total - locked - self._used[MemoryKind.PAGEABLE], locked)

    @contextmanager
    def near_host(self, node: int | None) -> Iterator[int | None]:
        if node not in (None, 0):
            raise Unsupported(f"numa={node}: the host has no such NUMA node; it has: 0")
        yield 0

    def peer_access(self, allowed: bool) -> AbstractContextManager[None]:
        raise Unsupported("one GPU is simulated: there is no peer to copy to")

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        needed, free = sum(sizes), self.free_bytes(MemoryKind.DEVICE)
        if needed > free:
            raise OutOfMemory(f"{needed / 2**30:.3g} GiB asked for, {free / 2**30:.3g} GiB are free on the simulated device")
        made: dict[int, Allocation] = {}
        for which in np.random.default_rng(seed).permutation(len(sizes)):
            made[int(which)] = self.allocate(sizes[which], MemoryKind.DEVICE)
        return [made[which] for which in range(len(sizes))]

    def entropy(self, seed: int) -> int:
        return seed

    def make_room(self) -> None:
        """Nothing is kept here."""

    def settle(self) -> None:
        """Nothing: freed memory costs nothing here."""

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        self._forbid_capture("it registers host memory")
        if not isinstance(array, np.ndarray):
            raise DeviceError(f"only a NumPy array can be adopted, not {type(array).__name__}")
        if not array.flags.c_contiguous or not array.flags.writeable or array.nbytes == 0:
            raise DeviceError("only a writable, C-contiguous array that is not empty can be adopted")
        kind = MemoryKind.REGISTERED if register else MemoryKind.PAGEABLE
        self._take(array.nbytes, kind)
        address = self._device_addresses.take(array.nbytes) if register else 0
        allocation = Allocation(kind, array.nbytes, address, array.ctypes.data, Content(array.nbytes, over=array))
        self._live[id(allocation)] = allocation
        self._host += _ALLOCATE + self._locking(array.nbytes, kind) if register else 0.0
        return allocation

    def free(self, allocation: Allocation) -> None:
        if allocation.freed:
            return
        self._forbid_capture("it frees memory")
        self._engine.run()
        allocation.freed = True
        self._used[allocation.kind] -= allocation.nbytes
        self._l2.forget(allocation)
        self._live.pop(id(allocation), None)
        self._pages.pop(id(allocation), None)
        self._write_combined.discard(id(allocation))
        for key in [k for k, p in self._prepared.items() if any(a is allocation for a in p.launch.arrays.values())]:
            del self._prepared[key]
        self._device_addresses.give_back(allocation.address)
        self._host_addresses.give_back(allocation.host_address)
        allocation.backing = None
        self._host += _ALLOCATE

    def free_bytes(self, kind: MemoryKind) -> int:
        used = self._used
        if kind in (MemoryKind.DEVICE, MemoryKind.MANAGED):
            taken = used[MemoryKind.DEVICE] + used[MemoryKind.MANAGED]
            return max(0, self._sheet.memory_bytes - self._sheet.context_bytes - taken)
        host = self._sheet.host_memory_bytes
        locked = used[MemoryKind.PINNED] + used[MemoryKind.REGISTERED]
        if kind is MemoryKind.PAGEABLE:
            return host - locked - used[MemoryKind.PAGEABLE]
        return min(int(host * _PINNABLE) - locked, host - locked - used[MemoryKind.PAGEABLE])

    def _take(self, nbytes: int, kind: MemoryKind) -> None:
        free = self.free_bytes(kind)
        if nbytes > free:
            raise OutOfMemory(
                f"{nbytes / 2**30:.3g} GiB of {kind.value} memory asked for, {free / 2**30:.3g} GiB are free on the simulated device"
            )
        self._used[kind] += nbytes

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        return _live(allocation).view(dtype, min(size, allocation.nbytes // np.dtype(dtype).itemsize))

    def to_host(self, allocation: Allocation, dtype: str, size: int) -> Any:
        self._forbid_capture("it reads memory on the host")
        memory = _live(allocation)
        self._wait(self._engine.streams)
        nbytes = size * np.dtype(dtype).itemsize
        self._host += self._host_access(allocation, writes=False) + nbytes / self._host_speed(
            allocation, self._sheet.pageable_to_host, read=True
        )
        return memory.read(dtype, size)

    def from_host(self, allocation: Allocation, content: Any) -> None:
        self._forbid_capture("it writes memory from the host")
        memory = _live(allocation)
        self._wait(self._engine.streams)
        array = np.asarray(content)
        self._host += self._host_access(allocation, writes=True)
        self._host += array.nbytes / self._host_speed(allocation, self._sheet.pageable_to_device, read=False)
        memory.write(array)

    def _host_access(self, allocation: Allocation, *, writes: bool) -> float:
        """The host touches memory: managed pages come to it. Seconds that this takes."""
        pages = self._pages.get(id(allocation))
        self._l2.forget(allocation)
        return 0.0 if pages is None else self._timing.pages.host_touched(pages.touched_by_host(writes=writes))

    def _host_speed(self, allocation: Allocation, device: float, *, read: bool) -> float:
        if allocation.kind is MemoryKind.DEVICE:
            return device
        slow = read and id(allocation) in self._write_combined
        return self._sheet.host_bandwidth * (_WRITE_COMBINED_READ if slow else 1.0)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        name = getattr(like, "__name__", None)
        if name != "numpy":
            asked = name if isinstance(name, str) else repr(like)
            raise Unsupported(f"the simulated device gives arrays of numpy alone, not of {asked}")
        if allocation.kind is MemoryKind.DEVICE:
            raise Unsupported("NumPy cannot see device memory; choose managed or pinned memory, or another library")
        if allocation.kind is MemoryKind.MANAGED:
            self._wait(self._engine.streams)
            self._host += self._host_access(allocation, writes=True)
        array = self.view(allocation, dtype, math.prod(shape))
        if array.size == math.prod(shape):
            return array.reshape(shape)
        # Partly backed: as many whole rows as there are.
        row = math.prod(shape[1:])
        return array[: array.size // row * row].reshape(-1, *shape[1:]) if array.size >= row else array

    def fill_random(self, allocation: Allocation, dtype: str, seed: int, stream: Stream) -> None:
        self._fill(allocation, partial(_live(allocation).fill_random, dtype, seed), stream)

    def fill_cycle(self, allocation: Allocation, node_bytes: int, seed: int, stream: Stream) -> None:
        if node_bytes % 4 or node_bytes <= 0:
            raise DeviceError(f"a node of {node_bytes} bytes: a multiple of 4 is needed")
        nodes = allocation.nbytes // node_bytes
        if not 0 < nodes < 2**31:
            raise DeviceError(f"{nodes} nodes of {node_bytes} bytes: 1 to 2^31 - 1 are possible")
        self._fill(allocation, partial(_live(allocation).fill_cycle, node_bytes, seed), stream)

    def poison(self, allocation: Allocation, stream: Stream) -> None:
        self._fill(allocation, _live(allocation).poison, stream)

    def _fill(self, allocation: Allocation, effect: Callable[[], None], stream: Stream) -> None:
        own = _own_stream(stream)
        if not allocation.address:
            self._forbid_capture("it writes memory on the host")
            self._wait([own])
            self._host += allocation.nbytes / self._sheet.host_bandwidth
            effect()
            return
        write = Access("memory", "write", allocation.nbytes, allocation.nbytes)
        self._queue(own, _Step(Work(COMPUTE, self._touching([(write, allocation)])), effect), _LAUNCH)

    def copy(self, destination: Allocation, source: Allocation, nbytes: int, stream: Stream) -> None:
        own = _own_stream(stream)
        if not 0 < nbytes <= min(destination.nbytes, source.nbytes):
            raise DeviceError(f"a copy of {nbytes} bytes from {source.nbytes} to {destination.nbytes} bytes of memory")
        target, origin = _live(destination), _live(source)
        duration, engine, waits = self._copying(destination, source, nbytes)
        if waits:
            self._forbid_capture("a copy with pageable memory makes the host wait")
        duration = partial(self._watched, _copied(destination, source, nbytes), duration)
        self._queue(own, _Step(Work(engine, duration), partial(target.copy_from, origin, nbytes)), _LAUNCH)
        if waits:
            self._wait([own])

    def mismatch(self, actual: Any, expected: Any, relative_tolerance: float) -> tuple[int, int] | None:
        left, right = np.asarray(actual).reshape(-1), np.asarray(expected).reshape(-1)
        n = min(left.size, right.size)
        left, right = left[:n], right[:n]
        differs = left != right
        if differs.any() and right.dtype.kind == "f":
            wide, reference = left.astype(np.float64), right.astype(np.float64)
            with np.errstate(invalid="ignore"):
                near = np.abs(wide - reference) <= relative_tolerance * np.maximum(np.abs(reference), 1e-30)
            differs &= ~near
        wrong = np.flatnonzero(differs)
        return (int(wrong.size), int(wrong[0])) if wrong.size else None

    # Persisting L2

    def set_aside(self) -> int:
        return self._l2.set_aside

    def request_set_aside(self, nbytes: int) -> int:
        reason = unsupported(self._facts, self.set_aside)
        if reason is not None:
            raise Unsupported(reason)
        if nbytes < 0:
            raise DeviceError(f"a set-aside of {nbytes} bytes: at least 0 is needed")
        self._forbid_capture("it changes the set-aside")
        self._engine.run()
        self._host += _ALLOCATE
        return self._l2.request_set_aside(nbytes)

    def set_window(self, stream: Stream, window: WindowSpec | None) -> None:
        own = _own_stream(stream)
        self._host += _CALL
        if window is not None:
            check_window(window, self._facts)
        self._windows[own] = window

    def window(self, stream: Stream) -> WindowSpec | None:
        self._host += _CALL
        return self._windows.get(_own_stream(stream))

    def reset_persisting(self) -> None:
        self._forbid_capture("it resets persisting lines")
        self._engine.run()
        self._host += _CALL
        self._l2.reset_persisting()

    # Managed memory

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        pages = self._pages_of(allocation, "prefetched")
        self._forbid_capture("a prefetch cannot be captured")
        duration = partial(self._run_prefetch, allocation, pages, to_host)
        engine = DEVICE_TO_HOST if to_host else HOST_TO_DEVICE
        self._queue(_own_stream(stream), _Step(Work(engine, duration)), _LAUNCH)

    def _run_prefetch(self, allocation: Allocation, pages: Pages, to_host: bool, start: float) -> float:
        if to_host:
            moved = pages.to_host()
            seconds = self._timing.pages.prefetched_to_host(moved)
        else:
            touched = pages.to_device()
            moved = touched.moved
            seconds = self._timing.pages.prefetched(touched)
        if moved:
            self._l2.forget(allocation)
        seconds += self._sheet.launch
        return seconds * self._noise.sample(seconds)

    def oversubscribe(self, nbytes: int) -> Allocation:
        self._forbid_capture("it allocates memory")
        room, host = max(0, self.free_bytes(MemoryKind.MANAGED)), self._sheet.host_memory_bytes // 2
        if not 0 < nbytes <= host:
            raise OutOfMemory(
                f"{nbytes / 2**30:.3g} GiB of managed memory asked for; the host has {host / 2**30:.3g} GiB for evicted pages"
            )
        self._used[MemoryKind.MANAGED] += nbytes
        self._host += _ALLOCATE
        address = self._device_addresses.take(nbytes)
        allocation = Allocation(MemoryKind.MANAGED, nbytes, address, address, Content(nbytes))
        self._pages[id(allocation)] = Pages(nbytes, room=room)
        return allocation

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        pages = self._pages_of(allocation, "advised about")
        self._engine.run()  # at once on the host's clock, but not before what was queued
        self._host += _CALL
        pages.advise(advice, to_host, on=on)

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        pages = self._pages_of(allocation, "discarded")
        self._forbid_capture("a discard cannot be captured")
        self._queue(_own_stream(stream), _Step(Work(COMPUTE, partial(self._run_discard, pages))), _LAUNCH)

    def _run_discard(self, pages: Pages, start: float) -> float:
        pages.discard()
        return self._sheet.launch

    def _pages_of(self, allocation: Allocation, done: str) -> Pages:
        if allocation.kind is not MemoryKind.MANAGED:
            raise DeviceError(f"only managed memory can be {done}, not {allocation.kind.value} memory")
        return self._pages[id(allocation)]

    def count_pages(self, work: Callable[[], None]) -> PageCounts:
        self._engine.run()
        self._timing.pages.take()
        work()
        self._engine.run()
        return self._timing.pages.take()

    def count_activity(self, work: Callable[[], None]) -> Activity:
        self._engine.run()
        self._watching = []
        try:
            work()
            self._engine.run()
            seen = self._watching
        finally:
            self._watching = None
        kernels, copies = ([one for one in seen if isinstance(one, kind)] for kind in (KernelUse, CopyUse))
        return Activity(kernels=_together(kernels), copies=_together(copies), source="the model")

    def _watched(self, use: KernelUse | CopyUse, duration: Callable[[float], float], start: float) -> float:
        """The time of a piece of work, told to whoever watches."""
        seconds = duration(start)
        if self._watching is not None:
            self._watching.append(replace(use, nanoseconds=round(seconds * 1e9)))
        return seconds

    # Conditions

    def conditions(self) -> Conditions:
        return Conditions(
            sm_clock_hz=self._sheet.sm_clock,
            memory_clock_hz=self._sheet.memory_clock,
            throttle_reasons=(),
            other_processes=0,
        )

    def close(self) -> None:
        self._engine.clear()
        self._prepared.clear()
        self._windows.clear()


def _launched(name: str, shape: LaunchShape) -> KernelUse:
    return KernelUse(name, (shape.blocks, 1, 1), (shape.threads, 1, 1), launches=1, nanoseconds=0, shared=shape.shared_bytes)


def _copied(destination: Allocation, source: Allocation, nbytes: int) -> CopyUse:
    way = "".join("H" if memory.kind.on_host else "D" for memory in (source, destination))
    read, written = ("pinned" if memory.kind.locked else memory.kind.value for memory in (source, destination))
    return CopyUse(f"{way[0]}2{way[1]}", read, written, count=1, nbytes=nbytes, nanoseconds=0)


def _together(seen: Sequence[Any]) -> tuple[Any, ...]:
    """Uses of one kind and shape added up, in their order."""
    found: dict[Any, Any] = {}
    for one in seen:
        added = ("launches", "nanoseconds") if isinstance(one, KernelUse) else ("count", "nbytes", "nanoseconds")
        key = replace(one, **dict.fromkeys(added, 0))
        had = found.get(key, key)
        found[key] = replace(had, **{name: getattr(had, name) + getattr(one, name) for name in added})
    return tuple(found.values())


def _elements_of_a_load(launch: Launch) -> int:
    itemsize = next(iter(launch.call.arrays.values())).itemsize
    return max(1, (launch.kernel.load_bytes or itemsize) // itemsize)


def _run_reference(reference: Callable[[], object]) -> None:
    reference()


def _own_stream(stream: Stream) -> SimulatedStream:
    if not isinstance(stream, SimulatedStream):
        raise DeviceError("the stream belongs to another device")
    return stream


def _own_event(event: Event) -> SimulatedEvent:
    if not isinstance(event, SimulatedEvent):
        raise DeviceError("the event belongs to another device")
    return event


def _live(allocation: Allocation) -> Content:
    if allocation.freed:
        raise DeviceError("the memory was freed")
    return content(allocation)


_: type[Device] = SimulatedDevice
