"""Samplers: ways to take the time of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from pytest_gpumem.devices.protocol import CannotCapture, Device, DeviceError, Graph, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.ranges import LAUNCH, MEASURE, Ranges, phase


@dataclass(frozen=True)
class Shot:
    """The parts of a sample. All functions queue on the stream that they are given."""

    device: Device
    streams: tuple[Stream, ...]
    """Streams that samples take in turn; one for what is bound to a stream."""
    places: int
    """Placements of the buffers that live side by side."""
    homes: Callable[[Stream], None] | None
    """Puts managed pages back; cannot be captured."""
    prepare: Callable[[Stream], None]
    """Puts changed inputs back."""
    flush: Callable[[Stream], None]
    """Brings L2 into the mode's state."""
    launch: Callable[[int, Stream], None]
    """What is timed, on the buffers of one placement."""
    ranges: Ranges
    name: str
    """Name of the test's NVTX range."""
    moved: int | None = None
    """Compulsory bytes of one launch, if known."""
    category: str | None = None
    """Which part of the memory system a launch is about: the NVTX category of its range."""
    random: np.random.Generator = field(default_factory=np.random.default_rng)
    """Order of the placements within a round."""
    restores: bool = True
    """Whether `prepare` or `homes` does anything."""
    untimed: int = 0
    """Launches before the interval, on the placement that is timed: what makes it hot where other placements were launched meanwhile."""

    @property
    def stream(self) -> Stream:
        """The first stream, for samplers that use one."""
        return self.streams[0]

    def before(self, place: int, stream: Stream) -> None:
        """Queue everything that comes before the timed interval."""
        self.restore(stream)
        self.state(place, stream)

    def state(self, place: int, stream: Stream) -> None:
        """Queue what brings L2 into the mode's state."""
        self.flush(stream)
        for _ in range(self.untimed):
            self.launch(place, stream)

    def restore(self, stream: Stream) -> None:
        """Queue what puts data and pages back. Pages come last: putting data back touches them."""
        self.prepare(stream)
        if self.homes is not None:
            self.homes(stream)

    def rounds(self, count: int) -> Iterator[int]:
        """Every placement `count` times, each round in a random order: a drift must not look like a difference between placements."""
        for _ in range(count):
            yield from (int(place) for place in self.random.permutation(self.places))


class Sampler(Protocol):
    """A way to take samples."""

    name: str

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """At least `rounds` samples of every placement, in the order in which they were taken: placement, seconds of one launch."""


HOLD_TIMEOUT = 0.5
"""Seconds after which the holding kernel gives up: work that waits for the device would otherwise never return."""


@contextmanager
def held(device: Device, stream: Stream) -> Iterator[None]:
    """Hold `stream` while the block queues work on it; then let it go on.

    A hold that expired meanwhile is reported by the next `synchronize`, except where the block raises: then its own error counts, and
    nobody who uses the stream after it is told of the hold.
    """
    hold = device.streams.hold(stream, HOLD_TIMEOUT)
    try:
        yield
    except BaseException:
        hold.release()
        with suppress(DeviceError):
            device.streams.synchronize(stream)
        raise
    hold.release()


class BlockedSampler:
    """The stream is held while flush, event, launch and event are queued, then released: no launch gap lies inside the interval.

    One sample at a time: several behind one hold read up to 0.5 us longer on an H200 (docs/measuring.md). Streams take turns, because
    the time that a launch needs before the kernel starts differs between them.

    Raises `HoldExpired` from `samples` if the launch itself waits for the device.
    """

    name = "blocked"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._start, self._end = shot.device.streams.event(), shot.device.streams.event()
        self._taken = 0

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        return [(place, self._one(place)) for place in self._shot.rounds(rounds)]

    def _one(self, place: int) -> float:
        shot, device = self._shot, self._shot.device
        stream = shot.streams[self._taken % len(shot.streams)]
        self._taken += 1
        # Before the hold: page migration, and a restore from pageable memory, need the host's help, which a held stream would starve. The
        # whole device, because a restore need not follow the current stream any more than a launch does.
        if shot.restores:
            shot.restore(stream)
            device.streams.synchronize()
        with held(device, stream):
            shot.state(place, stream)
            device.streams.record(self._start, stream)
            shot.launch(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        return device.streams.elapsed(self._start, self._end)


LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6
"""Length of a batch, so that the microsecond of its first launch is a quarter of a per cent of it."""
FOREIGN_BATCH = (5, 50)
"""Least and most for foreign callables, each of which may launch many kernels: a stream holds some thousand before queueing waits."""
UNTIMED = 2
"""Launches before the first event: they bring the buffers into L2."""


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Launches of one batch for a kernel that takes about `latency` seconds; the least where that is unknown."""
    least, most = FOREIGN_BATCH if foreign else (LEAST_BATCH, MOST_BATCH)
    return least if latency is None or latency <= 0 else int(min(most, max(least, BATCH_SECONDS / latency)))


class BatchedSampler:
    """A sample is the mean of `batch` launches that follow each other without a flush: the state is hot.

    The batch is captured into a graph where that is allowed and works, else queued behind a held stream: launches follow each other
    without gaps either way. Raises `HoldExpired` from `samples` if a launch waits for the device.
    """

    name = "batched"

    def __init__(self, shot: Shot, batch: int, *, capture: bool) -> None:
        self._shot = shot
        self._batch = batch
        self._start, self._end = shot.device.streams.event(), shot.device.streams.event()
        self._graphs: list[Graph] = []
        if capture:
            try:
                self._graphs = [shot.device.graphs.capture(shot.stream, partial(self._body, place)) for place in range(shot.places)]
            except CannotCapture:
                self._graphs = []

    def _body(self, place: int) -> None:
        device, stream = self._shot.device, self._shot.stream
        for _ in range(UNTIMED):
            self._shot.launch(place, stream)
        device.streams.record(self._start, stream)
        for _ in range(self._batch):
            self._shot.launch(place, stream)
        device.streams.record(self._end, stream)

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            shot.restore(shot.stream)
            if self._graphs:
                device.graphs.replay(self._graphs[place], shot.stream)
            else:
                device.streams.synchronize(shot.stream)
                with held(device, shot.stream):
                    self._body(place)
            device.streams.synchronize(shot.stream)
            taken.append((place, device.streams.elapsed(self._start, self._end) / self._batch))
        return taken


class HostSampler:
    """Wall-clock time from before the launch until the device is idle: launch latency is included, and the result says so."""

    name = "host"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            shot.before(place, shot.stream)
            device.streams.synchronize()
            start = device.now()
            shot.launch(place, shot.stream)
            device.streams.synchronize()
            taken.append((place, device.now() - start))
        return taken


class PlainSampler:
    """One launch after the other, each in a range `measure` with nothing else in it, the flush in a range of its own before that.

    The launch's range says which part of the memory system it is about, by its category, and the bytes that it must move, as its payload.
    Both ranges are open before the first event is recorded and closed after the second: nothing of theirs is in the interval.

    A filter on a test's `measure` range therefore finds the kernels of the test and none of the harness's.

    No graph (profilers see its kernels in another way) and no held stream (a profiler that replays kernels one by one would wait for
    ever). The times carry the profiler's own cost.
    """

    name = "plain"

    def __init__(self, shot: Shot) -> None:
        self._shot = shot
        self._start, self._end = shot.device.streams.event(), shot.device.streams.event()

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        shot, device, taken = self._shot, self._shot.device, list[tuple[int, float]]()
        for place in shot.rounds(rounds):
            with shot.ranges.range(phase(shot.name, "flush")):
                shot.before(place, shot.stream)
            with (
                shot.ranges.range(phase(shot.name, MEASURE)),
                shot.ranges.range(phase(shot.name, LAUNCH), payload=shot.moved, category=shot.category),
            ):
                device.streams.record(self._start, shot.stream)
                shot.launch(place, shot.stream)
                device.streams.record(self._end, shot.stream)
            device.streams.synchronize(shot.stream)
            taken.append((place, device.streams.elapsed(self._start, self._end)))
        return taken


@dataclass(frozen=True)
class Choice:
    """A sampler by name, the reason, and what to fall back to if it turns out not to work."""

    sampler: str
    reason: str
    fallback: bool
    """Whether another sampler may take over; not if the user asked for this one."""


def choose(requested: str, *, mode: str, foreign: bool, pages_move: bool, restores: bool, waits: bool, profiled: bool) -> Choice:
    """Choose a sampler.

    Args:
        requested: "auto" or a sampler's name.
        mode: state of the cache before each sample.
        foreign: the target is not of the catalogue.
        pages_move: managed pages must be put back before every sample.
        waits: the host takes part in every launch and returns late, as in a copy of pageable memory.
        restores: something must run before every launch, so launches cannot follow each other in a batch.
        profiled: a profiler is attached.

    Raises:
        BadCall: the requested sampler cannot measure in this mode.
    """
    if profiled:
        return Choice("plain", "a profiler is attached: plain launches, one range each", fallback=False)
    if requested != "auto":
        if requested == "batched" and mode != "hot":
            raise BadCall(f'sampler "batched" measures launches that follow each other: it goes with mode "hot", not "{mode}"')
        if requested == "batched" and (pages_move or restores):
            what = "put managed pages back" if pages_move else "restore its input"
            raise BadCall(f'sampler "batched" cannot {what} before every launch; "blocked" can')
        return Choice(requested, "asked for", fallback=False)
    if waits:
        return Choice("host", "the host takes part (a copy of pageable memory): wall-clock time, launch latency included", fallback=False)
    if pages_move:
        return Choice("blocked", "managed pages are put back before every sample, which a graph cannot do", fallback=True)
    if mode == "hot" and not restores:
        return Choice("batched", "hot launches follow each other", fallback=True)
    if foreign:
        return Choice(
            "blocked", "what a foreign callable does on the host is unknown, and a hold that expires shows that it waits", fallback=True
        )
    return Choice("blocked", "one launch at a time behind a held stream reads the steadiest", fallback=True)
