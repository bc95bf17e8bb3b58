"""What is measured: a kernel of the catalogue, any callable, or a `Case`, behind one small surface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from pytest_gpumem.devices.protocol import Allocation, Device, Foreign, Graph, MemoryKind, OutOfMemory, Stream
from pytest_gpumem.judging.traffic import beyond_arguments, two_declarations
from pytest_gpumem.kernels.kernel import Access, Call, Role
from pytest_gpumem.kernels.sectors import requested_bytes, sectors_per_request
from pytest_gpumem.kernels.sources import fingerprint
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.placements import padding, side_by_side
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, idle_set_aside, persisting
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Traffic


class WrongResult(AssertionError):
    """The result of one launch is not the reference's; no speed is reported for it."""


@dataclass(frozen=True)
class Case:
    """Everything that an honest measurement of somebody's own code needs, in one value.

    A function that builds it gets a `Memory` and is called once for each placement, at fresh addresses.
    """

    launch: Callable[[], object]
    """Launches the work on the current stream."""
    restore: Callable[[], object] | None = None
    """Puts inputs back that `launch` changes; untimed, before every sample, on the same stream."""
    check: Callable[[], object] | None = None
    """Raises, or returns something false, if the result of one launch on poisoned, restored data is wrong; called before and after
    timing."""
    reads: Sequence[Any] = ()
    """Arrays or buffers that a launch reads, whole."""
    writes: Sequence[Any] = ()
    """Arrays or buffers that a launch writes, whole; poisoned before a check, unless they are also read."""
    window: Any = None
    """Buffer, or array of one, that is made persisting in L2."""
    moved: int | None = None
    """Compulsory bytes of one launch, where `reads` and `writes` do not say it."""
    reference: Callable[[], object] | None = None
    """Does on the host what `launch` does on a GPU, through the buffers' `view()`; lets the case run on the simulated device."""
    name: str = ""
    """Shown in the table; default: the name of the function that built the case."""


class Target(Protocol):
    """One thing to measure, on one device."""

    name: str
    foreign: bool
    """Not of the catalogue: what it does on the host is unknown, so it is not captured unasked."""
    notes: tuple[str, ...]
    """What a reader of the result must know."""

    @property
    def traffic(self) -> Traffic | None:
        """Compulsory bytes of one launch, if known."""

    @property
    def footprint(self) -> int | None:
        """Distinct bytes touched by one launch, if known."""

    @property
    def accesses_per_launch(self) -> int | None:
        """Dependent accesses of one launch."""

    @property
    def sectors_per_request(self) -> float | None:
        """Mean sectors of one launch's warp-wide requests, if it makes any and their pattern is known."""

    @property
    def requested(self) -> int | None:
        """Bytes that the threads of one launch ask for, repeats counted; None where `sectors_per_request` is."""

    @property
    def kernel_source(self) -> str | None:
        """SHA-256 of the source file of a catalogue kernel."""

    @property
    def max_placements(self) -> int | None:
        """Largest number of placements that make sense; None: as many as wanted."""

    @property
    def stream(self) -> Stream:
        """Where it runs."""

    @property
    def window(self) -> PersistingStream | None:
        """The persisting stream, if it runs on one."""

    @property
    def can_check(self) -> bool:
        """Whether `check` compares anything."""

    @property
    def restores(self) -> bool:
        """Whether `prepare` does anything."""

    @property
    def waits(self) -> bool:
        """Whether the host takes part in every launch, as in a copy of pageable memory: no graph or held stream can show its time."""

    @property
    def homes(self) -> tuple[Buffer, ...]:
        """Managed buffers whose pages must be put back before every sample."""

    @property
    def host_memory(self) -> tuple[tuple[str, str], ...]:
        """Name and kind of memory of each argument that is not plain device memory; empty where arguments are not known by name."""

    @property
    def any_stream(self) -> bool:
        """Whether launches may go to any stream; else they belong on `stream`."""

    def run_on(self, stream: Stream) -> None:
        """Take another stream as its own, for a callable whose library sends its work there.

        Raises:
            BadCall: a persisting stream was asked for, whose window covers its own work alone.
        """

    def spread(self, wanted: int, most: int, random: np.random.Generator) -> int:
        """Go to fresh addresses: `wanted` placements side by side, up to `most` where they are small, fewer where memory is short.

        Gives how many there are now, at least one. Raises `OutOfMemory` and leaves everything usable where not even one fits.
        """

    def prepare(self, stream: Stream) -> None:
        """Put changed inputs back; queued before every sample, untimed."""

    def launch(self, place: int, stream: Stream) -> None:
        """Queue one launch on the buffers of one placement."""

    def check(self) -> None:
        """Launch once on poisoned outputs and restored inputs and compare. Raises `WrongResult`."""

    def close(self) -> None:
        """Give back what the target itself holds."""


@contextmanager
def _speaking(name: str) -> Iterator[None]:
    """Turn whatever a user's check raises into a wrong result that says whose."""
    try:
        yield
    except WrongResult:
        raise
    except AssertionError as error:
        raise WrongResult(f"{name}: the result of one launch is wrong: {str(error) or 'its check failed'}") from error


def _pad(arena: Arena, random: np.random.Generator) -> None:
    """Hold some memory, so that what is allocated next lies elsewhere than what was freed last."""
    arena.pad(padding(random))


def _refuse_window(name: str, window: PersistingStream | None) -> None:
    if window is not None:
        raise BadCall(f"{name} does not launch on the persisting stream, so its window does not cover what {name} does")


def _window_notes(device: Device, window: PersistingStream | None) -> tuple[str, ...]:
    """What a reader must know of the window, or of a set-aside without one."""
    if window is not None:
        return window.notes
    idle = idle_set_aside(device)
    return () if idle is None else (idle,)


def _captured(name: str, device: Device, window: PersistingStream, bodies: Sequence[Callable[[], None]]) -> list[Graph]:
    """A graph of each body, the window on its kernels.

    Raises:
        BadCall: it has no kernel, so that nothing would run under the window.
        CannotCapture: with the reason.
    """
    graphs = [device.capture(window.stream, body, window=window.spec) for body in bodies]
    windows = device.graph_windows(graphs[0])
    if window.spec is not None and not any(windows):
        raise BadCall(f'where="graph": {name} queues no kernel that could carry the window')
    window.read_back(windows)
    return graphs


class KernelTarget:
    """A kernel of the catalogue with buffers that can be moved."""

    foreign = False
    restores = False

    def __init__(
        self,
        bound: BoundKernel,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None,
    ) -> None:
        self._bound = bound
        self._arena = arena
        self._places: list[list[Allocation]] = []
        self._buffers, self._values = bound.arguments(
            tuple(arena.taken(value) for value in arguments), {name: arena.taken(value) for name, value in keywords.items()}
        )
        self._stream = stream
        self._window = window
        self._call: Call = bound.call(self._buffers, self._values)
        self._saved: dict[str, Allocation] = {}
        self.name = bound.name
        device = arena.device
        self.notes: tuple[str, ...] = (*_window_notes(device, window), *managed_notes(device.facts, self._buffers.values()))
        if window is not None and window.set_aside and not any(b is window.buffer for b in self._buffers.values()):
            self.notes += (f"{bound.name} touches nothing of the buffer under the window: a cost without a gain",)
        if window is not None and window.where != "stream" and bound.kernel.source is None:
            raise BadCall(f'where="{window.where}": {bound.name} is a copy, which is no kernel that could carry a window')
        self._graphs: list[Graph] = []
        """One for each launch, where the window is on a graph's kernels."""
        self._launches = [bound.launch(self._buffers, self._values)]
        device.compile(self._launches[0])
        bound.fill(self._buffers, stream)
        self._movable = tuple(b for b in dict.fromkeys(self._buffers.values()) if arena.can_move(b))
        for parameter in bound.kernel.parameters:
            if parameter.role is Role.UPDATE:
                self._save(parameter.name)
        if window is not None and window.where == "graph":
            # A kernel is loaded at its first launch, which waits for the device: not within a capture.
            device.launch(self._launches[0], stream)
            device.synchronize(stream)
            self._bind()

    def _bind(self) -> None:
        """Launches, and their graphs, for where the buffers now are."""
        self._launches = [self._bound.launch(self._buffers, self._values)]
        if self._window is not None and self._window.where == "graph":
            launch = self._arena.device.launch
            bodies = [partial(launch, one, self._stream) for one in self._launches]
            self._graphs = _captured(self.name, self._arena.device, self._window, bodies)

    def _save(self, name: str) -> None:
        """Keep the content that an updated argument has now: every check starts from it."""
        buffer = self._buffers[name]
        saved = self._arena.allocate(buffer.nbytes, MemoryKind.DEVICE)
        self._arena.device.copy(saved, buffer.allocation, buffer.nbytes, self._arena.stream)
        self._arena.device.synchronize(self._arena.stream)
        buffer.put_home(self._arena.stream)
        self._saved[name] = saved

    @property
    def traffic(self) -> Traffic | None:
        return self._bound.kernel.traffic(self._call)

    @property
    def footprint(self) -> int | None:
        touched: dict[str, int] = {}
        for access in self._bound.kernel.accesses(self._call):
            touched[access.argument] = max(touched.get(access.argument, 0), access.footprint)
        return sum(touched.values())

    @property
    def accesses_per_launch(self) -> int | None:
        count = self._bound.kernel.accesses_per_launch
        return None if count is None else count(self._call)

    @property
    def sectors_per_request(self) -> float | None:
        accesses = self._requests
        return None if accesses is None else sectors_per_request(accesses)

    @property
    def requested(self) -> int | None:
        accesses = self._requests
        return None if accesses is None else requested_bytes(accesses)

    @property
    def kernel_source(self) -> str | None:
        source = self._bound.kernel.source
        return None if source is None else fingerprint(source)

    @property
    def _requests(self) -> tuple[Access, ...] | None:
        """What one launch asks for, in warp-wide requests: a copy engine makes none, nor does one thread that follows a chain."""
        accesses = self._bound.kernel.accesses(self._call)
        return None if self._bound.kernel.source is None or any(access.dependent for access in accesses) else tuple(accesses)

    @property
    def max_placements(self) -> int | None:
        return None if self._movable else 1

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def window(self) -> PersistingStream | None:
        return self._window

    @property
    def can_check(self) -> bool:
        return self._bound.kernel.reference is not None

    @property
    def waits(self) -> bool:
        return any(b.kind is MemoryKind.PAGEABLE for b in self._buffers.values())

    @property
    def homes(self) -> tuple[Buffer, ...]:
        return tuple(b for b in self._buffers.values() if b.goes_home)

    @property
    def host_memory(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, b.kind.value) for name, b in self._buffers.items() if b.kind is not MemoryKind.DEVICE)

    @property
    def any_stream(self) -> bool:
        return self._window is None and not self.homes

    def run_on(self, stream: Stream) -> None:
        raise BadCall(f"{self.name} runs where it is launched")

    def spread(self, wanted: int, most: int, random: np.random.Generator) -> int:
        self._leave()
        device = self._arena.device
        # A window lies on one buffer, and managed pages are put home one buffer at a time.
        if self.any_stream and all(b.kind is MemoryKind.DEVICE for b in self._movable):
            sizes = [b.nbytes for b in self._movable]
            fits = side_by_side(sum(sizes), wanted, most, device.free_bytes(MemoryKind.DEVICE))
            if fits:
                self._scatter(fits, random)
                return fits
        _pad(self._arena, random)
        try:
            for buffer in self._movable:
                buffer.move()
        finally:
            self._bind()
        return 1

    def _scatter(self, count: int, random: np.random.Generator) -> None:
        """Copies of the buffers, side by side at random addresses."""
        device, stream, each = self._arena.device, self._arena.stream, len(self._movable)
        made = self._arena.scatter([b.nbytes for b in self._movable] * count, int(random.integers(2**32)))
        self._places = [made[first : first + each] for first in range(0, len(made), each)]
        written = {p.name for p in self._bound.kernel.parameters if p.role is Role.WRITE}
        outputs = {buffer for name, buffer in self._buffers.items() if name in written}
        for place in self._places:
            for buffer, copy in zip(self._movable, place, strict=True):
                if buffer not in outputs:
                    device.copy(copy, buffer.allocation, buffer.nbytes, stream)
        self._launches = [
            self._bound.launch(self._buffers, self._values, dict(zip(self._movable, place, strict=True))) for place in self._places
        ]

    def _leave(self) -> None:
        """Go back to the buffers themselves."""
        if self._places:
            self._launches = [self._bound.launch(self._buffers, self._values)]
            places, self._places = self._places, []
            for allocation in (a for place in places for a in place):
                self._arena.release(allocation)

    def prepare(self, stream: Stream) -> None:
        """Nothing: a kernel of the catalogue takes the same time on whatever numbers its updated arguments hold."""

    def launch(self, place: int, stream: Stream) -> None:
        device = self._arena.device
        if self._graphs:
            device.replay(self._graphs[place], stream)
        elif self._window is not None and self._window.where == "launch":
            device.launch(self._launches[place], stream, window=self._window.spec)
        else:
            device.launch(self._launches[place], stream)

    def check(self) -> None:
        kernel, device = self._bound.kernel, self._arena.device
        if kernel.reference is None:
            return
        self._leave()
        for parameter in kernel.parameters:
            if parameter.role is Role.UPDATE:
                buffer = self._buffers[parameter.name]
                device.copy(buffer.allocation, self._saved[parameter.name], buffer.nbytes, self._stream)
            elif parameter.role is Role.WRITE:
                device.poison(self._buffers[parameter.name].allocation, self._stream)
        device.synchronize(self._stream)
        expected = self._expected()
        self.launch(0, self._stream)
        device.synchronize(self._stream)
        for name, content in expected.items():
            buffer = self._buffers[name]
            # A reference may give fewer elements than the array has room for, such as one sum for each tile.
            actual = self._array(buffer.allocation, buffer)[: content.size]
            wrong = device.mismatch(actual, content, kernel.relative_tolerance)
            if wrong is not None:
                count, first = wrong
                raise WrongResult(
                    f"{kernel.name}: {count} of {content.size} elements of {name!r} are wrong after one launch on poisoned outputs; "
                    f"the first is element {first}"
                )
        self._go_home()

    def _expected(self) -> Mapping[str, Any]:
        """The reference's result from the inputs as they are; updated arguments hold their saved content now."""
        arrays = {name: self._array(self._saved.get(name, buffer.allocation), buffer) for name, buffer in self._buffers.items()}
        return self._bound.expected(arrays, self._values)

    def _array(self, allocation: Allocation, buffer: Buffer) -> Any:
        # One array module for all arguments: NumPy as soon as one of them lies on the host.
        device, dtype, size = self._arena.device, buffer.dtype_name, buffer.size
        if self._bound.kernel.source is None:
            dtype, size = "u1", buffer.nbytes  # a copy is right to the bit, whatever the bits mean: a NaN equals itself
        if any(b.kind.beyond_link for b in self._buffers.values()):
            return device.to_host(allocation, dtype, size)
        return device.view(allocation, dtype, size)

    def _go_home(self) -> None:
        for buffer in self.homes:
            buffer.put_home(self._stream)
        self._arena.device.synchronize(self._stream)

    def close(self) -> None:
        try:
            self._leave()
        finally:
            for saved in self._saved.values():
                self._arena.release(saved)
            self._saved.clear()


class CallableTarget:
    """Any function that launches on the current stream. Its buffers move only where they are arguments that the arena owns."""

    foreign = True
    sectors_per_request: float | None = None
    requested: int | None = None
    kernel_source: str | None = None
    host_memory: tuple[tuple[str, str], ...] = ()
    restores = False
    waits = False
    window: PersistingStream | None

    def __init__(
        self,
        function: Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any],
        arena: Arena,
        stream: Stream,
        window: PersistingStream | None,
        moved: int | None,
    ) -> None:
        self._foreign = Foreign(lambda: function(*arguments, **keywords))
        # What it touches is unknown: arrays of other libraries and closures reach any managed buffer of the test.
        self.homes = arena.homes
        self._arena = arena
        self._stream = stream
        self.window = window
        self._moved = moved
        self.name = getattr(function, "__name__", type(function).__name__)
        if window is not None and window.where == "launch":
            raise BadCall(
                f'where="launch" is for kernels of gpu_kernels: {self.name} makes its launches itself; "stream" and "graph" reach them'
            )
        buffers = [a for a in (*arguments, *keywords.values()) if isinstance(a, Buffer)]
        self._buffers = tuple(dict.fromkeys(buffers))
        self._movable = tuple(b for b in self._buffers if arena.can_move(b))
        notes = [] if self._movable else ["one placement: the callable's arrays are its own; a Case is built anew for each"]
        if moved is not None and (said := beyond_arguments(moved, _nbytes((*arguments, *keywords.values())))):
            notes.append(said)
        self.notes: tuple[str, ...] = (*notes, *_window_notes(arena.device, window), *managed_notes(arena.device.facts, arena.managed))
        self._graph: Graph | None = None
        if window is not None and window.where == "graph":
            # What a library sets up at its first call cannot be captured.
            arena.device.call(self._foreign, stream)
            arena.device.synchronize()
            self._capture()

    def _capture(self) -> None:
        """The graph of one call, for where its buffers now are, if the window is on a graph's kernels."""
        if self.window is not None and self.window.where == "graph":
            body = partial(self._arena.device.call, self._foreign, self._stream)
            (self._graph,) = _captured(self.name, self._arena.device, self.window, [body])

    @property
    def traffic(self) -> Traffic | None:
        return None if self._moved is None else Traffic(0, 0, declared=self._moved)

    @property
    def footprint(self) -> int | None:
        return self._moved

    @property
    def accesses_per_launch(self) -> int | None:
        return None

    @property
    def max_placements(self) -> int | None:
        return None if self._movable else 1

    @property
    def stream(self) -> Stream:
        return self._stream

    @property
    def can_check(self) -> bool:
        return False

    any_stream = False

    def run_on(self, stream: Stream) -> None:
        _refuse_window(self.name, self.window)
        self._stream = stream

    def spread(self, wanted: int, most: int, random: np.random.Generator) -> int:
        _pad(self._arena, random)
        try:
            for buffer in self._movable:
                buffer.move()
        finally:
            self._capture()
        return 1

    def prepare(self, stream: Stream) -> None:
        """Nothing: a bare callable brings no restore; a Case does."""

    def launch(self, place: int, stream: Stream) -> None:
        if self._graph is not None:
            self._arena.device.replay(self._graph, stream)
        else:
            self._arena.device.call(self._foreign, stream)

    def check(self) -> None:
        """Nothing to compare with; a Case brings a check."""

    def close(self) -> None:
        """Holds nothing."""


def _nbytes(arguments: Iterable[Any]) -> int:
    """Bytes of the distinct buffers and arrays among arguments, also in their lists and tuples."""
    found: dict[int, int] = {}

    def look(values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                look(value)
            elif isinstance(nbytes := getattr(value, "nbytes", None), int):
                found[id(value)] = nbytes

    look(arguments)
    return sum(found.values())


def compulsory(name: str, moved: object) -> int | None:
    """The compulsory bytes that a user declares for one launch, or None.

    Raises:
        BadCall: what he gave as `name` is no positive integer.
    """
    if moved is None:
        return None
    if isinstance(moved, bool) or not isinstance(moved, (int, np.integer)) or moved <= 0:
        raise BadCall(f"{name}={moved!r}; it is the compulsory bytes of one launch, a positive integer")
    return int(moved)


def _check_case(case: Case) -> None:
    for field in ("launch", "restore", "check", "reference"):
        function = getattr(case, field)
        if not callable(function) and (function is not None or field == "launch"):
            raise BadCall(f"Case.{field} is a function without arguments, not {function!r}")
    for field, arrays in (("reads", case.reads), ("writes", case.writes)):
        if not isinstance(arrays, (list, tuple)):
            raise BadCall(f"Case.{field} is a list of arrays or buffers, not {type(arrays).__name__}")
        for array in arrays:
            if not hasattr(array, "nbytes"):
                raise BadCall(f"Case.{field} takes arrays or buffers; {array!r} has no nbytes")
    compulsory("Case.moved", case.moved)


@dataclass
class _Built:
    """A case at one placement, with the memory that it was built in."""

    case: Case
    arena: Arena
    exit: ExitStack
    window: PersistingStream | None = None
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    managed: tuple[Buffer, ...] = ()
    persistent: Buffer | None = None
    """The buffer under the window."""

    def open_window(self, options: Mapping[str, Any]) -> None:
        """Put the case's window over its buffer, until the exit; `options` are arguments of `persisting`."""
        if self.persistent is not None:
            self.window = self.exit.enter_context(persisting(self.arena.device, self.persistent, **options))


def _notes(case: Case, unpoisoned: int) -> tuple[str, ...]:
    """What a reader of a case's result must know; `unpoisoned` counts its outputs that lie in memory of its own."""
    notes = []
    if case.check is not None and unpoisoned:
        notes.append("outputs that are no arrays of the function's `memory` are not poisoned before a check")
    if case.moved is not None:
        reads, writes = (sum(int(a.nbytes) for a in arrays) for arrays in (case.reads, case.writes))
        if said := two_declarations(int(case.moved), reads, writes):
            notes.append(said)
    return tuple(notes)


def _address(array: Any) -> int:
    """Where an array of any library lies; 0 where it does not say."""
    if callable(pointer := getattr(array, "data_ptr", None)):  # PyTorch; its tensors that require a gradient have no interface
        return int(pointer())
    interface = getattr(array, "__cuda_array_interface__", None) or getattr(array, "__array_interface__", None) or {"data": (0,)}
    return int(interface["data"][0])


def _same_memory(addresses: Sequence[tuple[int, ...]]) -> Iterator[str]:
    """Say that placements are no different ones, because a library's pool gives its arrays the memory that they had before."""
    different = len(set(addresses))
    if different < len(addresses) and any(map(any, addresses)):
        yield (
            f"{different} of {len(addresses)} placements differ in where its own arrays lie, as where a library's pool gives the same "
            "memory again: the interval knows too little; arrays of the function's `memory` move"
        )


class CaseTarget:
    """A `Case`, built anew for each placement."""

    foreign = True
    waits = False
    accesses_per_launch: int | None = None
    sectors_per_request: float | None = None
    requested: int | None = None
    kernel_source: str | None = None
    host_memory: tuple[tuple[str, str], ...] = ()
    max_placements: int | None = None

    def __init__(
        self, build: Callable[[Memory], Case], arena: Arena, stream: Stream, persisting_options: Mapping[str, Any] | None = None
    ) -> None:
        self._build = build
        self._options = persisting_options or {}
        self._parent = arena
        self._own_stream = stream
        self._addresses: list[tuple[int, ...]] = []
        """Of the arrays that are no buffers of ours, at each placement."""
        self.notes: tuple[str, ...] = ()
        self._built = self._make()
        self.name = self._built.case.name or getattr(build, "__name__", "case")
        try:
            self._open_window()
        except BaseException:
            self.close()
            raise

    @property
    def _device(self) -> Device:
        return self._parent.device

    def _make(self) -> _Built:
        # The same seed for every placement: the same content at other addresses.
        arena = Arena(self._device, self._parent.seed, self._parent.pinned, oversubscribes=self._parent.oversubscribes)
        with ExitStack() as stack:
            stack.callback(arena.close)
            case = self._build(Memory(arena, self._own_stream))
            if not isinstance(case, Case):
                raise BadCall(f"the function given to gpu_benchmark.case() returned {case!r}, not a Case")
            _check_case(case)
            persistent = None if case.window is None else arena.find(case.window)
            if case.window is not None and persistent is None:
                raise BadCall("Case.window is a buffer or array made by the `memory` that the function is given")
            reads = tuple(b for b in map(arena.find, case.reads) if b is not None)
            writes = tuple(b for b in map(arena.find, case.writes) if b is not None)
            self._addresses.append(tuple(_address(a) for a in (*case.reads, *case.writes) if arena.find(a) is None))
            self.notes = (
                *_notes(case, len(case.writes) - len(writes)),
                *_same_memory(self._addresses),
                *managed_notes(self._device.facts, arena.managed),
            )
            return _Built(case, arena, stack.pop_all(), None, reads, writes, arena.homes, persistent)
        raise AssertionError("unreachable")  # an ExitStack hides no exception

    @property
    def traffic(self) -> Traffic | None:
        case = self._built.case
        if case.moved is not None:
            return Traffic(0, 0, declared=int(case.moved))
        if not case.reads and not case.writes:
            return None
        return Traffic(reads=sum(int(a.nbytes) for a in case.reads), writes=sum(int(a.nbytes) for a in case.writes))

    @property
    def footprint(self) -> int | None:
        case = self._built.case
        arrays = {id(a): int(a.nbytes) for a in (*case.reads, *case.writes)}
        return sum(arrays.values()) or (None if case.moved is None else int(case.moved))

    @property
    def stream(self) -> Stream:
        return self._own_stream if self._built.window is None else self._built.window.stream

    @property
    def window(self) -> PersistingStream | None:
        return self._built.window

    @property
    def can_check(self) -> bool:
        return self._built.case.check is not None

    @property
    def restores(self) -> bool:
        return self._built.case.restore is not None

    @property
    def homes(self) -> tuple[Buffer, ...]:
        return self._built.managed

    any_stream = False

    def run_on(self, stream: Stream) -> None:
        _refuse_window(self.name, self._built.window)
        self._own_stream = stream

    def spread(self, wanted: int, most: int, random: np.random.Generator) -> int:
        _pad(self._parent, random)
        # Both placements live for a moment, so that the new one cannot get the old addresses.
        old = self._built
        if self._device.free_bytes(MemoryKind.DEVICE) < (self.footprint or 0):
            raise OutOfMemory("two placements of the case do not fit at once")
        try:
            self._built = self._make()
        except Exception as error:
            # CuPy's and PyTorch's own: the libraries are not imported for a look at their classes.
            if type(error).__name__ == "OutOfMemoryError":
                raise OutOfMemory(f"a second placement of the case does not fit: {str(error).partition('.')[0]}") from error
            raise
        old.exit.close()
        self._open_window()  # after the old one is given back: two would share the device's set-aside
        return 1

    def _open_window(self) -> None:
        self._built.open_window(self._options)
        self.notes = (*self.notes, *_window_notes(self._device, self._built.window))

    def _foreign(self, function: Callable[[], object]) -> Foreign:
        case, built = self._built.case, self._built
        accesses = tuple(Access(f"read {i}", "read", b.nbytes, b.nbytes) for i, b in enumerate(built.reads)) + tuple(
            Access(f"write {i}", "write", b.nbytes, b.nbytes) for i, b in enumerate(built.writes)
        )
        reference = case.reference if function is case.launch else function
        return Foreign(function, reference, accesses, tuple(b.allocation for b in (*built.reads, *built.writes)))

    def prepare(self, stream: Stream) -> None:
        if self._built.case.restore is not None:
            self._device.call(self._foreign(self._built.case.restore), stream)

    def launch(self, place: int, stream: Stream) -> None:
        self._device.call(self._foreign(self._built.case.launch), stream)

    def check(self) -> None:
        built = self._built
        if built.case.check is None:
            return
        for buffer in built.writes:
            if buffer not in built.reads:
                self._device.poison(buffer.allocation, self.stream)
        # The poison is on our stream; what restores, launches and checks need be on none of ours, and no stream of ours waits for another.
        self._device.synchronize()
        self.prepare(self.stream)
        self._device.synchronize()
        self.launch(0, self.stream)
        self._device.synchronize()
        with _speaking(self.name):
            verdict = built.case.check()
            # Libraries answer with their own kinds of False: numpy.bool, or an array or tensor of one element.
            if verdict is not None and not verdict:
                raise WrongResult(f"{self.name}: its check returned {verdict} after one launch")
        for buffer in built.managed:
            buffer.put_home(self.stream)
        self._device.synchronize(self.stream)

    def close(self) -> None:
        self._built.exit.close()
