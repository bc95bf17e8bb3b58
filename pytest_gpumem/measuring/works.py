"""Work as a test composes it (`gpu_work`, `staged_copy`), and how much of its time overlap
hides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pytest_gpumem.devices.protocol import Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.measuring.plan import Plan
from pytest_gpumem.measuring.work import (
    Work,
    bound_of,
    copy_work,
    host_work,
    kernel_work,
    staged_work,
    work_in_turn,
    work_together,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.current_device import on_its_device
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Overlap, Part
from pytest_gpumem.units import format_bytes, format_time, parse_bytes

PART_SHARE = 0.25  # share of the budget that each part, and their sequence, is measured with
AGREE = 0.1
"""Largest difference between the sequence and the sum of its parts, as a share of the sum. Other
traffic on a host's link makes copies up to twice as long, for some milliseconds."""
TRIES = 3  # times that parts and sequence are measured until they agree


class Works:
    """The fixture `gpu_work`: composes work for a test. `gpu_benchmark(work)` measures it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = memory.arena
        self.device = memory.arena.device
        self._closes: list[Callable[[], None]] = []
        self._staged: dict[tuple[object, ...], tuple[Buffer, Buffer, Buffer | None]] = {}

    def copy(self, destination: Any, source: Any, *, pieces: int = 1) -> Work:
        """A copy by a copy engine.

        Args:
            destination, source: buffers, or NumPy arrays, which are pageable memory.
            pieces: number of calls, of equal size.

        Raises:
            BadCall: the sizes differ, or the data is too small for so many pieces.
        """
        to = self._buffer("destination", destination)
        origin = self._buffer("source", source)
        return copy_work(self.device, to, origin, pieces=pieces)

    @on_its_device
    def kernel(self, kernel: BoundKernel, *arguments: Any, **scalars: Any) -> Work:
        """One launch of a kernel of `gpu_kernels`, on its persisting stream if it has one.

        Raises:
            BadCall: the arguments do not fit.
        """
        if not isinstance(kernel, BoundKernel):
            raise BadCall(f"kernel() takes a kernel of gpu_kernels, not {kernel!r}")
        buffers, values = kernel.arguments(arguments, scalars)
        kernel.fill(buffers, self._arena.stream)
        return kernel_work(kernel, buffers, values)

    def host(self, function: Callable[[], object], name: str | None = None) -> Work:
        """A function that runs on the host."""
        if not callable(function):
            raise BadCall(f"host() takes a function without arguments, not {function!r}")
        name = name or str(getattr(function, "__name__", type(function).__name__))

        def run(stream: Stream) -> None:
            function()

        return host_work(run, name)

    def busy(self, seconds: float) -> Work:
        """Work of the host that takes `seconds`: it reads the clock until they have passed."""
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not 0 < seconds < 10
        ):
            raise BadCall(f"busy({seconds!r}): a number of seconds above 0 and below 10")
        now = self.device.now

        def spin() -> None:
            end = now() + seconds
            while now() < end:
                pass

        return self.host(spin, f"host busy for {format_time(seconds)}")

    @on_its_device
    def allocating(self, allocator: str, nbytes: int | str) -> Work:
        """One allocation and its free, by "cudaMalloc", "cudaMallocAsync", "CuPy pool" or another.

        `devices.protocol` has the allocators.

        Raises:
            DeviceError: there is no such allocator.
            Unsupported: the device does not have it.
        """
        size, made = parse_bytes(nbytes), self.device.memory.allocator(allocator)

        def cycle(stream: Stream) -> None:
            made.cycle(size, stream)

        self._closes.append(made.close)
        return host_work(cycle, f"{allocator} of {format_bytes(size)}")

    def in_turn(self, *works: Work) -> Work:
        """Pieces of work one after another. Raises `BadCall` for fewer than two."""
        return work_in_turn(self.device, self._works(works))

    def after(self, before: Work, work: Work) -> Work:
        """`work`, with an untimed run of `before` ahead of every sample, which fills the caches.

        Measure it with `mode="hot"`: in the other modes L2 is flushed in between.
        """
        self._works([before, work])
        return dataclasses.replace(work, before=before)

    @on_its_device
    def together(self, *works: Work) -> Work:
        """Pieces of work on separate data, at once; the result says how much of the time is hidden.

        Raises:
            BadCall: fewer than two.
            Unsupported: the device has too few copy engines (`asyncEngineCount`); the test skips.
        """
        return work_together(self.device, self._works(works))

    @on_its_device
    def staged(
        self,
        /,
        n_streams: int,
        shape: int | str | Sequence[int] = "64 MiB",
        dtype: Any = "f4",
        *,
        kernel: BoundKernel | None = None,
        chunks: int | None = None,
        back: bool = True,
        **scalars: Any,
    ) -> Work:
        """Data copied to the device, worked on and copied back, chunk by chunk: `staged_copy`.

        Args:
            n_streams: streams that chunks use in turn.
            shape, dtype: of the data, as for the buffer fixtures; a second call with the same uses
                the same buffers.
            kernel: of `gpu_kernels`, updates its one array element by element; default:
                `elementwise`.
            chunks: number of chunks; default: one for each stream. It need not divide the data, nor
                the streams divide it.
            back: copy the result back to the host.
            scalars: the kernel's, such as `rounds=8`.

        Raises:
            BadCall: the arguments do not fit together.
            Unsupported: the device has no copy engine (`asyncEngineCount` is 0); the test skips.
        """
        memory = self._memory
        wanted = repr(shape), str(dtype), back
        if wanted not in self._staged:
            source, there = memory.pinned(shape, dtype), memory.device(shape, dtype)
            self._staged[wanted] = source, there, memory.pinned(shape, dtype) if back else None
        source, there, target = self._staged[wanted]
        chosen = kernel or BoundKernel(CATALOGUE["elementwise"], self.device, self._arena.stream)
        return staged_work(source, there, target, chosen, scalars, n_streams, chunks)

    @on_its_device
    def enqueue(self, work: Work) -> tuple[float, float]:
        """Seconds until the call that queues `work` returned, and until the work was done.

        An asynchronous call returns first.
        """
        self._works([work])
        device, stream = self.device, self._arena.stream
        work.queue(stream)  # the first run loads kernels
        device.streams.synchronize(stream)
        began = device.now()
        work.queue(stream)
        returned = device.now() - began
        device.streams.synchronize(stream)
        return returned, device.now() - began

    def close(self) -> None:
        """Free what allocators keep."""
        while self._closes:
            self._closes.pop()()

    def _buffer(self, name: str, value: Any) -> Buffer:
        taken = self._arena.taken(value)
        if not isinstance(taken, Buffer):
            raise BadCall(
                f"copy(): {name!r} is a buffer from a fixture or a NumPy array, not "
                f"{type(value).__name__}"
            )
        return taken

    @staticmethod
    def _works(works: Sequence[Any]) -> tuple[Work, ...]:
        for work in works:
            if not isinstance(work, Work):
                raise BadCall(f"{work!r} is no work; gpu_work makes it")
        return tuple(works)


def overlap_of(
    conductor: Conductor, work: Work, plan: Plan, *, arena: Arena, name: str
) -> Overlap | None:
    """Measure each part of overlapping work alone, and all parts in turn.

    Returns None for work that overlaps nothing, and under a profiler, which slows each part
    differently.
    """
    if not work.parts or work.before is not None or conductor.profiled:
        return None
    short = dataclasses.replace(plan, placements=1, budget=PART_SHARE * plan.budget)
    if work.on_host:
        short = dataclasses.replace(short, sampler="host")

    def latency(part: Work) -> float:
        # The whole is checked, of which it is a part.
        unchecked = dataclasses.replace(part.target(arena), verify=None)
        return conductor.measure(unchecked, short, arena=arena, label="", name=name).latency

    pieces = (*work.parts, work_in_turn(arena.device, work.parts))
    seconds = [latency(piece) for piece in pieces]
    for _ in range(TRIES - 1):
        together = sum(seconds[:-1])
        if abs(seconds[-1] - together) <= AGREE * together:
            break
        # What others do on the link makes a reading longer, never shorter.
        for index, piece in enumerate(pieces):
            seconds[index] = min(seconds[index], latency(piece))
    engines = [part.engines for part in work.parts]
    return Overlap(
        parts=tuple(map(Part, [part.name for part in work.parts], seconds)),
        sequential=seconds[-1],
        bound=bound_of(arena.device, list(zip(engines, seconds, strict=False))),
        streams=work.streams,
        chunks=work.chunks,
    )
