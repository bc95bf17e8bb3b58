"""Work for the copy engines, kernels and the host, composed of pieces: in turn, or at once.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers.
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

# Engines: two copy engines (or a single one: `asyncEngineCount`), the link to another GPU, the SMs,
# and the host.
HOST_TO_DEVICE = "host to device"
DEVICE_TO_HOST = "device to host"
PEER = "peer"
KERNEL = "kernel"
HOST = "host"


class Work(ABC):
    """Something that can be queued on a stream and measured."""

    name: str
    engines: frozenset[str]  # that it keeps busy
    moved_bytes: MovedBytes | None = None  # compulsory bytes of a run, if known
    on_host: bool = False
    """The host takes part: `queue` returns late, and only the host's clock shows the time."""
    verifies: bool = False  # True if `verify` compares anything
    before: Work | None = None  # what comes before each measured run, untimed

    @abstractmethod
    def queue(self, stream: Stream) -> None:
        """Queue a run; for work of the host, do it."""

    def poison(self, stream: Stream) -> None:  # noqa: B027, not every piece has a result
        """Overwrite the result, and note the expected result."""

    def verify(self) -> None:  # noqa: B027
        """Compare the result of a run with what is expected. Raises `WrongResult`."""

    def close(self) -> None:  # noqa: B027
        """Free what the work itself allocated; a second call does nothing."""


class Copy(Work):
    """A copy between two kinds of memory by a copy engine, in `pieces` calls of equal size."""

    verifies = True

    def __init__(
        self, device: Device, destination: Buffer, source: Buffer, *, pieces: int = 1
    ) -> None:
        if destination.nbytes != source.nbytes:
            sizes = f"{format_bytes(source.nbytes)} to {format_bytes(destination.nbytes)}"
            raise BadCall(f"a copy of {sizes}: source and destination must be of the same size")
        self._device, self._destination, self._source = device, destination, source
        self._pieces = cut(source.nbytes, pieces)
        to, origin = destination.kind, source.kind
        self.on_host = to.pageable or origin.pageable
        link = to.beyond_link or origin.beyond_link
        self.moved_bytes = MovedBytes(source.nbytes, source.nbytes, link=link)
        engine = KERNEL
        if to.on_peer or origin.on_peer:
            engine = PEER
        elif origin.on_host:
            engine = HOST_TO_DEVICE
        elif to.on_host:
            engine = DEVICE_TO_HOST
        self.engines = frozenset([engine])
        self.name = f"{origin.value} to {to.value}"
        if pieces > 1:
            self.name += f" in {pieces} pieces"

    def queue(self, stream: Stream) -> None:
        device = self._device
        destination, source = self._destination.allocation, self._source.allocation
        if len(self._pieces) == 1:
            device.content.copy(destination, source, self._source.nbytes, stream)
            return
        for offset, nbytes in self._pieces:
            to = device.memory.part(destination, offset, nbytes)
            origin = device.memory.part(source, offset, nbytes)
            device.content.copy(to, origin, nbytes, stream)

    def poison(self, stream: Stream) -> None:
        self._device.content.poison(self._destination.allocation, stream)

    def verify(self) -> None:
        wanted = [
            (self._destination.allocation, "u1", self._destination.nbytes),
            (self._source.allocation, "u1", self._source.nbytes),
        ]
        actual, expected = self._device.content.copies(wanted)
        size = min(actual.size, expected.size)  # the simulated device backs a part
        _compare(self._device, self.name, actual[:size], expected[:size], noun="byte")


class KernelWork(Work):
    """A kernel of the catalogue on buffers, on its persisting stream if it has one."""

    engines = frozenset([KERNEL])

    def __init__(
        self, kernel: BoundKernel, buffers: Mapping[str, Buffer], scalars: Mapping[str, int | float]
    ) -> None:
        self._kernel, self._buffers, self._scalars = kernel, buffers, scalars
        self._device = kernel.device
        self._launch = kernel.launch(buffers, scalars)
        self._expected: Mapping[str, Any] = {}
        self.name, self.verifies = kernel.name, kernel.kernel.reference is not None
        self.moved_bytes = kernel.kernel.traffic(self._launch.call)
        self._device.kernels.compile(self._launch)

    def queue(self, stream: Stream) -> None:
        device, persisting = self._device, self._kernel.persisting
        if persisting is None:
            device.kernels.launch(self._launch, stream)
            return
        if persisting.closed:
            raise BadCall(
                f"{self.name}: the `with` block of its persisting stream has ended, and its window "
                "with it"
            )
        device.streams.join(persisting.stream, stream)
        device.kernels.launch(self._launch, persisting.stream)
        device.streams.join(stream, persisting.stream)

    def poison(self, stream: Stream) -> None:
        if not self.verifies:
            return
        self._device.streams.synchronize(stream)
        arrays = {name: self._view(name) for name in self._buffers}
        self._expected = self._kernel.expected(arrays, self._scalars)
        for parameter in self._kernel.kernel.parameters:
            if parameter.role is Role.WRITE:
                self._device.content.poison(self._buffers[parameter.name].allocation, stream)

    def verify(self) -> None:
        tolerance = self._kernel.kernel.relative_tolerance
        for name, content in self._expected.items():
            actual = self._view(name)[: content.size]
            _compare(self._device, self.name, actual, content, tolerance, f" of {name!r}")
        self._expected = {}

    def _view(self, name: str) -> Any:
        buffer = self._buffers[name]
        return self._device.memory.view(buffer.allocation, buffer.dtype_name, buffer.size)


class StagedCopy(Work):
    """A copy to the device, a kernel there, and a copy back, by chunks over several streams.

    `there`: device buffer that the kernel updates in place, element by element.
    `target`: None copies nothing back.
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
        _check_staged(kernel, source, there)
        if target is not None:
            _check_staged(kernel, target, there)
        self._device, self._source, self._there, self._target = kernel.device, source, there, target
        self._kernel = kernel
        self._buffers, self._scalars = kernel.arguments((there,), scalars)
        _check_engines(self._device, frozenset([HOST_TO_DEVICE]))
        self.engines = frozenset([HOST_TO_DEVICE, KERNEL])
        self.moved_bytes = MovedBytes(source.nbytes, 0, link=True)
        self.on_host = source.kind.pageable
        if target is not None:
            self.engines |= {DEVICE_TO_HOST}
            self.moved_bytes = MovedBytes(source.nbytes, target.nbytes, link=True)
            self.on_host = source.kind.pageable or target.kind.pageable
        self.name = f"staged {kernel.name}"
        self._lanes = tuple(self._device.streams.create() for _ in range(streams))
        self._chunks: list[tuple[Allocation, Allocation, Launch, Allocation | None]] = []
        part, back = self._device.memory.part, None
        for offset, nbytes in cut(there.nbytes, chunks or streams):
            device_part = part(there.allocation, offset, nbytes)
            source_part = part(source.allocation, offset, nbytes)
            if target is not None:
                back = part(target.allocation, offset, nbytes)
            launch = kernel.launch(self._buffers, self._scalars, {there: device_part})
            self._chunks.append((device_part, source_part, launch, back))
        self._expected: Any = None
        self._device.kernels.compile(self._chunks[0][2])

    @property
    def streams(self) -> int:
        """Number of streams that it uses."""
        return len(self._lanes)

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return len(self._chunks)

    @property
    def parts(self) -> tuple[Work, ...]:
        """The copy in, the kernel and the copy back, each whole."""
        parts: list[Work] = [
            Copy(self._device, self._there, self._source),
            KernelWork(self._kernel, self._buffers, self._scalars),
        ]
        if self._target is not None:
            parts.append(Copy(self._device, self._target, self._there))
        return tuple(parts)

    def queue(self, stream: Stream) -> None:
        device = self._device
        for lane in self._lanes:
            device.streams.join(lane, stream)
        for index, (there, source, launch, back) in enumerate(self._chunks):
            lane = self._lanes[index % len(self._lanes)]
            device.content.copy(there, source, there.nbytes, lane)
            device.kernels.launch(launch, lane)
            if back is not None:
                device.content.copy(back, there, there.nbytes, lane)
        for lane in self._lanes:
            device.streams.join(stream, lane)

    def poison(self, stream: Stream) -> None:
        device, there = self._device, self._there
        device.content.copy(there.allocation, self._source.allocation, there.nbytes, stream)
        device.streams.synchronize(stream)
        (name,) = self._buffers
        arrays = {name: device.memory.view(there.allocation, there.dtype_name, there.size)}
        self._expected = self._kernel.expected(arrays, self._scalars)[name]
        device.content.poison(there.allocation, stream)
        if self._target is not None:
            device.content.poison(self._target.allocation, stream)

    def verify(self) -> None:
        device, tolerance = self._device, self._kernel.kernel.relative_tolerance
        result = self._there if self._target is None else self._target
        wanted = [(result.allocation, result.dtype_name, result.size)]
        (actual,) = device.content.copies(wanted)
        _compare(device, self.name, actual, self._expected, tolerance)
        self._expected = None


def _check_staged(kernel: BoundKernel, buffer: Buffer, there: Buffer) -> None:
    """Raise `BadCall` if the kernel updates no single array, or a host buffer does not fit."""
    arrays = [p for p in kernel.kernel.parameters if p.role is not Role.SCALAR]
    if len(arrays) != 1 or arrays[0].role is not Role.UPDATE or kernel.kernel.reference is None:
        raise BadCall(
            f"{kernel.name} cannot be staged: it takes a kernel that updates one array in place, "
            "such as elementwise"
        )
    if (buffer.nbytes, buffer.dtype) != (there.nbytes, there.dtype):
        raise BadCall(f"{buffer!r} and {there!r} must have the same size and type")


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
    """Several pieces of work; their bytes are those that cross links, in both directions."""

    def __init__(self, device: Device, works: Sequence[Work], name: str, between: str) -> None:
        if len(works) < 2:
            raise BadCall(f"{name} takes at least two pieces of work, not {len(works)}")
        self._device = device
        self.parts = tuple(works)
        self.engines = frozenset[str]().union(*(work.engines for work in works))
        crossing = 0
        for work in works:
            if work.moved_bytes is not None and work.moved_bytes.link:
                crossing += work.moved_bytes.total
        if crossing:
            self.moved_bytes = MovedBytes(0, 0, link=True, declared=crossing)
        self.on_host = any(work.on_host for work in works)
        self.verifies = any(work.verifies for work in works)
        self.name = between.join(work.name for work in works)


class InTurn(_Several):
    """Pieces of work in turn, each on the result of the piece before. `verify` checks the last."""

    def __init__(self, device: Device, works: Sequence[Work]) -> None:
        super().__init__(device, works, "in_turn", " then ")

    def queue(self, stream: Stream) -> None:
        for index, work in enumerate(self.parts):
            if index and work.on_host:
                self._device.streams.synchronize(stream)
            work.queue(stream)

    def poison(self, stream: Stream) -> None:
        for work in self.parts[:-1]:  # the input of the last
            work.queue(stream)
            self._device.streams.synchronize(stream)
        self.parts[-1].poison(stream)

    def verify(self) -> None:
        self.parts[-1].verify()


class Together(_Several):
    """Pieces of work on separate data, at once, each on its stream; work of the host runs last."""

    def __init__(self, device: Device, works: Sequence[Work]) -> None:
        super().__init__(device, works, "together", " beside ")
        _check_engines(device, self.engines)
        self._on_host = [work for work in works if work.engines == {HOST}]
        self._on_device = [work for work in works if work.engines != {HOST}]
        self._lanes = tuple(device.streams.create() for _ in self._on_device)

    @property
    def streams(self) -> int:
        """Number of streams that it uses."""
        return len(self._lanes)

    def queue(self, stream: Stream) -> None:
        for lane in self._lanes:
            self._device.streams.join(lane, stream)
        for work, lane in zip(self._on_device, self._lanes, strict=True):
            work.queue(lane)
        for work in self._on_host:
            work.queue(stream)
        for lane in self._lanes:
            self._device.streams.join(stream, lane)

    def poison(self, stream: Stream) -> None:
        for work in self.parts:
            work.poison(stream)

    def verify(self) -> None:
        for work in self.parts:
            work.verify()


def cut(nbytes: int, pieces: int) -> list[tuple[int, int]]:
    """Return offset and length of `pieces` pieces of `nbytes` bytes; the last gets the rest.

    Pieces begin at multiples of 256 bytes.
    Raises `BadCall`: `pieces` is not positive, or there are fewer multiples than pieces.
    """
    _at_least_one("pieces", pieces)
    grains = -(-nbytes // GRAIN)
    if pieces > grains:
        raise BadCall(
            f"{format_bytes(nbytes)} cannot be cut into {pieces} pieces at multiples of {GRAIN} "
            f"bytes: {grains} at most"
        )
    starts = [index * grains // pieces * GRAIN for index in range(pieces)]
    return [(start, end - start) for start, end in pairwise([*starts, nbytes])]


def bound_of(device: Device, parts: Sequence[tuple[frozenset[str], float]]) -> float:
    """Return the lower bound, in seconds, of any overlap of the parts.

    It is the longest part, or the sum of those that share an engine. A single copy engine serves
    both directions.

    `parts`: engines and seconds of each alone.
    """
    busy: dict[str, float] = {}
    for engines, seconds in parts:
        shared = engines
        if device.facts.async_engines < 2 and DEVICE_TO_HOST in engines:
            shared = (engines - {DEVICE_TO_HOST}) | {HOST_TO_DEVICE}
        for engine in shared:
            busy[engine] = busy.get(engine, 0.0) + seconds
    return max(busy.values())


def _check_engines(device: Device, engines: frozenset[str]) -> None:
    """Raise `Unsupported` if the device has too few copy engines."""
    facts = device.facts
    if facts.async_engines < 1 and engines & {HOST_TO_DEVICE, DEVICE_TO_HOST}:
        raise Unsupported(f"{facts.name} copies nothing beside other work (asyncEngineCount is 0)")
    if facts.async_engines < 2 and engines == {HOST_TO_DEVICE, DEVICE_TO_HOST}:
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
    wrong = device.content.mismatch(actual, expected, tolerance)
    if wrong is not None:
        count, first = wrong
        raise WrongResult(
            f"{name}: {count} of {actual.size} {noun}s{of} are wrong; the first is {noun} {first}, "
            "after one run on poisoned outputs"
        )
