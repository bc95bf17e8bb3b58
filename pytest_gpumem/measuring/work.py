"""Work for the copy engines, kernels and the host, composed of pieces: in turn, or at once.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream, Unsupported
from pytest_gpumem.kernels.kernel import Role
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.target import KernelResult, Target, compare, nothing
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import format_bytes

GRAIN = 256  # chunks begin at multiples of so many bytes, as allocations do

# Engines: two copy engines (or one: `asyncEngineCount`), the link to another GPU, the SMs,
# and the host.
HOST_TO_DEVICE = "host to device"
DEVICE_TO_HOST = "device to host"
PEER = "peer"
KERNEL = "kernel"
HOST = "host"


@dataclass(frozen=True, eq=False)
class Work:
    """Something that can be queued on a stream and measured."""

    name: str
    engines: frozenset[str]  # that it keeps busy
    queue: Callable[[Stream], None]  # queues a run; for work of the host, does it
    moved_bytes: MovedBytes | None = None  # compulsory bytes of a run, if known
    on_host: bool = False  # the host takes part, so that only its clock shows the time
    poison: Callable[[Stream], None] = nothing  # overwrites the result, and notes what is expected
    verify: Callable[[], None] | None = None  # compares the result of a run; raises `WrongResult`
    before: Work | None = None  # comes before each measured run, untimed
    parts: tuple[Work, ...] = ()  # of work that overlaps: each whole
    streams: int = 0  # that the parts are spread over
    chunks: int | None = None  # pieces that the data is cut into, if it is

    def target(self, arena: Arena) -> Target:
        """Describe the work where it is: addresses make no difference to a link."""
        return Target(
            name=self.name,
            device=arena.device,
            stream=arena.stream,
            launch=lambda place, stream: self.queue(stream),
            moved_bytes=self.moved_bytes,
            waits=self.on_host,
            prepare=nothing if self.before is None else self.before.queue,
            restores=True,  # launches that spread over streams do not follow each other in a batch
            poison=self.poison,
            verify=self.verify,
        )


def copy_work(device: Device, destination: Buffer, source: Buffer, *, pieces: int = 1) -> Work:
    """Return a copy by a copy engine, in `pieces` calls of equal size."""
    if destination.nbytes != source.nbytes:
        sizes = f"{format_bytes(source.nbytes)} to {format_bytes(destination.nbytes)}"
        raise BadCall(f"a copy of {sizes}: source and destination must be of the same size")
    to, origin, parts = destination.kind, source.kind, cut(source.nbytes, pieces)
    engine = KERNEL
    if to.on_peer or origin.on_peer:
        engine = PEER
    elif origin.on_host:
        engine = HOST_TO_DEVICE
    elif to.on_host:
        engine = DEVICE_TO_HOST
    name = f"{origin.value} to {to.value}"
    if pieces > 1:
        name += f" in {pieces} pieces"

    def queue(stream: Stream) -> None:
        if pieces == 1:
            device.content.copy(destination.allocation, source.allocation, source.nbytes, stream)
            return
        for offset, nbytes in parts:
            to_part = device.memory.part(destination.allocation, offset, nbytes)
            from_part = device.memory.part(source.allocation, offset, nbytes)
            device.content.copy(to_part, from_part, nbytes, stream)

    def poison(stream: Stream) -> None:
        device.content.poison(destination.allocation, stream)

    def verify() -> None:
        wanted = [(each.allocation, "u1", each.nbytes) for each in (destination, source)]
        actual, expected = device.content.copies(wanted)
        size = min(actual.size, expected.size)  # the simulated device backs a part
        compare(device, name, actual[:size], expected[:size], noun="byte")

    return Work(
        name,
        frozenset([engine]),
        queue,
        MovedBytes(source.nbytes, source.nbytes, link=to.beyond_link or origin.beyond_link),
        on_host=to.pageable or origin.pageable,
        poison=poison,
        verify=verify,
    )


def kernel_work(
    kernel: BoundKernel, buffers: Mapping[str, Buffer], scalars: Mapping[str, int | float]
) -> Work:
    """Return a kernel of the catalogue on buffers, on its persisting stream if it has one."""
    device, persisting = kernel.device, kernel.persisting
    launch = kernel.launch(buffers, scalars)
    device.kernels.compile(launch)
    result = KernelResult(kernel, buffers, scalars)

    def queue(stream: Stream) -> None:
        if persisting is None:
            device.kernels.launch(launch, stream)
            return
        if persisting.closed:
            raise BadCall(
                f"{kernel.name}: the `with` block of its persisting stream has ended, and its "
                "window with it"
            )
        device.streams.join(persisting.stream, stream)
        device.kernels.launch(launch, persisting.stream)
        device.streams.join(stream, persisting.stream)

    traffic = kernel.kernel.traffic(launch.call)
    if kernel.kernel.reference is None:
        return Work(kernel.name, frozenset([KERNEL]), queue, traffic)
    return Work(
        kernel.name, frozenset([KERNEL]), queue, traffic, poison=result.poison, verify=result.verify
    )


def staged_work(
    source: Buffer,
    there: Buffer,
    target: Buffer | None,
    kernel: BoundKernel,
    scalars: Mapping[str, int | float],
    streams: int,
    chunks: int | None = None,
) -> Work:
    """Return a copy to the device, a kernel there, and a copy back, by chunks over streams.

    `there`: device buffer that the kernel updates in place, element by element.
    `target`: None copies nothing back.
    """
    device, on_host = kernel.device, source.kind.pageable
    _at_least_one("n_streams", streams)
    _at_least_one("chunks", 1 if chunks is None else chunks)
    _check_staged(kernel, source, there)
    if target is not None:
        _check_staged(kernel, target, there)
    buffers, values = kernel.arguments((there,), scalars)
    _check_engines(device, frozenset([HOST_TO_DEVICE]))
    lanes = tuple(device.streams.create() for _ in range(streams))
    pieces: list[tuple[Allocation, Allocation, Launch, Allocation | None]] = []
    for offset, nbytes in cut(there.nbytes, chunks or streams):
        part, back = device.memory.part(there.allocation, offset, nbytes), None
        origin = device.memory.part(source.allocation, offset, nbytes)
        if target is not None:
            back = device.memory.part(target.allocation, offset, nbytes)
        pieces.append((part, origin, kernel.launch(buffers, values, {there: part}), back))
    device.kernels.compile(pieces[0][2])
    name = f"staged {kernel.name}"
    expected: dict[str, Any] = {}
    parts = [copy_work(device, there, source), kernel_work(kernel, buffers, values)]
    moved_bytes = MovedBytes(source.nbytes, 0, link=True)
    if target is not None:
        parts.append(copy_work(device, target, there))
        moved_bytes = MovedBytes(source.nbytes, target.nbytes, link=True)
        on_host = on_host or target.kind.pageable

    def queue(stream: Stream) -> None:
        for lane in lanes:
            device.streams.join(lane, stream)
        for index, (part, origin, launch, back) in enumerate(pieces):
            lane = lanes[index % len(lanes)]
            device.content.copy(part, origin, part.nbytes, lane)
            device.kernels.launch(launch, lane)
            if back is not None:
                device.content.copy(back, part, part.nbytes, lane)
        for lane in lanes:
            device.streams.join(stream, lane)

    def poison(stream: Stream) -> None:
        device.content.copy(there.allocation, source.allocation, there.nbytes, stream)
        device.streams.synchronize(stream)
        arrays = {}
        for parameter in buffers:
            arrays[parameter] = device.memory.view(there.allocation, there.dtype_name, there.size)
        expected.update(kernel.expected(arrays, values))
        device.content.poison(there.allocation, stream)
        if target is not None:
            device.content.poison(target.allocation, stream)

    def verify() -> None:
        result = there if target is None else target
        wanted = [(result.allocation, result.dtype_name, result.size)]
        (actual,) = device.content.copies(wanted)
        for content in expected.values():
            compare(device, name, actual, content, kernel.kernel.relative_tolerance)
        expected.clear()

    return Work(
        name,
        frozenset[str]().union(*(part.engines for part in parts)),
        queue,
        moved_bytes,
        on_host,
        poison,
        verify,
        parts=tuple(parts),
        streams=streams,
        chunks=len(pieces),
    )


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


def host_work(function: Callable[[Stream], object], name: str) -> Work:
    """Return a function that runs on the host. It gets the stream."""

    def queue(stream: Stream) -> None:
        function(stream)

    return Work(name, frozenset([HOST]), queue, on_host=True)


def work_in_turn(device: Device, works: Sequence[Work]) -> Work:
    """Return works in turn, each on the result of the previous; the last result is checked."""
    _check_pieces("in_turn", works)
    last = works[-1]

    def queue(stream: Stream) -> None:
        for index, work in enumerate(works):
            if index and work.on_host:
                device.streams.synchronize(stream)
            work.queue(stream)

    def poison(stream: Stream) -> None:
        for work in works[:-1]:  # the input of the last
            work.queue(stream)
            device.streams.synchronize(stream)
        last.poison(stream)

    return _several(works, " then ", queue, poison, last.verify)


def work_together(device: Device, works: Sequence[Work]) -> Work:
    """Return works on separate data, at once, each on its stream; work of the host runs last."""
    _check_pieces("together", works)
    _check_engines(device, frozenset[str]().union(*(work.engines for work in works)))
    on_host = [work for work in works if work.engines == {HOST}]
    on_device = [work for work in works if work.engines != {HOST}]
    lanes = [device.streams.create() for _ in on_device]
    verifies = [work.verify for work in works if work.verify is not None]

    def queue(stream: Stream) -> None:
        for lane in lanes:
            device.streams.join(lane, stream)
        for work, lane in zip(on_device, lanes, strict=True):
            work.queue(lane)
        for work in on_host:
            work.queue(stream)
        for lane in lanes:
            device.streams.join(stream, lane)

    def poison(stream: Stream) -> None:
        for work in works:
            work.poison(stream)

    def verify() -> None:
        for verify_part in verifies:
            verify_part()

    return _several(
        works, " beside ", queue, poison, verify if verifies else None, streams=len(lanes)
    )


def _several(
    works: Sequence[Work],
    between: str,
    queue: Callable[[Stream], None],
    poison: Callable[[Stream], None],
    verify: Callable[[], None] | None,
    streams: int = 0,
) -> Work:
    """Join several works; its bytes are those that cross links, in both directions."""
    crossing = 0
    for work in works:
        if work.moved_bytes is not None and work.moved_bytes.link:
            crossing += work.moved_bytes.total
    return Work(
        between.join(work.name for work in works),
        frozenset[str]().union(*(work.engines for work in works)),
        queue,
        MovedBytes(0, 0, link=True, declared=crossing) if crossing else None,
        any(work.on_host for work in works),
        poison,
        verify,
        parts=tuple(works) if streams else (),
        streams=streams,
    )


def _check_pieces(name: str, works: Sequence[Work]) -> None:
    if len(works) < 2:
        raise BadCall(f"{name} takes at least two pieces of work, not {len(works)}")


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
