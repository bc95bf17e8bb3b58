"""Samplers: ways to time a launch, and the choice of a sampler."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np

from pytest_gpumem.devices.protocol import Device, DeviceError, Hold, Stream
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.ranges import LAUNCH, MEASURE, Ranges, phase

HOLD_TIMEOUT = 0.5
"""Seconds after which a hold expires: work that waits for the device would never return."""
LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6
"""Length of a batch: the extra microsecond of its first launch is 0.25 % of it."""
SLOW_BATCH_SECONDS = 2e-3
"""Length from which a batch has fewer than `LEAST_BATCH` launches, down to a single launch."""
LEAST_FOREIGN_BATCH = 5
MOST_FOREIGN_BATCH = 50
UNTIMED = 2  # launches before the first event: they bring the buffers into L2
QUEUED_SECONDS = 900e-6
"""Most seconds of foreign calls behind a hold: a stream queues 1,024 launches of a microsecond or
more before the next one waits."""
BATCHES = ("graph", "batched")  # samplers that time launches which follow each other


class held:  # noqa: N801 - a context manager; not a generator, which takes longer
    """Hold `stream` while the block queues work on it, for `timeout` seconds at most.

    The next `synchronize` raises `HoldExpired` if the hold expired meanwhile. If the block raises,
    only its own error counts.
    """

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


@dataclass(frozen=True)
class SampleSetup:
    """What every sampler needs to know of a measurement."""

    device: Device
    target: Target
    streams: tuple[Stream, ...]  # samples use them in turn
    flush: Callable[[Stream], None]  # brings L2 into the mode's state
    ranges: Ranges
    name: str  # name of the test's NVTX range
    category: str | None = None  # NVTX category of a launch: the part of the memory system
    random: np.random.Generator = field(default_factory=np.random.default_rng)
    untimed: int = 0  # launches after the flush, before the timed launch
    resets: bool = False
    """Turn persisting lines to normal before each flush: lines that are loaded by `L2::evict_last`,
    as by Triton, survive a flush by plain loads in part."""
    host_times: list[float] = field(default_factory=list)
    """Seconds that the host took to queue a launch, of each sample."""
    clocks: list[float] = field(default_factory=list)
    """Hertz of the SM clock during the hold before each sample, where it is known."""

    def restore(self, stream: Stream) -> None:
        """Restore inputs, then put managed pages back, because restoring touches them."""
        self.target.prepare(stream)
        for buffer in self.target.managed:
            buffer.put_home(stream)


class Sampler(ABC):
    """A way to take samples."""

    def __init__(self, setup: SampleSetup) -> None:
        self._setup, self._device = setup, setup.device
        self._stream = setup.streams[0]
        self._start = setup.device.streams.event()
        self._end = setup.device.streams.event()

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """Take `rounds` samples of every placement: number of the placement, seconds of a launch.

        Each round visits the placements in random order: a drift must not look like a difference
        between placements.
        """
        places = self._setup.target.places
        samples = []
        with self._current_stream():
            for _ in range(rounds):
                order = [0]
                if places > 1:
                    order = self._setup.random.permutation(places).tolist()
                for place in order:
                    samples.append((place, self._sample(place)))
        return samples

    @abstractmethod
    def _sample(self, place: int) -> float:
        """Return the seconds of a launch on a placement."""

    def _current_stream(self) -> AbstractContextManager[None]:
        """Make the stream current once for all samples, which takes some ten microseconds."""
        target = self._setup.target
        if target.foreign or target.waits:  # work of the host may be the user's
            return self._device.kernels.current_stream(self._stream)
        return nullcontext()

    def _flush(self, place: int, stream: Stream) -> None:
        """Queue what brings L2 into the mode's state."""
        self._setup.flush(stream)
        for _ in range(self._setup.untimed):
            self._setup.target.launch(place, stream)

    def _reset_persisting(self) -> None:
        if self._setup.resets:
            self._device.l2.reset_persisting()

    def _launch(self, place: int, stream: Stream, count: int = 1) -> None:
        """Queue the timed launches, and note how long the host takes for each."""
        begun = self._device.now()
        for _ in range(count):
            self._setup.target.launch(place, stream)
        self._setup.host_times.append((self._device.now() - begun) / count)

    def _note_clock(self, hold: Hold) -> None:
        clock = hold.clock()
        if clock is not None:
            self._setup.clocks.append(clock)


class BlockedSampler(Sampler):
    """Holds the stream while it queues flush, event, launch and event, then releases it.

    No launch gap lies inside the interval. Several samples behind a hold would read up to 0.5 us
    longer (H200). Streams take turns, because launch overhead differs between them. `samples`
    raises `HoldExpired` if a launch waits for the device.
    """

    _count = 0

    def _sample(self, place: int) -> float:
        setup, device = self._setup, self._device
        stream = setup.streams[self._count % len(setup.streams)]
        self._count += 1
        if setup.target.restores or setup.target.managed:
            # Before the hold, because the host takes part in page migration.
            setup.restore(stream)
            device.streams.synchronize()  # a restore may run on any stream
        self._reset_persisting()
        with held(device, stream) as hold:
            self._flush(place, stream)
            device.streams.record(self._start, stream)
            self._launch(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        self._note_clock(hold)
        return device.streams.elapsed(self._start, self._end)


class BatchedSampler(Sampler):
    """Holds the stream while it queues `batch` launches without a flush; a sample is their mean."""

    def __init__(self, setup: SampleSetup, batch: int) -> None:
        super().__init__(setup)
        self._batch = batch

    def _sample(self, place: int) -> float:
        self._setup.restore(self._stream)
        self._run_batch(place)
        self._device.streams.synchronize(self._stream)
        return self._device.streams.elapsed(self._start, self._end) / self._batch

    def _run_batch(self, place: int) -> None:
        device, stream = self._device, self._stream
        device.streams.synchronize(stream)
        with held(device, stream) as hold:
            self._queue_batch(place)
        device.streams.synchronize(stream)
        self._note_clock(hold)

    def _queue_batch(self, place: int) -> None:
        device, stream, target = self._device, self._stream, self._setup.target
        for _ in range(untimed_of(self._batch, target.places)):
            target.launch(place, stream)
        device.streams.record(self._start, stream)
        self._launch(place, stream, self._batch)
        device.streams.record(self._end, stream)


class GraphSampler(BatchedSampler):
    """Times batches as `BatchedSampler` does, each as a CUDA graph.

    A triad of 2 MiB arrays reads 2.67 us here and 3.06 us behind a hold (H100).
    """

    def __init__(self, setup: SampleSetup, batch: int) -> None:
        """Raise `CannotCapture` with the reason if the launches cannot be captured."""
        super().__init__(setup, batch)
        self._graphs = []
        for place in range(setup.target.places):
            body = partial(self._queue_batch, place)
            self._graphs.append(self._device.graphs.capture(self._stream, body))
        setup.host_times.clear()  # of the captures

    def _run_batch(self, place: int) -> None:
        self._device.graphs.replay(self._graphs[place], self._stream)


class HostSampler(Sampler):
    """Times a launch by the wall clock until the device is idle, launch latency included."""

    def _sample(self, place: int) -> float:
        device, stream = self._device, self._stream
        self._setup.restore(stream)
        self._reset_persisting()
        self._flush(place, stream)
        device.streams.synchronize()
        start = device.now()
        self._launch(place, stream)
        device.streams.synchronize()
        return device.now() - start


class PlainSampler(Sampler):
    """Launches under a profiler, each launch alone in a range `measure`, after a range `flush`.

    A filter on a test's `measure` range finds the kernels of the test and no others. The range of
    the launch has its category and the compulsory bytes as payload. No stream is held: a profiler
    that replays kernels would wait for ever.
    """

    def _sample(self, place: int) -> float:
        setup, device, stream = self._setup, self._device, self._stream
        traffic = setup.target.moved_bytes
        payload = None if traffic is None else traffic.total
        with setup.ranges.range(phase(setup.name, "flush")):
            setup.restore(stream)
            self._flush(place, stream)
        launch = setup.ranges.range(
            phase(setup.name, LAUNCH), payload=payload, category=setup.category
        )
        with setup.ranges.range(phase(setup.name, MEASURE)), launch:
            device.streams.record(self._start, stream)
            setup.target.launch(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        return device.streams.elapsed(self._start, self._end)


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Return the launches of a batch for a target that takes about `latency` seconds, if known."""
    if latency is None or latency <= 0:
        return 1
    least, most = LEAST_BATCH, MOST_BATCH
    if foreign:
        least = LEAST_FOREIGN_BATCH
        most = max(1, min(MOST_FOREIGN_BATCH, int(QUEUED_SECONDS / latency) - UNTIMED))
    least = min(least, math.ceil(SLOW_BATCH_SECONDS / latency))
    return int(min(most, max(least, BATCH_SECONDS / latency)))


def untimed_of(batch: int, places: int) -> int:
    """Return the launches before the first event of a batch: none where a slow launch follows."""
    if batch > 1:
        return UNTIMED
    return min(places - 1, 1)


@dataclass(frozen=True)
class Choice:
    """A sampler by name, with the reason."""

    sampler: str
    reason: str
    fallback: bool  # True if the host's clock may take over


def in_batches(why: str = "") -> Choice:
    """Choose `batched`; `why` says why no graph takes the launches."""
    reason = "hot launches follow each other behind a hold"
    if why:
        reason += f", as no graph takes them: {why}"
    return Choice("batched", reason, fallback=True)


def by_host(why: str) -> Choice:
    """Choose the host's clock."""
    return Choice("host", f"{why}: wall-clock time, launch latency included", fallback=False)


def choose(
    requested: str, target: Target, mode: str, *, profiled: bool, launches_wait: bool = False
) -> Choice:
    """Choose a sampler, or raise `BadCall` if the requested sampler cannot measure the target."""
    if profiled:
        reason = "a profiler is attached: plain launches, one range each"
        return Choice("plain", reason, fallback=False)
    if requested != "auto":
        if requested in BATCHES:
            _check_batches(requested, target, mode)
        return Choice(requested, "asked for", fallback=False)
    if launches_wait:
        reason = "CUDA_LAUNCH_BLOCKING is set: every launch waits for the device"
        return Choice("host", reason, fallback=False)
    if target.waits:
        return by_host("the host takes part (a copy of pageable memory)")
    if target.managed:
        return Choice("blocked", "managed pages are put back before every sample", fallback=True)
    if mode == "hot" and not target.restores:
        # Code of the user is not captured unasked: what it does on the host is unknown.
        if target.foreign:
            return in_batches()
        return Choice("graph", "hot launches follow each other in a CUDA graph", fallback=True)
    reason = "each launch is queued while the stream is blocked"
    if target.foreign:
        reason += "; a callable that waits for the device is timed by the host's clock"
    else:
        reason += ", which varies least"
    return Choice("blocked", reason, fallback=True)


def _check_batches(requested: str, target: Target, mode: str) -> None:
    """Raise `BadCall` if launches of the target cannot follow each other."""
    if mode != "hot":
        raise BadCall(
            f'sampler "{requested}" measures launches that follow each other: '
            f'it goes with mode "hot", not "{mode}"'
        )
    if target.managed:
        what = "put managed pages back"
    elif target.restores:
        what = "restore its input"
    else:
        return
    raise BadCall(f'sampler "{requested}" cannot {what} before every launch; "blocked" can')
