"""Timing the launches of one target, by another sampler where the chosen one cannot."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

import numpy as np

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import CannotCapture, HoldExpired, OutOfMemory
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.finding_stream import Elsewhere, NoWork, find_stream
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.samplers import (
    BATCHES,
    UNTIMED,
    BatchedSampler,
    BlockedSampler,
    Choice,
    GraphSampler,
    HostSampler,
    PlainSampler,
    Sampler,
    SampleSetup,
    batch_of,
    by_host,
    choose,
    in_batches,
)
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.records.measurement import modes_of, without_exceptions


class Readings:
    """Samples of a target by placement, in seconds; those taken under throttling lie apart."""

    def __init__(self) -> None:
        self.placements: list[tuple[float, ...]] = []
        self.throttled: list[tuple[float, ...]] = []
        """Placements of which every sample was taken under throttling."""
        self.discarded = 0  # samples taken under throttling
        self._good: list[list[float]] = []  # samples of the placements that live now
        self._bad: list[list[float]] = []  # the same, taken under throttling

    @property
    def medians(self) -> list[float]:
        """Median of each placement."""
        return [statistics.median(samples) for samples in self.placements]

    @property
    def all_medians(self) -> list[float]:
        """Medians, followed by those of the placements that have throttled samples alone."""
        return [*self.medians, *map(statistics.median, self.throttled)]

    @property
    def live(self) -> list[list[float]]:
        """All samples of the placements that live now."""
        return [good + bad for good, bad in zip(self._good, self._bad, strict=True)]

    def begin(self, places: int) -> None:
        """Begin `places` new placements."""
        self._good = [[] for _ in range(places)]
        self._bad = [[] for _ in range(places)]

    def add(self, samples: list[tuple[int, float]], *, throttled: bool) -> None:
        """Add samples of the placements that live now."""
        placements = self._bad if throttled else self._good
        for place, seconds in samples:
            placements[place].append(seconds)

    def finish(self) -> None:
        """Finish the placements that live now."""
        for good, bad in zip(self._good, self._bad, strict=True):
            self.discarded += len(bad)
            if good:
                self.placements.append(tuple(good))
            else:
                self.throttled.append(tuple(bad))

    def drop(self) -> None:
        """Drop all samples: a measurement has one clock, and averages no samples of two."""
        self.placements.clear()
        self.throttled.clear()
        self.discarded = 0
        self.begin(len(self._good))


class Timing:
    """Takes samples of a target by a sampler.

    The host's clock takes over where no held stream can show launches, and batches take over where
    no graph can capture them.
    """

    def __init__(
        self, harness: Harness, target: Target, mode: str, sampler: str, seed: int, name: str
    ) -> None:
        self._harness, self._device, self._mode, self._name = harness, harness.device, mode, name
        self._random = np.random.default_rng(harness.device.entropy(seed))
        self.target = target  # at its last placements
        self.choice: Choice = choose(
            sampler,
            target,
            mode,
            profiled=harness.profiled,
            launches_wait=self._device.launches_wait(),
        )
        self.readings = Readings()
        self.notes: list[str] = []
        self.latency: float | None = None  # seconds of a launch, as far as is known
        self.host_times: list[float] = []
        self.clocks: list[float] = []  # hertz of the SM clock that ran
        self.expired = 0  # holds: the first is tried again, the second ends the holding
        self.work_seen = True  # False if the device did nothing in a launch of a foreign callable
        self.alone = False  # nothing of long work runs on other streams, as the search found
        self.first_sample: float | None = None  # from that search, for work that is slow
        self._sampler: Sampler

    @property
    def batched(self) -> bool:
        """True if a sample is the mean of a batch."""
        return self.choice.sampler in BATCHES

    @property
    def batch(self) -> int:
        """Launches of a batch."""
        return batch_of(self.latency, foreign=self.target.foreign)

    def take_over(self, other: Timing, reason: str) -> None:
        """Time the target of `other` by the host's clock, in the same order of placements."""
        self._random, self.choice = other._random, other.choice
        self._use_host(reason)

    def launch_once(self) -> None:
        """Launch once, untimed."""
        self.target.prepare(self.target.stream)
        self.target.launch(0, self.target.stream)
        self._device.streams.synchronize()

    def renew(self) -> None:
        """Make the sampler, for where the target is now and for the present latency."""
        setup = self._setup()
        if self.choice.sampler == "graph":
            try:
                self._sampler = GraphSampler(setup, self.batch)
                return
            except CannotCapture as reason:
                if not self.choice.fallback:
                    raise BadCall(f'sampler "graph" was asked for, but {reason}') from None
                self.choice = in_batches(str(reason))
                self.readings.drop()
        if self.choice.sampler == "batched":
            self._sampler = BatchedSampler(setup, self.batch)
        elif self.choice.sampler == "host":
            self._sampler = HostSampler(setup)
        elif self.choice.sampler == "plain":
            self._sampler = PlainSampler(setup)
        else:
            self._sampler = BlockedSampler(setup)

    def samples(self, rounds: int) -> list[tuple[int, float]]:
        """Take samples, or by the host's clock if launches wait for the device."""
        while True:
            try:
                with uncollected():
                    return self._sampler.samples(rounds)
            except HoldExpired as expired:
                if not self._expired_first():
                    self._use_host(str(expired))
                    self.readings.drop()
                    self.renew()

    def find_stream(self, first: float) -> None:
        """Time a foreign callable where it works; by the host's clock where no stream shows it.

        `first`: seconds of the first launch, with what it compiled.
        """
        target = self.target
        while True:
            restore, launch = self._setup().restore, partial(target.launch, 0)
            floor = self._harness.floors().empty
            try:
                with uncollected():
                    site = find_stream(self._device, restore, launch, target.stream, floor, first)
                break
            except HoldExpired as expired:
                if self._expired_first():
                    continue
                self._use_host(str(expired))
                return
            except Elsewhere as reason:
                self._use_host(str(reason))
                self.work_seen = not isinstance(reason, NoWork)
                return
        self.latency, self.first_sample = site.seconds, site.sample
        self.alone = site.sample is not None
        if site.stream is not target.stream and target.run_on is not None:
            self.target = target.run_on(site.stream)
        if site.name is not None:
            self.notes.append(f"timed on {site.name}, where it launches")

    def move(self, wanted: int, most: int, *, warm: bool) -> bool:
        """Go to fresh addresses, and sample there if `warm`; return False if memory is short."""
        assert self.target.move is not None
        try:
            self.target = self.target.move(wanted, most, self._random)
            # What a case queued on other streams must not run beside a sample.
            self._device.streams.synchronize()
            self._device.memory.settle()
        except OutOfMemory as full:
            self.notes.append(f"no further placement: {full}")
            self.target = replace(self.target, places=1)
            self.renew()  # some buffers may have moved, and a graph would launch on old addresses
            return False
        if self.target.foreign:
            # A case may make a new kernel, which is loaded at its first launch: not behind a hold.
            self.launch_once()
        self.renew()
        if warm:
            self.samples(1 if self.target.places > 1 or self.target.foreign else 2)
        return True

    def counting(self, medians: list[float]) -> list[float]:
        """Return the medians that count (`Measurement.counting`)."""
        if self.target.window is None:
            return medians
        return list(without_exceptions(medians))

    def has_modes(self, medians: list[float]) -> bool:
        """True if placements under a window are in several modes."""
        return self.target.window is not None and max(modes_of(medians), default=0) > 0

    def _expired_first(self) -> bool:
        """True for the first hold that expires: a late load of a kernel may happen once."""
        self.expired += 1
        return self.expired == 1

    def _use_host(self, reason: str) -> None:
        if not self.choice.fallback:
            raise BadCall(f'sampler "{self.choice.sampler}" was asked for, but {reason}') from None
        self.choice = by_host(reason)

    def _setup(self) -> SampleSetup:
        target, facts, hot = self.target, self._device.facts, self._mode == "hot"
        streams = self._harness.streams() if target.any_stream else (target.stream,)
        return SampleSetup(
            device=self._device,
            target=target,
            streams=streams,
            flush=self._harness.flush(self._mode),
            ranges=self._harness.ranges,
            name=self._name,
            category=category_of(target, self._mode, facts.l2_bytes),
            random=self._random,
            resets=target.foreign and target.window is None and not hot and facts.persists,
            host_times=self.host_times,
            clocks=self.clocks,
            # Launches of several placements evict each other's data.
            untimed=UNTIMED if hot and target.places > 1 else 0,
        )


def category_of(target: Target, mode: str, l2_bytes: int) -> str | None:
    """Return the NVTX category of a target's launches; of several that apply, the slowest part.

    "managed" if pages are put back before every sample, "link" if declared bytes cross a link, "L2"
    if a window lies on part of the data or hot caches may hold it all, "DRAM" for other declared
    bytes, else None.
    """
    if target.managed:
        return "managed"
    if target.moved_bytes is not None and target.moved_bytes.link:
        return "link"
    if target.window is not None:
        return "L2"
    if mode == "hot" and (target.footprint is None or target.footprint <= l2_bytes):
        return "L2"
    return None if target.moved_bytes is None else "DRAM"
