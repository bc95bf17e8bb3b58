"""Work for the copy engines, kernels and the host, composed of pieces: one after another, or at once.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers with Computation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream, Unsupported
from pytest_gpumem.kernels.kernel import Role
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import format_bytes

GRAIN = 256  # chunks begin at multiples of so many bytes, as allocations do

HOST_TO_DEVICE, DEVICE_TO_HOST, PEER, KERNEL, HOST = (
    "host to device",
    "device to host",
    "peer",
    "kernel",
    "host",
)
"""Engines: two copy engines (one, if `asyncEngineCount` is 1), the link to another GPU, the SMs, and the host."""


class Work(ABC):
    """Something that can be queued on a stream and measured."""

    name: str
    engines: frozenset[str]  # that it keeps busy
    moved_bytes: MovedBytes | None = None  # compulsory bytes of one run, if known
    on_host: bool = False
    """The host takes part: `queue` returns late, and only the host's clock shows the time."""
    verifies: bool = False  # True if `verify` compares anything
    before: Work | None = None  # what comes before each measured run, untimed

    @abstractmethod
    def queue(self, stream: Stream) -> None:
        """Queue one run; for work of the host, do it."""

    def poison(self, stream: Stream) -> None:  # noqa: B027, not every piece has a result
        """Overwrite the result, and note the expected one."""

    def verify(self) -> None:  # noqa: B027
        """Compare the result of a run with the expected one. Raises `WrongResult`."""

    def close(self) -> None:  # noqa: B027
        """Free what the work itself allocated; a second call does nothing."""


class Copy(Work):
    """A copy between two kinds of memory by a copy engine, whole or in pieces of equal size, one call each.
    `device`: the device of the engine.
    `destination`, `source`: buffers of the same size in bytes.
    `pieces`: number of calls.
    Raises `BadCall`: the sizes differ, or there are more pieces than multiples of 256 bytes.
    """

    verifies = True

    def __init__(
        self, device: Device, destination: Buffer, source: Buffer, *, pieces: int = 1
    ) -> None:
        if destination.nbytes != source.nbytes:
            sizes = f"{format_bytes(source.nbytes)} to {format_bytes(destination.nbytes)}"
            raise BadCall(f"a copy of {sizes}: source and destination must be of the same size")
        self._device, self._destination, self._source = device, destination, source
        self._pieces = cut(source.nbytes, pieces)
        there, here = destination.kind, source.kind
        self.on_host = there.pageable or here.pageable
        self.moved_bytes = MovedBytes(
            source.nbytes, source.nbytes, link=here.beyond_link or there.beyond_link
        )
        if here.on_peer or there.on_peer:
            self.engines = frozenset([PEER])
        else:
            self.engines = frozenset(
                [HOST_TO_DEVICE if here.on_host else DEVICE_TO_HOST if there.on_host else KERNEL]
            )
        self.name = f"{here.value} to {there.value}{f' in {pieces} pieces' if pieces > 1 else ''}"

    def queue(self, stream: Stream) -> None:
        device, destination, source = (
            self._device,
            self._destination.allocation,
            self._source.allocation,
        )
        if len(self._pieces) == 1:
            device.content.copy(destination, source, self._source.nbytes, stream)
            return
        for offset, nbytes in self._pieces:
            device.content.copy(
                device.memory.part(destination, offset, nbytes),
                device.memory.part(source, offset, nbytes),
                nbytes,
                stream,
            )

    def poison(self, stream: Stream) -> None:
        self._device.content.poison(self._destination.allocation, stream)

    def verify(self) -> None:
        actual, expected = self._device.content.copies(
            [(b.allocation, "u1", b.nbytes) for b in (self._destination, self._source)]
        )
        size = min(actual.size, expected.size)  # the simulated device backs a part
        _compare(self._device, self.name, actual[:size], expected[:size], noun="byte")


class KernelWork(Work):
    """A kernel of the catalogue on buffers.
    `kernel`: `verify` compares with its reference. On its persisting stream, if it has one.
    `buffers`, `scalars`: arguments by parameter name, as `BoundKernel.arguments` gives them.
    Raises `BadCall`: the kernel refuses the arguments.
    """

    engines = frozenset([KERNEL])

    def __init__(
        self, kernel: BoundKernel, buffers: Mapping[str, Buffer], scalars: Mapping[str, int | float]
    ) -> None:
        self._kernel, self._buffers, self._scalars = kernel, buffers, scalars
        self._launch = kernel.launch(buffers, scalars)
        self._expected: Mapping[str, Any] = {}
        self.name, self.verifies = kernel.name, kernel.kernel.reference is not None
        self.moved_bytes = kernel.kernel.traffic(self._launch.call)
        kernel.device.kernels.compile(self._launch)

    def queue(self, stream: Stream) -> None:
        device, persisting = self._kernel.device, self._kernel.persisting
        if persisting is None:
            device.kernels.launch(self._launch, stream)
            return
        if persisting.closed:
            raise BadCall(
                f"{self.name}: the `with` block of its persisting stream has ended, and its window with it"
            )
        device.streams.join(persisting.stream, stream)
        device.kernels.launch(self._launch, persisting.stream)
        device.streams.join(stream, persisting.stream)

    def poison(self, stream: Stream) -> None:
        if not self.verifies:
            return
        self._kernel.device.streams.synchronize(stream)
        self._expected = self._kernel.expected(
            {name: self._view(name) for name in self._buffers}, self._scalars
        )
        for parameter in self._kernel.kernel.parameters:
            if parameter.role is Role.WRITE:
                self._kernel.device.content.poison(self._buffers[parameter.name].allocation, stream)

    def verify(self) -> None:
        tolerance = self._kernel.kernel.relative_tolerance
        for name, content in self._expected.items():
            _compare(
                self._kernel.device,
                self.name,
                self._view(name)[: content.size],
                content,
                tolerance,
                f" of {name!r}",
            )
        self._expected = {}

    def _view(self, name: str) -> Any:
        buffer = self._buffers[name]
        return self._kernel.device.memory.view(buffer.allocation, buffer.dtype_name, buffer.size)


class StagedCopy(Work):
    """A copy to the device, a kernel there, and a copy back, chunk by chunk over several streams.
    `source`, `target`: host buffers; `target` None: nothing is copied back.
    `there`: device buffer that the kernel updates in place.
    `kernel`: with one array, which it updates element by element.
    `scalars`: of the kernel.
    `chunks`: number of chunks, which begin at multiples of 256 bytes; None: one for each stream. The last may be shorter.
    Raises `BadCall`: the buffers differ, the kernel does not fit, or the data is too small for so many chunks.
    Raises `Unsupported`: the device has no copy engine (`asyncEngineCount` is 0).
    """

    verifies = True

    def __init__(
        self,
        source: Buffer,
        there: Buffer,
        target: Buffer | None,
        kernel: BoundKernel,
        scalars: Mapping[str, int | float],
        streams: int,
        chunks: int | None = None,
    ) -> None:
        _at_least_one("n_streams", streams)
        _at_least_one("chunks", 1 if chunks is None else chunks)
        arrays = [p for p in kernel.kernel.parameters if p.role is not Role.SCALAR]
        if len(arrays) != 1 or arrays[0].role is not Role.UPDATE or kernel.kernel.reference is None:
            raise BadCall(
                f"{kernel.name} cannot be staged: it takes a kernel that updates one array in place, such as elementwise"
            )
        for buffer in (b for b in (source, target) if b is not None):
            if (buffer.nbytes, buffer.dtype) != (there.nbytes, there.dtype):
                raise BadCall(f"{buffer!r} and {there!r} must have the same size and type")
        self._device, self._source, self._there, self._target = kernel.device, source, there, target
        self._kernel, (self._buffers, self._scalars) = kernel, kernel.arguments((there,), scalars)
        _check_engines(self._device, frozenset([HOST_TO_DEVICE]))
        self.engines = frozenset(
            [HOST_TO_DEVICE, KERNEL] if target is None else [HOST_TO_DEVICE, KERNEL, DEVICE_TO_HOST]
        )
        self.moved_bytes = MovedBytes(
            source.nbytes, 0 if target is None else target.nbytes, link=True
        )
        self.on_host = source.kind.pageable or (target is not None and target.kind.pageable)
        self.name = f"staged {kernel.name}"
        self._lanes = tuple(self._device.streams.create() for _ in range(streams))
        self._steps = [
            self._step(offset, nbytes) for offset, nbytes in cut(there.nbytes, chunks or streams)
        ]
        self._expected: Any = None
        self._device.kernels.compile(self._steps[0][2])

    def _step(
        self, offset: int, nbytes: int
    ) -> tuple[Allocation, Allocation, Launch, Allocation | None]:
        there, source, target = (
            None if b is None else self._device.memory.part(b.allocation, offset, nbytes)
            for b in (self._there, self._source, self._target)
        )
        assert there is not None
        assert source is not None
        return (
            there,
            source,
            self._kernel.launch(self._buffers, self._scalars, {self._there: there}),
            target,
        )

    @property
    def streams(self) -> int:
        """Number of streams that it uses."""
        return len(self._lanes)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._steps)

    @property
    def parts(self) -> tuple[Work, ...]:
        """The copy in, the kernel and the copy back, each whole."""
        back = () if self._target is None else (Copy(self._device, self._target, self._there),)
        return (
            Copy(self._device, self._there, self._source),
            KernelWork(self._kernel, self._buffers, self._scalars),
            *back,
        )

    def queue(self, stream: Stream) -> None:
        device = self._device
        for lane in self._lanes:
            device.streams.join(lane, stream)
        for i, (there, source, launch, target) in enumerate(self._steps):
            lane = self._lanes[i % len(self._lanes)]
            device.content.copy(there, source, there.nbytes, lane)
            device.kernels.launch(launch, lane)
            if target is not None:
                device.content.copy(target, there, there.nbytes, lane)
        for lane in self._lanes:
            device.streams.join(stream, lane)

    def poison(self, stream: Stream) -> None:
        device, there = self._device, self._there
        device.content.copy(there.allocation, self._source.allocation, there.nbytes, stream)
        device.streams.synchronize(stream)
        (name,) = self._buffers
        arrays = {name: device.memory.view(there.allocation, there.dtype_name, there.size)}
        self._expected = self._kernel.expected(arrays, self._scalars)[name]
        for buffer in (there, self._target):
            if buffer is not None:
                device.content.poison(buffer.allocation, stream)

    def verify(self) -> None:
        result = self._there if self._target is None else self._target
        (actual,) = self._device.content.copies(
            [(result.allocation, result.dtype_name, result.size)]
        )
        _compare(
            self._device, self.name, actual, self._expected, self._kernel.kernel.relative_tolerance
        )
        self._expected = None


class Host(Work):
    """A function that runs on the host. It gets the stream; `close` frees what it needs."""

    engines = frozenset([HOST])
    on_host = True

    def __init__(
        self,
        function: Callable[[Stream], object],
        name: str,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._function, self.name, self._close = function, name, close

    def queue(self, stream: Stream) -> None:
        self._function(stream)

    def close(self) -> None:
        if self._close is not None:
            self._close()


class _Several(Work):
    """Several pieces of work; their bytes are those that cross links, in both directions together."""

    def __init__(self, device: Device, works: Sequence[Work], name: str) -> None:
        if len(works) < 2:
            raise BadCall(f"{name} takes at least two pieces of work, not {len(works)}")
        self._device = device
        self.parts = tuple(works)
        self.engines = frozenset[str]().union(*(work.engines for work in works))
        crossing = [
            work.moved_bytes.total
            for work in works
            if work.moved_bytes is not None and work.moved_bytes.link
        ]
        self.moved_bytes = MovedBytes(0, 0, link=True, declared=sum(crossing)) if crossing else None
        self.on_host = any(work.on_host for work in works)
        self.verifies = any(work.verifies for work in works)
        self.name = (" then " if name == "in_turn" else " beside ").join(
            work.name for work in works
        )


class InTurn(_Several):
    """One piece of work after another, each on the result of the one before. `verify` checks the result of the last."""

    def __init__(self, device: Device, works: Sequence[Work]) -> None:
        super().__init__(device, works, "in_turn")

    def queue(self, stream: Stream) -> None:
        for i, work in enumerate(self.parts):
            if i and work.on_host:
                self._device.streams.synchronize(stream)
            work.queue(stream)

    def poison(self, stream: Stream) -> None:
        for work in self.parts[:-1]:  # the input of the last one
            work.queue(stream)
            self._device.streams.synchronize(stream)
        self.parts[-1].poison(stream)

    def verify(self) -> None:
        self.parts[-1].verify()


class Together(_Several):
    """Pieces of work on separate data, at once: each on a stream of its own, work of the host after all others are queued.
    Raises `Unsupported`: copies in both directions where the device has one copy engine, or copies at all where it has none
    (`asyncEngineCount`).
    """

    def __init__(self, device: Device, works: Sequence[Work]) -> None:
        super().__init__(device, works, "together")
        _check_engines(device, self.engines)
        self._lanes = tuple(device.streams.create() for work in works if work.engines != {HOST})

    @property
    def streams(self) -> int:
        """Number of streams that it uses."""
        return len(self._lanes)

    def queue(self, stream: Stream) -> None:
        lanes = iter(self._lanes)
        for lane in self._lanes:
            self._device.streams.join(lane, stream)
        for work in sorted(self.parts, key=lambda work: work.engines == {HOST}):
            work.queue(stream if work.engines == {HOST} else next(lanes))
        for lane in self._lanes:
            self._device.streams.join(stream, lane)

    def poison(self, stream: Stream) -> None:
        for work in self.parts:
            work.poison(stream)

    def verify(self) -> None:
        for work in self.parts:
            work.verify()


def cut(nbytes: int, pieces: int) -> list[tuple[int, int]]:
    """Offset and length of `pieces` pieces of `nbytes` bytes, at multiples of 256 bytes; the last gets the rest.
    Raises `BadCall`: `pieces` is not positive, or there are fewer multiples of 256 bytes than pieces.
    """
    _at_least_one("pieces", pieces)
    grains = -(-nbytes // GRAIN)
    if pieces > grains:
        raise BadCall(
            f"{format_bytes(nbytes)} cannot be cut into {pieces} pieces at multiples of {GRAIN} bytes: {grains} at most"
        )
    starts = [i * grains // pieces * GRAIN for i in range(pieces)] + [nbytes]
    return [(start, end - start) for start, end in pairwise(starts)]


def bound_of(device: Device, parts: Sequence[tuple[frozenset[str], float]]) -> float:
    """Lower bound, in seconds, of any overlap of the parts: the longest part, or the sum of those that share an engine.
    `device`: with one copy engine both directions share it.
    `parts`: engines and seconds of each alone.
    """
    busy: dict[str, float] = {}
    one = device.facts.async_engines < 2
    for engines, seconds in parts:
        for engine in {
            HOST_TO_DEVICE if one and engine == DEVICE_TO_HOST else engine for engine in engines
        }:
            busy[engine] = busy.get(engine, 0.0) + seconds
    return max(busy.values())


def _check_engines(device: Device, engines: frozenset[str]) -> None:
    """Refuse work that the device cannot do at once. Raises `Unsupported`: the device has too few copy engines."""
    facts, ways = device.facts, engines & {HOST_TO_DEVICE, DEVICE_TO_HOST}
    if ways and facts.async_engines < 1:
        raise Unsupported(f"{facts.name} copies nothing beside other work (asyncEngineCount is 0)")
    if engines == {HOST_TO_DEVICE, DEVICE_TO_HOST} and facts.async_engines < 2:
        raise Unsupported(
            f"{facts.name} copies one way at a time (asyncEngineCount is {facts.async_engines})"
        )


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadCall(f"{name}={value!r}; it is a whole number of at least 1")


def _compare(
    device: Device,
    name: str,
    actual: Any,
    expected: Any,
    tolerance: float = 0.0,
    of: str = "",
    noun: str = "element",
) -> None:
    if (wrong := device.content.mismatch(actual, expected, tolerance)) is not None:
        first = f"the first is {noun} {wrong[1]}"
        raise WrongResult(
            f"{name}: {wrong[0]} of {actual.size} {noun}s{of} are wrong; {first}, after one run on poisoned outputs"
        )
