"""Work for the copy engines, kernels and the host, composed of pieces: one after another, or at once.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers with Computation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream, Unsupported
from pytest_gpumem.kernels.kernel import Call, Kernel, Role
from pytest_gpumem.memory.buffers import Buffer
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.records.measurement import Traffic
from pytest_gpumem.units import format_bytes

GRAIN = 256  # chunks begin at multiples of so many bytes, as allocations do

HOST_TO_DEVICE, DEVICE_TO_HOST, PEER, KERNEL, HOST = "host to device", "device to host", "peer", "kernel", "host"
"""Engines: two copy engines (one, if `asyncEngineCount` is 1), the link to another GPU, the SMs, and the host."""


class BadWork(ValueError):
    """Work cannot be composed of these pieces; one sentence that names the values."""


class WrongContent(AssertionError):
    """The work left a wrong result."""


class Work(ABC):
    """Something that can be queued on a stream and measured."""

    name: str
    on_host: bool = False  # the host takes part: `queue` returns late, and only the host's clock shows the time
    verifies: bool = False  # True if `verify` compares anything

    @property
    @abstractmethod
    def engines(self) -> frozenset[str]:
        """The engines that it keeps busy."""

    @property
    def traffic(self) -> Traffic | None:
        """Compulsory bytes of one run, if known."""
        return None

    @abstractmethod
    def queue(self, stream: Stream) -> None:
        """Queue one run; for work of the host, do it."""

    def poison(self, stream: Stream) -> None:  # noqa: B027, not every piece has a result
        """Overwrite the result, and note the expected one."""

    def verify(self) -> None:  # noqa: B027
        """Compare the result of a run with the expected one. Raises `WrongContent`."""

    def close(self) -> None:  # noqa: B027
        """Free what the work itself allocated."""


class Copy(Work):
    """A copy between two kinds of memory by a copy engine, whole or in pieces of equal size, one call each.
    `device`: the device of the engine.
    `destination`, `source`: buffers of the same size in bytes.
    `pieces`: number of calls.
    Raises `BadWork`: the sizes differ, or there are more pieces than multiples of 256 bytes.
    """

    def __init__(self, device: Device, destination: Buffer, source: Buffer, *, pieces: int = 1) -> None:
        if destination.nbytes != source.nbytes:
            sizes = f"{format_bytes(source.nbytes)} to {format_bytes(destination.nbytes)}"
            raise BadWork(f"a copy of {sizes}: source and destination must be of the same size")
        self._device, self._destination, self._source = device, destination, source
        self._pieces = cut(source.nbytes, pieces)
        self.verifies = True
        self.on_host = destination.kind.pageable or source.kind.pageable
        times = f" in {pieces} pieces" if pieces > 1 else ""
        self.name = f"{source.kind.value} to {destination.kind.value}{times}"

    @property
    def engines(self) -> frozenset[str]:
        kinds = (self._source.kind, self._destination.kind)
        if any(kind.on_peer for kind in kinds):
            return frozenset([PEER])
        if kinds[0].on_host:
            return frozenset([HOST_TO_DEVICE])
        return frozenset([DEVICE_TO_HOST if kinds[1].on_host else KERNEL])

    @property
    def traffic(self) -> Traffic:
        link = self._source.kind.beyond_link or self._destination.kind.beyond_link
        return Traffic(self._source.nbytes, self._destination.nbytes, link=link)

    def queue(self, stream: Stream) -> None:
        device, destination, source = self._device, self._destination.allocation, self._source.allocation
        if len(self._pieces) == 1:
            device.content.copy(destination, source, self._source.nbytes, stream)
            return
        for offset, nbytes in self._pieces:
            device.content.copy(device.memory.part(destination, offset, nbytes), device.memory.part(source, offset, nbytes), nbytes, stream)

    def poison(self, stream: Stream) -> None:
        self._device.content.poison(self._destination.allocation, stream)

    def verify(self) -> None:
        _equal(self._device, self.name, self._destination, self._device.content.to_host(self._source.allocation, "u1", self._source.nbytes))


class Launched(Work):
    """A kernel of the catalogue on buffers.
    `kernel`: `verify` compares with its reference.
    `buffers`: array arguments by parameter name.
    `persisting`: the stream under whose window it runs; None: none.
    Raises `BadWork`: the kernel refuses the arguments, or an argument is memory that kernels cannot access.
    """

    def __init__(
        self,
        device: Device,
        kernel: Kernel,
        buffers: Mapping[str, Buffer],
        scalars: Mapping[str, int | float],
        blocks: int | None = None,
        persisting: PersistingStream | None = None,
    ) -> None:
        self._persisting = persisting
        self._device, self._kernel, self._buffers = device, kernel, dict(buffers)
        self._launch = bound(device, kernel, {name: (b, b.allocation) for name, b in buffers.items()}, scalars, blocks)
        self._expected: Mapping[str, Any] = {}
        self.name, self.verifies = kernel.name, kernel.reference is not None
        device.kernels.compile(self._launch)

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([KERNEL])

    @property
    def traffic(self) -> Traffic:
        return self._kernel.traffic(self._launch.call)

    def queue(self, stream: Stream) -> None:
        if self._persisting is None:
            self._device.kernels.launch(self._launch, stream)
            return
        if self._persisting.closed:
            raise BadWork(f"{self.name}: the `with` block of its persisting stream has ended, and its window with it")
        own = self._persisting.stream
        self._device.streams.join(own, stream)
        self._device.kernels.launch(self._launch, own)
        self._device.streams.join(stream, own)

    def poison(self, stream: Stream) -> None:
        if self._kernel.reference is None:
            return
        self._device.streams.synchronize(stream)
        arrays = {name: self._device.memory.view(b.allocation, b.dtype_name, b.size) for name, b in self._buffers.items()}
        self._expected = self._kernel.reference(arrays, self._launch.call.scalars)
        for parameter in self._kernel.parameters:
            if parameter.role is Role.WRITE:
                self._device.content.poison(self._buffers[parameter.name].allocation, stream)

    def verify(self) -> None:
        for name, content in self._expected.items():
            buffer = self._buffers[name]
            actual = self._device.memory.view(buffer.allocation, buffer.dtype_name, buffer.size)[: content.size]
            wrong = self._device.content.mismatch(actual, content, self._kernel.relative_tolerance)
            if wrong is not None:
                raise WrongContent(
                    f"{self.name}: {wrong[0]} of {content.size} elements of {name!r} are wrong; the first is element {wrong[1]}"
                )
        self._expected = {}


class Host(Work):
    """A function that runs on the host."""

    on_host = True

    def __init__(self, function: Callable[[], object], name: str | None = None) -> None:
        self._function = function
        self.name = name or str(getattr(function, "__name__", type(function).__name__))

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([HOST])

    def queue(self, stream: Stream) -> None:
        self._function()


class Allocating(Work):
    """One allocation and its free."""

    on_host = True

    def __init__(self, device: Device, name: str, nbytes: int) -> None:
        self._allocator = device.memory.allocator(name)
        self._nbytes = nbytes
        self.name = f"{name} of {format_bytes(nbytes)}"

    @property
    def engines(self) -> frozenset[str]:
        return frozenset([HOST])

    def queue(self, stream: Stream) -> None:
        self._allocator.cycle(self._nbytes, stream)

    def close(self) -> None:
        self._allocator.close()


class _Several(Work):
    """Several pieces of work."""

    def __init__(self, device: Device, works: Sequence[Work], name: str) -> None:
        if len(works) < 2:
            raise BadWork(f"{name} takes at least two pieces of work, not {len(works)}")
        self._device = device
        self.parts = tuple(works)
        self.on_host = any(work.on_host for work in works)
        self.verifies = any(work.verifies for work in works)
        self.name = (" then " if name == "in_turn" else " beside ").join(work.name for work in works)

    @property
    def engines(self) -> frozenset[str]:
        return frozenset().union(*(work.engines for work in self.parts))

    @property
    def traffic(self) -> Traffic | None:
        """Bytes that cross links, the sum of both directions."""
        known = [work.traffic for work in self.parts]
        crossing = [traffic.total for traffic in known if traffic is not None and traffic.link]
        return Traffic(0, 0, link=True, declared=sum(crossing)) if crossing else None

    def poison(self, stream: Stream) -> None:
        for work in self.parts:
            work.poison(stream)

    def verify(self) -> None:
        for work in self.parts:
            work.verify()

    def close(self) -> None:
        for work in self.parts:
            work.close()


class After(Work):
    """A piece of work, of which each run comes after an untimed run of another.
    `before`: what comes before; it may be of the host.
    `work`: the measured piece.
    """

    def __init__(self, before: Work, work: Work) -> None:
        self.before, self.work = before, work
        self.name, self.on_host, self.verifies = work.name, work.on_host, work.verifies

    @property
    def engines(self) -> frozenset[str]:
        return self.work.engines

    @property
    def traffic(self) -> Traffic | None:
        return self.work.traffic

    def queue(self, stream: Stream) -> None:
        self.work.queue(stream)

    def poison(self, stream: Stream) -> None:
        self.work.poison(stream)

    def verify(self) -> None:
        self.work.verify()


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
        check_engines(device, self.engines)
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


def bound(
    device: Device,
    kernel: Kernel,
    arrays: Mapping[str, tuple[Buffer, Allocation]],
    scalars: Mapping[str, int | float],
    blocks: int | None = None,
) -> Launch:
    """A launch of `kernel` on memory that holds elements of the buffers' type: the whole of each buffer, or a part.
    Raises `BadWork`: the kernel refuses the arguments.
    """
    values = {p.name: scalars.get(p.name, p.default) for p in kernel.parameters if p.role is Role.SCALAR}
    missing = [name for name, value in values.items() if value is None] + [name for name in scalars if name not in values]
    if missing:
        raise BadWork(f"{kernel.name}: {missing[0]!r} is missing, or is none of its scalars ({', '.join(values) or 'it has none'})")
    facts = {}
    for name, (buffer, memory) in arrays.items():
        whole = buffer.facts
        facts[name] = type(whole)(memory.nbytes // whole.itemsize, whole.dtype, whole.itemsize, whole.on_host)
        if not memory.address:
            raise BadWork(f"{kernel.name}: {name!r} is {memory.kind.value} memory, which kernels cannot see")
    call = Call(facts, {name: value for name, value in values.items() if value is not None}, blocks)
    wrong = kernel.check(call) if kernel.check is not None else None
    if wrong:
        raise BadWork(f"{kernel.name}: {wrong}")
    return Launch(kernel, call, kernel.shape(device.facts, call), {name: memory for name, (_, memory) in arrays.items()})


def cut(nbytes: int, pieces: int) -> list[tuple[int, int]]:
    """Offset and length of `pieces` pieces of `nbytes` bytes, at multiples of 256 bytes; the last gets the rest.
    Raises `BadWork`: `pieces` is not positive, or there are fewer multiples of 256 bytes than pieces.
    """
    at_least_one("pieces", pieces)
    grains = -(-nbytes // GRAIN)
    if pieces > grains:
        raise BadWork(f"{format_bytes(nbytes)} cannot be cut into {pieces} pieces at multiples of {GRAIN} bytes: {grains} at most")
    starts = [i * grains // pieces * GRAIN for i in range(pieces)] + [nbytes]
    return [(start, end - start) for start, end in pairwise(starts)]


def check_engines(device: Device, engines: frozenset[str]) -> None:
    """Refuse work that the device cannot do at once. Raises `Unsupported`: the device has too few copy engines."""
    facts, ways = device.facts, engines & {HOST_TO_DEVICE, DEVICE_TO_HOST}
    if ways and facts.async_engines < 1:
        raise Unsupported(f"{facts.name} copies nothing beside other work (asyncEngineCount is 0)")
    if engines == {HOST_TO_DEVICE, DEVICE_TO_HOST} and facts.async_engines < 2:
        raise Unsupported(f"{facts.name} copies one way at a time (asyncEngineCount is {facts.async_engines})")


def bound_of(device: Device, parts: Sequence[tuple[frozenset[str], float]]) -> float:
    """Lower bound, in seconds, of any overlap of the parts: the longest part, or the sum of those that share an engine.
    `device`: with one copy engine both directions share it.
    `parts`: engines and seconds of each alone.
    """
    busy: dict[str, float] = {}
    one = device.facts.async_engines < 2
    for engines, seconds in parts:
        for engine in {HOST_TO_DEVICE if one and engine == DEVICE_TO_HOST else engine for engine in engines}:
            busy[engine] = busy.get(engine, 0.0) + seconds
    return max(busy.values())


def enqueue(device: Device, work: Work, stream: Stream) -> tuple[float, float]:
    """Seconds by the host's clock until the call that queues a run returned, and until the run was done. An asynchronous call returns while
    its work still runs."""
    device.streams.synchronize(stream)
    began = device.now()
    work.queue(stream)
    returned = device.now() - began
    device.streams.synchronize(stream)
    return returned, device.now() - began


def at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadWork(f"{name}={value!r}; it is a whole number of at least 1")


def _equal(device: Device, name: str, buffer: Buffer, expected: Any) -> None:
    actual = device.content.to_host(buffer.allocation, "u1", buffer.nbytes)
    size = min(actual.size, expected.size)  # the simulated device backs a part
    wrong = device.content.mismatch(actual[:size], expected[:size], 0.0)
    if wrong is not None:
        raise WrongContent(f"{name}: {wrong[0]} of {size} bytes are wrong; the first is byte {wrong[1]}")
