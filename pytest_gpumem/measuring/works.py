"""Work for the copy engines, kernels and the host, in turn or at once.

Source: CUDA C++ Best Practices Guide, 9.1.2 Asynchronous and Overlapping Transfers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import ExitStack
from functools import partial, reduce
from itertools import pairwise
from typing import Any

from pytest_gpumem.devices.protocol import (
    ALLOCATORS,
    Device,
    DeviceError,
    Launch,
    Stream,
    Unsupported,
)
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import (
    BadCall,
    BoundKernel,
    Buffers,
    Values,
    check_stream,
    whole_number,
)
from pytest_gpumem.measuring.target import Queue, Target, checking, nothing
from pytest_gpumem.memory.buffers import Arena, on_its_device
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import MovedBytes
from pytest_gpumem.units import format_bytes, parse_bytes

GRAIN = 256  # chunks begin at multiples of so many bytes, as allocations do

# Engines: copy engines, the link to another GPU, the SMs, and the host.
HOST_TO_DEVICE = "host to device"
DEVICE_TO_HOST = "device to host"
PEER = "peer"
KERNEL = "kernel"
HOST = "host"


class Work(Target):
    """Work that stays where it is: addresses make no difference to a link."""

    restores = True  # no graph, no batch: launches on its streams overlap
    launches: Sequence[Launch] = ()  # of its kernel, one for each piece
    parts: tuple[Work, ...] = ()  # what overlaps in it, each to be measured alone too
    streams = 0  # how many the parts are spread over
    chunks: int | None = None  # how many pieces the data is cut into, if it is

    def __init__(
        self,
        arena: Arena,
        name: str,
        engines: Iterable[str],
        queue: Queue,
        poison: Queue = nothing,
        verify: Callable[[], None] | None = None,
    ) -> None:
        """`engines`: those that the work occupies. `queue`: queues a run; work of the host runs at
        once."""
        super().__init__(name, arena)
        self.engines, self.queue, self._queues = frozenset(engines), queue, [queue]
        self.poison, self.verify, self.waits = poison, verify, HOST in self.engines


class Works:
    """The fixture `gpu_work`: composes work for a test. `gpu_benchmark(work)` measures it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = memory.arena
        self.device = memory.arena.device
        self._allocators = ExitStack()

    @on_its_device
    def copy(self, destination: Any, source: Any, *, pieces: int = 1) -> Work:
        """A copy by a copy engine; inside one GPU the SMs copy.

        Args:
            destination, source: buffers, or NumPy arrays, which are pageable memory.
            pieces: number of calls, of equal size.

        Raises:
            BadCall: the sizes differ, or the data is too small for so many pieces.
        """
        memcpy = BoundKernel(CATALOGUE["memcpy"], self.device, self._arena.stream)
        buffers, values = memcpy.arguments((destination, source), {}, self._arena)
        to, origin = buffers.values()
        engine = KERNEL
        if to.kind.on_peer or origin.kind.on_peer:
            engine = PEER
        elif origin.kind.on_host:
            engine = HOST_TO_DEVICE
        elif to.kind.on_host:
            engine = DEVICE_TO_HOST
        name = f"{origin.kind.value} to {to.kind.value}"
        if pieces != 1:
            name += f" in {pieces} pieces"
        return self._launching(memcpy, buffers, values, name, engine, pieces)

    @on_its_device
    def kernel(self, kernel: BoundKernel, *arguments: Any, **scalars: Any) -> Work:
        """One launch of a kernel of `gpu_kernels`, on its persisting stream if it has one.

        Raises:
            BadCall: the arguments do not fit.
        """
        if not isinstance(kernel, BoundKernel):
            raise BadCall(f"{kernel!r} is no kernel of gpu_kernels")
        buffers, values = kernel.arguments(arguments, scalars, self._arena)
        return self._launching(kernel, buffers, values, kernel.name)

    def _launching(
        self,
        kernel: BoundKernel,
        buffers: Buffers,
        values: Values,
        name: str,
        engine: str = KERNEL,
        pieces: int = 1,
    ) -> Work:
        """Return work that launches a kernel on each of `pieces` of its buffers."""
        device, persisting = self.device, kernel.persisting
        launch = kernel.launch(buffers, values)
        device.kernels.compile(launch)
        kernel.fill(buffers, self._arena.stream)
        launches: list[Launch] = []

        def bind() -> None:
            """Make the launches for where the buffers now are."""
            launches.clear()
            for offset, nbytes in cut(min(buffer.nbytes for buffer in buffers.values()), pieces):
                parts = {}
                if pieces > 1:
                    for buffer in buffers.values():
                        parts[buffer] = buffer.allocation.part(offset, nbytes)
                launches.append(kernel.launch(buffers, values, parts))

        bind()
        for buffer in buffers.values():
            buffer.followers.append(bind)

        def queue(stream: Stream) -> None:
            runs_on = stream
            if persisting is not None:
                check_stream(f"the stream of {name}", persisting)
                runs_on = persisting.stream
                device.streams.join(runs_on, stream)
            for launch in launches:
                device.kernels.launch(launch, runs_on)
            if persisting is not None:
                device.streams.join(stream, runs_on)

        checks = checking(kernel, buffers, values, name=name)
        work = Work(self._arena, name, [engine], queue, *checks)
        work.launches, work.moved_bytes = launches, kernel.kernel.traffic(launch.call)
        work.waits = any(buffer.kind.pageable for buffer in buffers.values())
        return work

    def host(self, function: Callable[[], object], name: str | None = None) -> Work:
        """A function that runs on the host."""
        name = name or str(getattr(function, "__name__", type(function).__name__))

        def run(stream: Stream) -> None:
            function()

        return Work(self._arena, name, [HOST], run)

    @on_its_device
    def allocating(self, allocator: str, nbytes: int | str) -> Work:
        """One allocation and its free, by "cudaMalloc", "cudaMallocAsync",
        "cudaMallocAsync, kept", "CuPy pool", "cudaHostAlloc" or "cudaHostRegister".

        Raises:
            DeviceError: there is no such allocator.
            Unsupported: the device does not have it.
        """
        if allocator not in ALLOCATORS:
            raise DeviceError(f"no allocator {allocator!r}; accepted are {ALLOCATORS}")
        size = parse_bytes(nbytes)
        cycle = self._allocators.enter_context(self.device.memory.allocator(allocator))
        return Work(
            self._arena, f"{allocator} of {format_bytes(size)}", [HOST], partial(cycle, size)
        )

    @staticmethod
    def in_turn(*works: Work) -> Work:
        """Pieces of work one after another."""
        if not _engines(works):
            raise BadCall("in_turn() takes pieces of work")
        return reduce(_then, works)

    def after(self, before: Work, work: Work) -> Work:
        """`work`, with an untimed run of `before` ahead of every sample, which fills the caches.

        Measure it with `mode="hot"`: in the other modes L2 is flushed in between. It comes last: no
        other work takes it.
        """
        _engines((before, work))
        prepared = copy.copy(work)
        prepared.prepare = _queue_before(before, work)
        prepared.parts = ()  # measured alone they would run without `before`
        return prepared

    @on_its_device
    def together(self, *works: Work) -> Work:
        """Pieces of work on separate data, at once; the result says how much of the time is hidden.

        Raises:
            BadCall: fewer than two.
            Unsupported: the device has too few copy engines (`asyncEngineCount`); the test skips.
        """
        if len(works) < 2:
            raise BadCall(f"together takes at least two pieces of work, not {len(works)}")
        device = self.device
        _check_engines(device, _engines(works))
        on_host = [work for work in works if work.engines == {HOST}]
        on_device = [work for work in works if work.engines != {HOST}]
        lanes = [device.streams.create() for _ in on_device]
        checks = [work.verify for work in works if work.verify is not None]

        def queue(stream: Stream) -> None:
            for work, lane in zip(on_device, lanes, strict=True):
                work.queue(lane)
            for work in on_host:  # last: it runs now, while the device does what is queued
                work.queue(stream)

        def poison(stream: Stream) -> None:
            for work in works:
                work.poison(stream)

        def verify() -> None:
            for check in checks:
                check()

        spread = _spread(device, lanes, queue)
        whole = _several(works, " beside ", spread, poison, verify if checks else None)
        whole.parts, whole.streams = works, len(lanes)
        return whole

    @on_its_device
    def staged(
        self,
        /,
        n_streams: int,
        shape: int | str | Sequence[int] = "64 MiB",
        dtype: Any = "f4",
        *,
        rounds: int = 1,
        chunks: int | None = None,
        back: bool = True,
    ) -> Work:
        """Data copied to the device, worked on by `elementwise` and copied back, chunk by chunk:
        `staged_copy`.

        Args:
            n_streams: streams that chunks use in turn.
            shape, dtype: of the data, as for the buffer fixtures.
            rounds: of `elementwise`, which takes longer with each.
            chunks: number of chunks; default: one for each stream. It need not divide the data, nor
                the streams divide it.
            back: copy the result back to the host.

        Raises:
            BadCall: the arguments do not fit together.
            Unsupported: the device has no copy engine (`asyncEngineCount` is 0); the test skips.
        """
        memory, device = self._memory, self.device
        whole_number("n_streams", n_streams)
        _check_engines(device, {HOST_TO_DEVICE})
        source, there = memory.pinned(shape, dtype), memory.device(shape, dtype)
        outputs = [there]
        if back:
            outputs.append(memory.pinned(shape, dtype))
        kernel = BoundKernel(CATALOGUE["elementwise"], device, self._arena.stream)
        buffers, values = kernel.arguments((there, rounds), {})

        def steps(pieces: int) -> tuple[Work, ...]:
            works = [
                self.copy(there, source, pieces=pieces),
                self._launching(kernel, buffers, values, kernel.name, pieces=pieces),
            ]
            if back:
                works.append(self.copy(outputs[-1], there, pieces=pieces))
            return tuple(works)

        parts = steps(1)  # measured alone, each on all of the data
        pieces = n_streams if chunks is None else whole_number("chunks", chunks)
        in_chunks = steps(pieces)
        lanes = [device.streams.create() for _ in range(n_streams)]

        def queue(stream: Stream) -> None:
            for index in range(pieces):
                for step in in_chunks:
                    device.kernels.launch(step.launches[index], lanes[index % n_streams])

        name, (argument,) = f"staged {kernel.name}", buffers
        poison_there, verify = checking(
            kernel, {argument: source}, values, results={argument: outputs[-1]}, name=name
        )

        def poison(stream: Stream) -> None:
            for output in outputs:
                device.content.poison(output.allocation, stream)
            poison_there(stream)

        spread = _spread(device, lanes, queue)
        work = Work(self._arena, name, _engines(parts), spread, poison, verify)
        work.moved_bytes = MovedBytes(source.nbytes, back * source.nbytes, link=True)
        work.parts, work.streams, work.chunks = parts, n_streams, pieces
        return work

    @on_its_device
    def enqueue(self, work: Work) -> tuple[float, float]:
        """Seconds until the call that queues `work` returned, and until the work was done.

        An asynchronous call returns first.
        """
        device, stream = self.device, self._arena.stream
        work.queue(stream)  # the first run loads kernels
        work.prepare(stream)
        device.streams.synchronize(stream)
        began = device.now()
        work.queue(stream)
        returned = device.now() - began
        device.streams.synchronize(stream)
        return returned, device.now() - began

    def close(self) -> None:
        self._allocators.close()


def _then(first: Work, last: Work) -> Work:
    queue_first = _queue_before(first, last)

    def queue(stream: Stream) -> None:
        queue_first(stream)
        if last.waits:
            last.device.streams.synchronize(stream)
        last.queue(stream)

    # `queue_first` has verified the first, which then passes again.
    return _several((first, last), " then ", queue, nothing, last.verify or first.verify)


def _queue_before(before: Work, work: Work) -> Queue:
    """Return what queues `before`. In a check, it verifies `before`, then poisons `work`."""

    def queue(stream: Stream) -> None:
        checks = work.arena.checks
        if checks:
            before.poison(stream)
        before.queue(stream)
        if checks:
            work.device.streams.synchronize(stream)
            if before.verify is not None:
                before.verify()
            work.poison(stream)  # its input is right now

    return queue


def _spread(device: Device, lanes: Sequence[Stream], queue: Queue) -> Queue:
    """Return what queues work on lanes: they wait for the stream, and the stream for them."""

    def whole(stream: Stream) -> None:
        for lane in lanes:
            device.streams.join(lane, stream)
        queue(stream)
        for lane in lanes:
            device.streams.join(stream, lane)

    return whole


def _several(
    works: Sequence[Work],
    between: str,
    queue: Queue,
    poison: Queue,
    verify: Callable[[], None] | None,
) -> Work:
    """Join works; the bytes are those that cross links, in both directions."""
    name = between.join(work.name for work in works)
    whole = Work(works[0].arena, name, _engines(works), queue, poison, verify)
    whole.waits = any(work.waits for work in works)
    crossing = 0
    for work in works:
        if work.moved_bytes is not None and work.moved_bytes.link:
            crossing += work.moved_bytes.total
    if crossing:
        whole.moved_bytes = MovedBytes(0, 0, link=True, declared=crossing)
    return whole


def _engines(works: Iterable[Work]) -> set[str]:
    engines = set[str]()
    for work in works:
        if not isinstance(work, Work):
            raise BadCall(f"{type(work).__name__} is no work of gpu_work")
        if work.prepare is not nothing:
            raise BadCall(f"{work.name} is of after(), which comes last: after(in_turn(a, b), c)")
        engines |= work.engines
    return engines


def cut(nbytes: int, pieces: int) -> list[tuple[int, int]]:
    """Return offset and length of pieces of `nbytes` bytes, at multiples of 256 bytes.

    Raises `BadCall`: `pieces` is not positive, or there are fewer multiples than pieces.
    """
    whole_number("pieces", pieces)
    grains = -(-nbytes // GRAIN)
    if pieces > grains:
        raise BadCall(
            f"{format_bytes(nbytes)} cannot be cut into {pieces} pieces at multiples of {GRAIN} "
            f"bytes: {grains} at most"
        )
    starts = [index * grains // pieces * GRAIN for index in range(pieces)]
    return [(start, end - start) for start, end in pairwise([*starts, nbytes])]


def _check_engines(device: Device, engines: Set[str]) -> None:
    facts, both = device.facts, {HOST_TO_DEVICE, DEVICE_TO_HOST}
    if facts.async_engines < 1 and engines & both:
        copies = "nothing beside other work"
    elif facts.async_engines < 2 and engines == both:
        copies = "one way at a time"
    else:
        return
    raise Unsupported(f"{facts.name} copies {copies} (asyncEngineCount is {facts.async_engines})")
