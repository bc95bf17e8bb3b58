"""Samples of the time of a launch.

A kernel holds the stream while a sample is queued (`blocked`; `batched` for launches that follow
each other), a graph has the launches (`graph`), or the host's clock is read (`host`). Under a
profiler, nothing is queued behind a hold (`plain`).
"""

from __future__ import annotations

import itertools
import math
import statistics
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import numpy as np

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import (
    CannotCapture,
    Graph,
    Hold,
    HoldExpired,
    NotCounted,
    OutOfMemory,
    Stream,
)
from pytest_gpumem.judging.limits import NOTHING_RAN
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.harness import Harness, holding
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import find_stream
from pytest_gpumem.ranges import LAUNCH, MEASURE, phase
from pytest_gpumem.units import format_time

LEAST_BATCH = 20
MOST_BATCH = 400
BATCH_SECONDS = 400e-6  # length of a batch: its first launch takes a microsecond more
SLOW_BATCH_SECONDS = 2e-3  # length from which a batch has fewer launches, down to one
LEAST_FOREIGN_BATCH = 5
MOST_FOREIGN_BATCH = 50
UNTIMED = 2  # launches before the first event: they bring the buffers into L2
QUEUED_SECONDS = 900e-6  # of foreign calls behind a hold: a stream queues 1,024 launches of 1 us
BATCHES = ("graph", "batched")  # samplers that time launches which follow each other


class Readings:
    """Samples of a target by placement, in seconds; those taken under throttling lie apart."""

    def __init__(self) -> None:
        self.placements: list[tuple[float, ...]] = []
        self.throttled: list[tuple[float, ...]] = []  # placements without any other sample
        self.discarded = 0  # samples taken under throttling
        self.live: list[list[float]] = []  # all samples of the placements that live now
        self._good: list[list[float]] = []  # those that were not taken under throttling

    @property
    def medians(self) -> list[float]:
        return [statistics.median(samples) for samples in self.placements]

    def begin(self, places: int) -> None:
        self.live = [[] for _ in range(places)]
        self._good = [[] for _ in range(places)]

    def add(self, samples: list[tuple[int, float]], *, throttled: bool) -> None:
        for place, seconds in samples:
            self.live[place].append(seconds)
            if not throttled:
                self._good[place].append(seconds)

    def finish(self) -> None:
        for samples, good in zip(self.live, self._good, strict=True):
            self.discarded += len(samples) - len(good)
            if good:
                self.placements.append(tuple(good))
            else:
                self.throttled.append(tuple(samples))

    def drop(self) -> None:
        """Drop all samples: those of two clocks have no mean."""
        self.placements.clear()
        self.throttled.clear()
        self.discarded = 0
        self.begin(len(self.live))


class Sampler:
    """Takes samples of a target; by the host's clock where no hold can show its launches."""

    def __init__(
        self, harness: Harness, target: Target, mode: str, requested: str, test: str
    ) -> None:
        self._harness, self._device, self._mode, self._test = harness, harness.device, mode, test
        simulated = harness.device.facts.simulated  # the same in every process
        self._random = np.random.default_rng(target.arena.seed if simulated else None)
        self.target = target
        self._requested = requested
        self.name, self.reason = choose(requested, target, mode, profiled=harness.profiled)
        self.latency: float | None = None  # seconds of a launch, as far as is known
        self.host_times: list[float] = []  # seconds that the host took to queue a launch
        self.clocks: list[float] = []  # hertz of the SM clock during the holds before samples
        self.expired = 0  # holds
        self.work_seen = True  # False if the device did nothing in a launch of foreign code
        self.readings = Readings()
        self.notes: list[str] = []
        self._launched = False

    @property
    def in_batches(self) -> bool:
        return self.name in BATCHES

    @property
    def batch(self) -> int:
        """Launches of a sample."""
        if not self.in_batches:
            return 1
        return batch_of(self.latency, foreign=self.target.foreign)

    def use_host(self, reason: str) -> None:
        """Go over to the host's clock. Raises `BadCall`: another sampler was asked for."""
        if self._requested != "auto":
            raise BadCall(f'sampler "{self.name}" was asked for, but {reason}') from None
        self.name, self.reason = "host", by_host(reason)
        self.readings.drop()

    def expire(self, expired: HoldExpired) -> None:
        """Note a hold that expired: a late load of a kernel may happen once, and from the second on
        the host's clock takes over."""
        self.expired += 1
        if self.expired > 1:
            self.use_host(str(expired))

    def find_stream(self) -> float:
        """Launch once, and time foreign code on the stream where it works, or else by the host's
        clock. Return the seconds of a launch, if they are known."""
        device, target, watched = self._device, self.target, None
        # The first launch compiles and loads; nothing may hold the stream meanwhile.
        begun = device.now()
        self.launch_once()
        whole = device.now() - begun
        device.memory.settle()
        if not target.foreign or self.name == "host":
            return 0.0
        try:
            watched = find_stream(target, self._harness.idle, whole)
        except HoldExpired as expired:
            self.expire(expired)
            if self.name == "host":
                return 0.0
            return self.find_stream()
        except NotCounted as why:
            self.notes.append(f"own streams not checked: {why}")
        if watched is None or not watched.seen:  # as of a prefetch
            self.renew()
            seconds = self.samples(1)[-1][1]
            nothing = NOTHING_RAN * self._harness.floors().empty
            if self.name != "host" and seconds <= nothing:
                self.use_host("no work was seen on the timed stream")
                self.work_seen = False
            return seconds
        if not watched.timed:
            reason = "its work runs on streams of its own"
            if watched.on_stream:
                outside = format_time(watched.outside)
                reason = f"{outside} of its work run beside the timed stream"
            self.use_host(reason)
            return 0.0
        if watched.stream is not target.stream:
            if target.window is not None:
                raise BadCall(
                    f"{target.name} does not launch on the persisting stream, so its window does "
                    f"not cover what {target.name} does"
                )
            target.stream = watched.stream
            name = "this thread's default stream"
            if watched.stream.handle == device.streams.defaults()[0].handle:
                name = "the legacy default stream"
            self.notes.append(f"timed on {name}, where it launches")
        return watched.seconds

    def launch_once(self) -> None:
        """Launch once, untimed. The first launch of code of the user counts in its footprint."""
        device, target = self._device, self.target
        target.prepare(target.stream)
        with ExitStack() as stack:
            if target.foreign and not self._launched:
                self._launched = True
                stack.enter_context(device.footprints.resumed())
                stack.enter_context(device.counters.loading())
            target.launch(0, target.stream)
        device.streams.synchronize()

    def renew(self) -> None:
        """Make what samples need, for where the target is and for its present latency."""
        target, hot = self.target, self._mode == "hot"
        self._streams: tuple[Stream, ...] = (target.stream,)
        if target.any_stream:
            self._streams = self._harness.streams
        self._flush = self._harness.flush(self._mode)
        # Lines that `L2::evict_last` loads, as in Triton, survive a flush by plain loads in part.
        self._resets = (
            target.foreign and target.window is None and not hot and self._device.facts.persists
        )
        # Launches of several placements evict each other's data.
        self._untimed = UNTIMED if hot and target.places > 1 else 0
        self._start, self._end = self._device.streams.event(), self._device.streams.event()
        # Streams take turns, because launch overhead differs between them.
        self._turns = itertools.cycle(self._streams)
        self._batch = self.batch
        if self.name != "graph":
            return
        self._graphs: list[Graph] = []
        for place in range(target.places):
            body = partial(self._queue_batch, place)
            try:
                self._graphs.append(self._device.streams.capture(self._streams[0], body))
            except CannotCapture as reason:
                raise BadCall(f'sampler "graph": {reason}') from None
        self.host_times.clear()  # of the captures

    def move(self, wanted: int, most: int) -> bool:
        """Go to fresh addresses, and launch there; return False if memory is short."""
        try:
            self.target.move(wanted, most, self._random)
            # What a case queued on other streams must not run beside a sample.
            self._device.streams.synchronize()
            self._device.memory.settle()
        except OutOfMemory as full:
            self.notes.append(f"no further placement: {full}")
            self.renew()
            return False
        if self.target.foreign:
            # A case may make a new kernel, which is loaded at its first launch: not behind a hold.
            self.launch_once()
        self.renew()  # a graph would launch on old addresses
        if not self.target.foreign:
            self.samples(1 if self.target.places > 1 or self.target.managed else 2)
        return True

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """Take `rounds` samples of every placement: its number, seconds of a launch.

        The host's clock takes over if launches wait for the device.
        """
        while True:
            try:
                with uncollected(), self._current_stream():
                    return self._samples(rounds)
            except HoldExpired as expired:
                self.expire(expired)
                self.renew()

    def _samples(self, rounds: int) -> list[tuple[int, float]]:
        places, samples = self.target.places, []
        by_name = {"blocked": self._blocked, "host": self._by_host, "plain": self._plain}
        sample = by_name.get(self.name, self._batched)
        for _ in range(rounds):
            order = [0]
            if places > 1:  # a drift must not look like a difference between placements
                order = self._random.permutation(places).tolist()
            for place in order:
                samples.append((place, sample(place)))
        return samples

    def _current_stream(self) -> AbstractContextManager[None]:
        """Make the stream current once for all samples, which takes some ten microseconds."""
        if self.target.foreign or self.target.waits:  # work of the host may be the user's
            return self._device.kernels.current_stream(self._streams[0])
        return nullcontext()

    def _blocked(self, place: int) -> float:
        """Queue flush, event, launch and event behind a hold: no launch gap is in the interval.

        Several samples behind a hold would read up to 0.5 us longer (H200).
        """
        device, stream = self._device, next(self._turns)
        if self.target.restores or self.target.managed:
            # Before the hold, because the host takes part in page migration.
            self.target.put_back(stream)
            device.streams.synchronize()  # a restore may run on any stream
        self._reset_persisting()
        with holding(device, stream) as hold:
            self._bring_caches(place, stream)
            device.streams.record(self._start, stream)
            self._launch(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        self._note_clock(hold)
        return device.streams.elapsed(self._start, self._end)

    def _batched(self, place: int) -> float:
        """Return the mean of launches without a flush, in a graph or behind a hold."""
        device, stream = self._device, self._streams[0]
        self.target.put_back(stream)
        if self.name == "graph":
            device.streams.replay(self._graphs[place], stream)
        else:
            device.streams.synchronize(stream)
            with holding(device, stream) as hold:
                self._queue_batch(place)
            device.streams.synchronize(stream)
            self._note_clock(hold)
        device.streams.synchronize(stream)
        return device.streams.elapsed(self._start, self._end) / self._batch

    def _queue_batch(self, place: int) -> None:
        device, stream = self._device, self._streams[0]
        for _ in range(untimed_of(self._batch, self.target.places)):
            self.target.launch(place, stream)
        device.streams.record(self._start, stream)
        self._launch(place, stream, self._batch)
        device.streams.record(self._end, stream)

    def _by_host(self, place: int) -> float:
        """Read the wall clock until the device is idle, launch latency included."""
        device, stream = self._device, self._streams[0]
        self.target.put_back(stream)
        self._reset_persisting()
        self._bring_caches(place, stream)
        device.streams.synchronize()
        start = device.now()
        self._launch(place, stream)
        device.streams.synchronize()
        return device.now() - start

    def _plain(self, place: int) -> float:
        """Launch under a profiler, in a range `measure` that holds no other kernel."""
        device, stream, ranges = self._device, self._streams[0], self._harness.ranges
        with ranges.range(phase(self._test, "flush")):
            self.target.put_back(stream)
            self._bring_caches(place, stream)
        measured = ranges.range(phase(self._test, MEASURE))
        with measured, ranges.range(phase(self._test, LAUNCH)):
            device.streams.record(self._start, stream)
            self.target.launch(place, stream)
            device.streams.record(self._end, stream)
        device.streams.synchronize(stream)
        return device.streams.elapsed(self._start, self._end)

    def _bring_caches(self, place: int, stream: Stream) -> None:
        if self._flush is not None:
            self._device.kernels.launch(self._flush, stream)
        for _ in range(self._untimed):
            self.target.launch(place, stream)

    def _reset_persisting(self) -> None:
        if self._resets:
            self._device.l2.reset_persisting()

    def _launch(self, place: int, stream: Stream, count: int = 1) -> None:
        """Queue timed launches, and note how long the host takes for each."""
        begun = self._device.now()
        for _ in range(count):
            self.target.launch(place, stream)
        self.host_times.append((self._device.now() - begun) / count)

    def _note_clock(self, hold: Hold) -> None:
        clock = self._device.streams.clock(hold)
        if clock is not None:
            self.clocks.append(clock)


def choose(requested: str, target: Target, mode: str, *, profiled: bool) -> tuple[str, str]:
    """Return a sampler, and the reason.

    Raises `BadCall`: the requested sampler cannot measure the target.
    """
    if profiled:
        return "plain", "a profiler is attached: plain launches, one range each"
    if requested != "auto":
        if requested in BATCHES and (mode != "hot" or target.managed or target.restores):
            raise BadCall(
                f'sampler "{requested}" measures launches that follow each other: it needs mode '
                '"hot", no restore and no managed pages to put back; "blocked" measures others'
            )
        return requested, "asked for"
    if target.device.launches_wait():
        return "host", "CUDA_LAUNCH_BLOCKING is set: every launch waits for the device"
    if target.waits:
        return "host", by_host("the host takes part")
    if target.managed:
        return "blocked", "managed pages are put back before every sample"
    if mode == "hot" and not target.restores:
        # Code of the user is not captured unasked: what it does on the host is unknown. And no
        # capture takes the replay of a graph.
        if target.foreign or (target.window is not None and target.window.where == "graph"):
            return "batched", "hot launches follow each other behind a hold"
        return "graph", "hot launches follow each other in a CUDA graph"
    return "blocked", "each launch is queued while the stream is blocked, which varies least"


def by_host(why: str) -> str:
    return f"{why}: wall-clock time, launch latency included"


def batch_of(latency: float | None, *, foreign: bool) -> int:
    """Return the launches of a batch of a target that takes about `latency` seconds."""
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
