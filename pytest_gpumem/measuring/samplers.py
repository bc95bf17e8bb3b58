"""Samplers: ways to time a launch, and the choice of one."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np

from pytest_gpumem.devices.protocol import Device, DeviceError, Graph, Hold, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.ranges import LAUNCH, MEASURE, Ranges, phase


@dataclass(frozen=True)
class Shot:
    """One sample of a target: what comes before, in and after the timed interval, queued on the stream that each method gets."""

    device: Device
    target: Target
    streams: tuple[
        Stream, ...
    ]  # streams that samples use in turn; one for what is bound to a stream
    flush: Callable[[Stream], None]  # brings L2 into the mode's state
    ranges: Ranges
    name: str  # name of the test's NVTX range
    category: str | None = None
    """Part of the memory system that a launch exercises: the NVTX category of its range."""
    random: np.random.Generator = field(
        default_factory=np.random.default_rng
    )  # order of the placements within a round
    untimed: int = 0
    """Launches before the interval, on the placement that is timed: it is hot then, although other placements were launched meanwhile."""
    resets: bool = False
    """Turn persisting lines to normal before L2 is brought into the mode's state: lines that foreign code loads with `L2::evict_last`, as
    kernels of Triton do, survive a flush by plain loads in part."""
    host_times: list[float] = field(
        default_factory=list
    )  # seconds that the host took to queue a launch, of each sample
    clocks: list[float] = field(
        default_factory=list
    )  # hertz of the SM clock that ran, of each sample where it is known

    @property
    def stream(self) -> Stream:
        """The first stream, for samplers that use one."""
        return self.streams[0]

    def entered(self) -> AbstractContextManager[None]:
        """Make the stream the current one of the libraries for all samples of the block: once a launch takes some ten microseconds."""
        # work of the host may be the user's, and use any library
        foreign = self.target.foreign or self.target.waits
        return self.device.kernels.current_stream(self.stream) if foreign else nullcontext()

    @property
    def restores(self) -> bool:
        """True if something comes before every launch."""
        return self.target.restores or bool(self.target.managed)

    def restore(self, stream: Stream) -> None:
        """Queue what restores data and puts pages back. Pages come last: restoring data touches them."""
        self.target.prepare(stream)
        for buffer in self.target.managed:
            buffer.put_home(stream)

    def reset(self) -> None:
        """Reset persisting lines, at once and in no stream's order."""
        if self.resets:
            self.device.l2.reset_persisting()

    def state(self, place: int, stream: Stream) -> None:
        """Queue what brings L2 into the mode's state."""
        self.flush(stream)
        for _ in range(self.untimed):
            self.launch(place, stream)

    def launch(self, place: int, stream: Stream) -> None:
        """Queue what is timed."""
        self.target.launch(place, stream)

    def timed(self, place: int, stream: Stream, count: int = 1) -> None:
        """Queue what is timed `count` times, and note how long the host takes for one."""
        begun = self.device.now()
        for _ in range(count):
            self.launch(place, stream)
        self.host_times.append((self.device.now() - begun) / count)

    def rounds(self, count: int) -> Iterator[int]:
        """Every placement `count` times, each round in a random order: a drift must not look like a difference between placements."""
        places = self.target.places
        for _ in range(count):
            yield from self.random.permutation(places).tolist() if places > 1 else (0,)


class Sampler(ABC):
    """A way to take samples."""

    def __init__(self, shot: Shot) -> None:
        self._shot, self._device = shot, shot.device
        self._start, self._end = shot.device.streams.event(), shot.device.streams.event()

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """`rounds` samples of every placement, in their order in time: placement, seconds of one launch."""
        with self._shot.entered():
            return [(place, self._one(place)) for place in self._shot.rounds(rounds)]

    @abstractmethod
    def _one(self, place: int) -> float:
        """Seconds of one launch on a placement."""


HOLD_TIMEOUT = 0.5  # seconds after which a hold expires: work that waits for the device would otherwise never return


class held:  # noqa: N801 - a context manager; not a generator, which takes longer: samples repeat it
    """Hold `stream` while the block queues work on it, then release it; for `timeout` seconds at most. The next `synchronize` raises
    `HoldExpired` if the hold expired meanwhile. If the block raises, only its own error counts."""

    __slots__ = ("_device", "_hold", "_stream", "_timeout")

    def __init__(self, device: Device, stream: Stream, timeout: float = HOLD_TIMEOUT) -> None:
        self._device, self._stream, self._timeout = device, stream, timeout

    def __enter__(self) -> Hold:
        self._hold = self._device.streams.hold(self._stream, self._timeout)
        return self._hold

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hold.release()
        if kind is not None:
            with suppress(DeviceError):
                self._device.streams.synchronize(self._stream)


class BlockedSampler(Sampler):
    """Holds the stream while it queues flush, event, launch and event, then releases it: no launch gap lies inside the interval.

    One sample at a time: several behind one hold read up to 0.5 us longer on an H200 (docs/measuring.md). Streams take turns, because what
    a launch needs before the kernel starts differs between them. `samples` raises `HoldExpired` if the launch itself waits for the device.
    """

    _count = 0

    def _one(self, place: int) -> float:
        shot, device = self._shot, self._device
        stream = shot.streams[self._count % len(shot.streams)]
        self._count += 1
        # Before the hold: page migration, and a restore from pageable memory, need the host, which waits for a held stream. The whole
        # device, because a restore may run on any stream, as a launch may.
        if shot.restores:
            shot.restore(stream)
            device.streams.synchronize()
        shot.reset()
        with held(device, stream) as hold:
            shot.state(place, stream)
            device.streams.record(self._start, stream)
            shot.timed(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        if (clock := hold.clock()) is not None:
            shot.clocks.append(clock)
        return device.streams.elapsed(self._start, self._end)


LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6  # length of a batch: the extra microsecond of its first launch is a quarter of a per cent of it
SLOW_BATCH_SECONDS = 2e-3
"""Length from which a batch has fewer than the least launches, down to one: a launch more or less then changes a reading by 0.025 %."""
FOREIGN_BATCH = (
    5,
    50,
)  # fewest and most calls of a foreign callable, as far as a stream queues them
UNTIMED = 2  # launches before the first event: they bring the buffers into L2


QUEUED_SECONDS = 900e-6
"""Most seconds of foreign calls behind one hold. A stream queues 1,024 launches before the next one waits, and a kernel after another one
takes a microsecond or more."""


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Launches of one batch for a kernel that takes about `latency` seconds; one where that is unknown."""
    if latency is None or latency <= 0:
        return 1
    least, most = FOREIGN_BATCH if foreign else (LEAST_BATCH, MOST_BATCH)
    if foreign:
        most = max(1, min(most, int(QUEUED_SECONDS / latency) - UNTIMED))
    return int(
        min(most, max(min(least, math.ceil(SLOW_BATCH_SECONDS / latency)), BATCH_SECONDS / latency))
    )


def untimed_of(batch: int, places: int) -> int:
    """Launches before the first event of a batch. One slow launch follows the one before it, unless other placements come between."""
    return UNTIMED if batch > 1 else min(places - 1, 1)


BATCHES = ("graph", "batched")  # samplers that time launches which follow each other


class BatchedSampler(Sampler):
    """Times `batch` launches that follow each other without a flush, in the hot state; a sample is their mean.
    A held stream queues them without gaps. `samples` raises `HoldExpired` if a launch waits for the device.
    """

    def __init__(self, shot: Shot, batch: int) -> None:
        super().__init__(shot)
        self._batch = batch

    def _body(self, place: int) -> None:
        device, stream = self._device, self._shot.stream
        for _ in range(untimed_of(self._batch, self._shot.target.places)):
            self._shot.launch(place, stream)
        device.streams.record(self._start, stream)
        self._shot.timed(place, stream, self._batch)
        device.streams.record(self._end, stream)

    def _one(self, place: int) -> float:
        shot, device = self._shot, self._device
        shot.restore(shot.stream)
        self._queue(place)
        device.streams.synchronize(shot.stream)
        return device.streams.elapsed(self._start, self._end) / self._batch

    def _queue(self, place: int) -> None:
        """Queue a batch."""
        device, stream = self._device, self._shot.stream
        device.streams.synchronize(stream)
        with held(device, stream) as hold:
            self._body(place)
        device.streams.synchronize(stream)
        if (clock := hold.clock()) is not None:
            self._shot.clocks.append(clock)


class GraphSampler(BatchedSampler):
    """As `BatchedSampler`, with each batch as one CUDA graph. Its launches follow each other faster than those of a stream: a triad of
    2 MiB arrays reads 2.67 us here and 3.06 us behind a hold (H100), so the two are different clocks."""

    def __init__(self, shot: Shot, batch: int) -> None:
        """Raises `CannotCapture`: with the reason."""
        super().__init__(shot, batch)
        captured = partial(shot.device.graphs.capture, shot.stream)
        self._graphs: list[Graph] = [
            captured(partial(self._body, place)) for place in range(shot.target.places)
        ]
        shot.host_times.clear()  # of the captures

    def _queue(self, place: int) -> None:
        self._device.graphs.replay(self._graphs[place], self._shot.stream)


class HostSampler(Sampler):
    """Times a launch by the wall clock until the device is idle: launch latency is included, which the result states."""

    def _one(self, place: int) -> float:
        shot, device = self._shot, self._device
        shot.restore(shot.stream)
        shot.reset()
        shot.state(place, shot.stream)
        device.streams.synchronize()
        start = device.now()
        shot.timed(place, shot.stream)
        device.streams.synchronize()
        return device.now() - start


class PlainSampler(Sampler):
    """Launches one after the other under a profiler, each alone in a range `measure`, with the flush in a range of its own before it.

    So a filter on a test's `measure` range finds the kernels of the test and none of the harness's. The launch's own range has the part of
    the memory system as its category and the compulsory bytes as its payload. There is no graph, whose kernels profilers show in another
    way, and no held stream, for which a profiler that replays kernels would wait for ever. The times contain the profiler's own cost.
    """

    def _one(self, place: int) -> float:
        shot, device, traffic = self._shot, self._device, self._shot.target.moved_bytes
        with shot.ranges.range(phase(shot.name, "flush")):
            shot.restore(shot.stream)
            shot.state(place, shot.stream)
        with (
            shot.ranges.range(phase(shot.name, MEASURE)),
            shot.ranges.range(
                phase(shot.name, LAUNCH),
                payload=None if traffic is None else traffic.total,
                category=shot.category,
            ),
        ):
            device.streams.record(self._start, shot.stream)
            shot.launch(place, shot.stream)
            device.streams.record(self._end, shot.stream)
        device.streams.synchronize(shot.stream)
        return device.streams.elapsed(self._start, self._end)


@dataclass(frozen=True)
class Choice:
    """A sampler by name, with the reason."""

    sampler: str
    reason: str
    fallback: bool  # True if the host's clock may take over; not if the user asked for this sampler


def in_batches(why: str = "") -> Choice:
    """The sampler `batched`, with the reason why it is no graph."""
    return Choice(
        "batched",
        f"hot launches follow each other behind a hold{why and f', as no graph takes them: {why}'}",
        fallback=True,
    )


_ONE_AT_A_TIME = "each launch is queued while the stream is blocked"


def choose(
    requested: str, target: Target, mode: str, *, profiled: bool, launches_wait: bool = False
) -> Choice:
    """Choose a sampler.
    `requested`: "auto" or a sampler's name.
    `launches_wait`: every launch waits for the device (`Device.launches_wait`).
    Raises `BadCall`: the requested sampler cannot measure the target in this mode.
    """
    pages_move = bool(target.managed)
    if profiled:
        return Choice(
            "plain", "a profiler is attached: plain launches, one range each", fallback=False
        )
    if requested != "auto":
        if requested in BATCHES and mode != "hot":
            raise BadCall(
                f'sampler "{requested}" measures launches that follow each other: it goes with mode "hot", not "{mode}"'
            )
        if requested in BATCHES and (pages_move or target.restores):
            what = "put managed pages back" if pages_move else "restore its input"
            raise BadCall(f'sampler "{requested}" cannot {what} before every launch; "blocked" can')
        return Choice(requested, "asked for", fallback=False)
    if launches_wait:
        return Choice(
            "host", "CUDA_LAUNCH_BLOCKING is set: every launch waits for the device", fallback=False
        )
    if target.waits:
        return Choice(
            "host",
            "the host takes part (a copy of pageable memory): wall-clock time, launch latency included",
            fallback=False,
        )
    if pages_move:
        return Choice("blocked", "managed pages are put back before every sample", fallback=True)
    if mode == "hot" and not target.restores:
        # Code that is not ours is not captured unasked: what it does on the host is unknown.
        return (
            in_batches()
            if target.foreign
            else Choice("graph", "hot launches follow each other in a CUDA graph", fallback=True)
        )
    if target.foreign:
        return Choice(
            "blocked",
            f"{_ONE_AT_A_TIME}; a callable that waits for the device is timed by the host's clock",
            fallback=True,
        )
    return Choice("blocked", f"{_ONE_AT_A_TIME}, which varies least", fallback=True)
