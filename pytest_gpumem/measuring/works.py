"""Work of copy engines, kernels and the host as a target, the parts of what overlaps, and how a test asks for such work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pytest_gpumem.devices.protocol import Stream
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.staging import (
    Allocating,
    BadWork,
    Copy,
    Host,
    InTurn,
    Launched,
    StagedCopy,
    Together,
    Work,
    WrongContent,
    bound_of,
    enqueue,
)
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.records.measurement import Traffic
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.units import format_share, format_time, parse_bytes

if TYPE_CHECKING:
    from pytest_gpumem.measuring.benchmark import Conductor, Plan

_W = TypeVar("_W", bound=Work)

PART_SHARE = 0.25
"""Share of a measurement's budget that each part of overlapping work, and their sequence, is measured with."""


class WorkTarget:
    """A piece of work where it is: its buffers are not moved, because a link does not see the difference."""

    foreign = False
    restores = True
    """Launches of work that spreads over streams do not follow each other in a batch."""
    footprint: int | None = None
    accesses_per_launch: int | None = None
    sectors_per_request: float | None = None
    requested: int | None = None
    kernel_source: str | None = None
    host_memory: tuple[tuple[str, str], ...] = ()
    max_placements: int | None = 1
    window = None
    homes: tuple[Buffer, ...] = ()
    any_stream = False

    def __init__(self, work: Work, arena: Arena) -> None:
        self._work, self._arena = work, arena
        self.name = work.name
        self.notes: tuple[str, ...] = ()
        self.waits = work.on_host
        self.can_check = work.verifies

    @property
    def traffic(self) -> Traffic | None:
        return self._work.traffic

    @property
    def stream(self) -> Stream:
        return self._arena.stream

    def run_on(self, stream: Stream) -> None:
        raise BadCall(f"{self.name} runs on streams of its own")

    def spread(self, wanted: int, most: int, random: np.random.Generator) -> int:
        """Nothing moves."""
        return 1

    def prepare(self, stream: Stream) -> None:
        """Nothing: work that changes its input takes the same time on whatever it finds."""

    def launch(self, place: int, stream: Stream) -> None:
        self._work.queue(stream)

    def check(self) -> None:
        device, stream = self._arena.device, self._arena.stream
        self._work.poison(stream)
        device.synchronize(stream)
        self._work.queue(stream)
        device.synchronize(stream)
        try:
            self._work.verify()
        except WrongContent as error:
            raise WrongResult(f"{error}, after one run on poisoned outputs") from None

    def close(self) -> None:
        """Holds nothing: the work is the test's."""


def overlap_of(conductor: Conductor, work: Work, plan: Plan, *, arena: Arena, name: str) -> Overlap | None:
    """Measure each part of overlapping work alone, and all of them in turn, in the way in which the work itself is measured.

    None for work that overlaps nothing, and under a profiler, which slows each part in its own way.
    """
    if not isinstance(work, (Together, StagedCopy)) or conductor.profiled:
        return None
    sampler = "host" if work.on_host else plan.sampler
    short = replace(plan, sampler=sampler, placements=1, budget=PART_SHARE * plan.budget)

    def latency(part: Work) -> float:
        return conductor.measure(WorkTarget(part, arena), short, arena=arena, label="", name=name).latency

    device = arena.device
    took = [(part, latency(part)) for part in work.parts]
    return Overlap(
        parts=tuple(Part(part.name, seconds) for part, seconds in took),
        sequential=latency(InTurn(device, work.parts)),
        bound=bound_of(device, [(part.engines, seconds) for part, seconds in took]),
        streams=work.streams,
        chunks=work.chunks if isinstance(work, StagedCopy) else None,
    )


def overlap_note(overlap: Overlap, latency: float) -> str:
    """One sentence for a reader: how much is hidden, against which bound, beside the text's estimate."""
    parts = ", ".join(f"{part.name} {format_time(part.seconds)}" for part in overlap.parts)
    hidden = overlap.hidden(latency)
    share = "there is nothing to hide" if hidden is None else f"hides {format_share(hidden)} of what overlap can hide"
    estimate = "" if overlap.estimate is None else f", the text's estimate {format_time(overlap.estimate)}"
    return f"{share}: in turn {format_time(overlap.sequential)}, bound {format_time(overlap.bound)}{estimate}; alone: {parts}"


class Works:
    """Puts work together for one test: what the fixture `gpu_work` gives. `gpu_benchmark(work)` measures it."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._arena = memory.arena
        self._made: list[Work] = []
        self._staged: dict[tuple[object, ...], tuple[Buffer, Buffer, Buffer | None]] = {}

    def copy(self, destination: Any, source: Any, *, pieces: int = 1) -> Copy:
        """A copy by a copy engine.

        Args:
            destination, source: buffers, or NumPy arrays, which are pageable memory.
            pieces: calls that it takes, of equal size.

        Raises:
            BadWork: the sizes differ, or so many pieces cannot be had.
        """
        device = self._arena.device
        return self._keep(Copy(device, self._buffer("destination", destination), self._buffer("source", source), pieces=pieces))

    def kernel(self, kernel: BoundKernel, *arguments: Any, **scalars: Any) -> Launched:
        """One launch of a kernel of `gpu_kernels`. Raises `BadCall` or `BadWork` for arguments that do not fit."""
        if not isinstance(kernel, BoundKernel):
            raise BadWork(f"kernel() takes a kernel of gpu_kernels, not {kernel!r}")
        buffers, values = kernel.arguments(arguments, scalars)
        kernel.fill(buffers, self._arena.stream)
        return self._keep(Launched(self._arena.device, kernel.kernel, buffers, values, kernel.blocks))

    def host(self, function: Callable[[], object], name: str | None = None) -> Host:
        """A function that runs on the host."""
        if not callable(function):
            raise BadWork(f"host() takes a function without arguments, not {function!r}")
        return self._keep(Host(function, name))

    def busy(self, seconds: float) -> Host:
        """Work of the host that takes so many seconds: it looks at the clock until they have passed."""
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < 10:
            raise BadWork(f"busy({seconds!r}): a number of seconds above 0 and below 10")
        now = self._arena.device.now

        def spin() -> None:
            end = now() + seconds
            while now() < end:
                pass

        return self.host(spin, f"host busy for {format_time(seconds)}")

    def allocating(self, allocator: str, nbytes: int | str) -> Allocating:
        """One allocation and its free, by an allocator that `devices.protocol.ALLOCATORS` names.

        Raises:
            DeviceError: there is no such allocator.
            Unsupported: the device has none such.
        """
        return self._keep(Allocating(self._arena.device, allocator, parse_bytes(nbytes)))

    def in_turn(self, *works: Work) -> InTurn:
        """Pieces of work one after another. Raises `BadWork` for fewer than two."""
        return self._keep(InTurn(self._arena.device, self._works(works)))

    def together(self, *works: Work) -> Together:
        """Pieces of work on data of their own at once; its measurement says how much of the time is hidden.

        Raises:
            BadWork: fewer than two.
            Unsupported: the device has too few copy engines (`asyncEngineCount`); the test skips.
        """
        return self._keep(Together(self._arena.device, self._works(works)))

    def staged(
        self,
        n_streams: int,
        shape: int | str | Sequence[int] = "64 MiB",
        dtype: Any = "f4",
        *,
        kernel: BoundKernel | None = None,
        chunks: int | None = None,
        back: bool = True,
        **scalars: Any,
    ) -> StagedCopy:
        """Data copied to the device, worked on and copied back, chunk by chunk over `n_streams` streams: the fixture `staged_copy`.

        Args:
            n_streams: streams that chunks take in turn.
            shape, dtype: of the data, as the buffer fixtures take them; a second call with the same uses the same buffers.
            kernel: of `gpu_kernels`, updates its one array element by element; default: `elementwise`.
            chunks: pieces; default: one to a stream. They need not divide the data, nor the streams them.
            back: copy the result back to the host.
            scalars: the kernel's, such as `rounds=8`.

        Raises:
            BadWork: the arguments do not fit together.
            Unsupported: the device has no copy engine (`asyncEngineCount` is 0); the test skips.
        """
        memory = self._memory
        wanted = (shape if isinstance(shape, (int, str)) else tuple(shape), str(dtype), back)
        if wanted not in self._staged:
            source, there = memory.pinned(shape, dtype), memory.device(shape, dtype)
            self._staged[wanted] = source, there, memory.pinned(shape, dtype) if back else None
        source, there, target = self._staged[wanted]
        chosen = CATALOGUE["elementwise"] if kernel is None else kernel.kernel
        return self._keep(StagedCopy(self._arena.device, source, there, target, chosen, scalars, n_streams, chunks))

    def enqueue(self, work: Work) -> tuple[float, float]:
        """Seconds until the call that queues `work` returned, and until it was done: the proof that a call is asynchronous."""
        self._works([work])
        work.queue(self._arena.stream)  # the first run loads what has to be loaded
        return enqueue(self._arena.device, work, self._arena.stream)

    def close(self) -> None:
        """Give back what work holds."""
        made, self._made = self._made, []
        for work in made:
            work.close()

    def _keep(self, work: _W) -> _W:
        self._made.append(work)
        return work

    def _buffer(self, name: str, value: Any) -> Buffer:
        taken = self._arena.taken(value)
        if not isinstance(taken, Buffer):
            raise BadWork(f"copy(): {name!r} is a buffer from a fixture or a NumPy array, not {type(value).__name__}")
        return taken

    @staticmethod
    def _works(works: Sequence[Any]) -> tuple[Work, ...]:
        for work in works:
            if not isinstance(work, Work):
                raise BadWork(f"{work!r} is no work; gpu_work makes it")
        return tuple(works)
