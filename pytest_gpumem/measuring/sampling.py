"""The sampling of one target: a warm-up, then placements, with enough samples of each."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from msgspec import structs

from pytest_gpumem.collector import uncollected
from pytest_gpumem.devices.protocol import CannotCapture, HoldExpired, OutOfMemory
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.measuring import stopping
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.harness import Harness
from pytest_gpumem.measuring.samplers import (
    BATCHES,
    HOLD_TIMEOUT,
    UNTIMED,
    BatchedSampler,
    BlockedSampler,
    Choice,
    GraphSampler,
    HostSampler,
    PlainSampler,
    Sampler,
    Shot,
    batch_of,
    choose,
    in_batches,
)
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.target_callable import LONG, Elsewhere, NoWork, find_stream
from pytest_gpumem.ranges import MEASURE, phase
from pytest_gpumem.records.measurement import Conditions, modes_of, without_exceptions
from pytest_gpumem.units import format_share, format_time

MANAGED, LINK, L2, DRAM = "managed", "link", "L2", "DRAM"
WARM_UP_SHARE = 0.25  # share of the budget that a warm-up may use
PROFILED_SAMPLES = 5  # samples under a profiler, which measures each of them in its own way
WAIT_SHARE = 0.3
"""Share of the budget for which a measurement waits while the device is throttled or busy."""
LOOKS = 3  # looks for other work before the samples, and after them
FULL_SPEED = 0.99  # share of the highest SM clock from which a throttle reason slows nothing
CHUNK_SECONDS = 0.025  # seconds of samples between two readings of clocks and throttle reasons, and between two looks for other work


class Stopwatch:
    """Seconds of the phases of a measurement."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._last = now, now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as the phase's."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001  # wanted half-width of the confidence interval over placements, as a share of the latency
    budget: float = 1.0  # seconds for one measurement


class Sampling:
    """Takes the samples of one target; `sample` fills the fields that a measurement is made of."""

    def __init__(
        self, harness: Harness, target: Target, plan: Plan, seed: int, name: str, took: Stopwatch
    ) -> None:
        self._harness, self._plan, self._name, self.took = harness, plan, name, took
        self._device, self._ranges = harness.device, harness.ranges
        self._random = np.random.default_rng(harness.device.entropy(seed))
        self._latency: float | None = None
        """Seconds of one launch, as far as is known: of the look for its stream, then of the last warm-up sample."""
        self._sampler: Sampler
        # holds that have expired: the first is tried again, the second ends the holding
        self._expired = 0
        self._kept: list[list[float]] = []  # samples of the placements that live now
        self._lost: list[list[float]] = []  # the same, taken under throttling
        self._throttled: list[
            tuple[float, ...]
        ] = []  # placements of which every sample was taken under throttling
        self.target = target  # at its last placements
        self.placements: list[tuple[float, ...]] = []  # seconds of each sample, by placement
        self.seen: list[Conditions] = []  # conditions between the first sample and the last
        self.notes: list[str] = []
        self.discarded = 0  # samples taken under throttling
        self.work_seen = True  # False if the device did nothing in a launch of a foreign callable
        self.looks: list[
            bool
        ] = []  # of each look before, between and after the samples, whether other work kept the device busy
        self._looked = 0.0  # when the last look ended
        self._host_times: list[float] = []
        self._clocks: list[float] = []
        self._chunks: list[
            float | None
        ] = []  # the SM clock that ran in each chunk of samples, where it is known
        # a look for the stream of long work has shown that nothing of it runs elsewhere
        self.alone = False
        self._alone: list[
            float
        ] = []  # that look, as the first sample of work too slow for the budget
        self._waited = 0.0  # seconds of waiting while the device was throttled or busy
        self.choice: Choice = choose(
            plan.sampler,
            target,
            plan.mode,
            profiled=harness.profiled,
            launches_wait=self._device.launches_wait(),
        )

    @property
    def batch(self) -> int:
        """Launches of one batch."""
        return batch_of(self._latency, foreign=self.target.foreign)

    @property
    def medians(self) -> list[float]:
        """Median of each placement in seconds."""
        return [statistics.median(p) for p in self.placements]

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the latency over placements, in seconds."""
        return stopping.half_width(self._counting(self.medians))

    @property
    def host_time(self) -> float | None:
        """Median of the seconds that the host takes to queue one launch; None where no launch was queued by itself."""
        return statistics.median(self._host_times) if self._host_times else None

    def around(self, before: Conditions, after: Conditions) -> tuple[Conditions, Conditions]:
        """Conditions before and after the samples, with the throttle reasons that slowed the samples next to them."""
        first, last = (self._chunks[0], self._chunks[-1]) if self._chunks else (None, None)
        return self._slowing(before, first), self._slowing(after, last)

    def _slowing(self, reported: Conditions, ran_at: float | None) -> Conditions:
        """Conditions without throttle reasons if the SM clock that ran was the highest one all the same."""
        highest = self._device.facts.sm_clock_hz
        if (
            not reported.throttle_reasons
            or ran_at is None
            or highest is None
            or ran_at < FULL_SPEED * highest
        ):
            return reported
        full = f"{100 * FULL_SPEED:.0f} % or more of {highest / 1e6:.0f} MHz"
        self.notes.append(
            f"{', '.join(reported.throttle_reasons)} reported, but the SM clock ran at {full}"
        )
        return structs.replace(reported, throttle_reasons=())

    def by_host(self, reason: str) -> Sampling:
        """The sampling of the same target anew, by the host's clock. Raises `BadCall`: the user asked for this sampler."""
        again = Sampling(self._harness, self.target, self._plan, 0, self._name, self.took)
        again._random, again.choice = self._random, self.choice
        again._to_host(reason)
        return again

    def _has_modes(self, medians: Sequence[float]) -> bool:
        """True if placements under a window are in several modes: the more of them, the surer which one counts."""
        return self.target.window is not None and max(modes_of(medians), default=0) > 0

    def _counting(self, medians: Sequence[float]) -> Sequence[float]:
        """Medians that the latency is the mean of (`Measurement.counting`)."""
        return medians if self.target.window is None else without_exceptions(medians)

    def sample(self) -> None:
        """Warm up, then fill `placements`."""
        if self._harness.profiled:
            self._profile()
            return
        self._look(LOOKS)
        begun = self._device.now() - self._waited
        with self._ranges.range(phase(self._name, "warm-up")):
            cost = self._warm_up()
        self.took.lap("warm-up")
        self._host_times.clear()
        self._clocks.clear()
        fixed = self.target.move is None
        wanted = 1 if fixed else self._plan.placements
        most = 1 if fixed else stopping.MOST_PLACEMENTS_FACTOR * wanted
        budget = max(self._plan.budget - (self._device.now() - begun), 0.1 * self._plan.budget)
        begun = self._device.now() - sum(self._alone)
        with self._ranges.range(phase(self._name, MEASURE)):
            while True:
                begun_already = bool(self.placements or self._throttled)
                # What moves one placement at a time starts where it is.
                if (
                    wanted > 1
                    and (self.target.any_stream or begun_already)
                    and not self._move(wanted, cost, budget)
                    and begun_already
                ):
                    break
                self.took.lap("placements")
                self._fill(wanted, cost, begun, budget)
                self.took.lap("samples")
                spent = self._device.now() - begun
                seen = [statistics.median(p) for p in (*self.placements, *self._throttled)]
                undecided = self._has_modes(seen) and len(seen) < most and spent < budget
                if not undecided and not stopping.go_on(
                    self._counting(seen),
                    wanted=self._plan.precision,
                    placements=wanted,
                    most=most,
                    spent=spent,
                    budget=budget,
                ):
                    break
        self._look(LOOKS)
        if not self.placements:
            # Everything was throttled: the samples stay visible, and its conditions leave the row UNDECIDED.
            self.placements = list(self._throttled)
            self.notes.append("every sample was taken under throttling")
        if self._expired == 1:
            self.notes.append(
                "a launch waited for the device once, until its hold expired: it was tried again"
            )
        self._note_precision(wanted)

    def wait_out(self) -> None:
        """Wait while the device is throttled or busy, as nvbench does, within a share of the budget for the whole measurement."""
        if not self._harness.profiled:
            self._waited += self._harness.wait_out(WAIT_SHARE * self._plan.budget - self._waited)

    def _look(self, times: int) -> None:
        """Look whether other work keeps the device busy."""
        self.looks += [self._harness.busy() for _ in range(times)]
        self._looked = self._device.now()

    def _profile(self) -> None:
        self._sampler = self._make()
        with self._ranges.range(phase(self._name, "warm-up")):
            self._launch_once()
        self.placements = [
            tuple(seconds for _, seconds in self._sampler.samples(PROFILED_SAMPLES))
        ]  # the sampler ranges each launch
        self.notes.append("measured under a profiler: times are not comparable")

    # Warm-up

    def _warm_up(self) -> float:
        """Sample until steady; gives the seconds that one sample costs."""
        # The first launch compiles and loads; nothing may hold the stream meanwhile.
        begun = self._device.now()
        self._launch_once()
        first = self._device.now() - begun
        self._device.memory.settle()
        if self.target.foreign and self.choice.sampler != "host":
            self._find_stream(first)
        limit = WARM_UP_SHARE * self._plan.budget
        if self._latency is not None and self._latency > max(limit, LONG):
            # The look for its stream was its warm-up.
            self._sampler = self._make()
            return self._latency
        self._alone = []
        self._sampler = self._make()
        begun, already = self._device.now(), self._expired
        if self.choice.sampler in BATCHES:
            self._latency = self._take(1)[-1][1]
            self._sampler = self._make()
        samples: list[float] = []
        step = 1
        while True:
            before, lost = self._device.now(), self._expired
            latest = [seconds for _, seconds in self._take(step)]
            # The time-out of a hold is not what a sample costs.
            spent = self._device.now() - begun - HOLD_TIMEOUT * (self._expired - already)
            cost = max(
                (self._device.now() - before - HOLD_TIMEOUT * (self._expired - lost)) / len(latest),
                latest[-1],
            )
            samples += latest
            self._latency = latest[-1]
            if stopping.steady(samples):
                break
            if spent > limit:
                # Too few samples to see a drift through their noise are no drift.
                if len(samples) >= stopping.WINDOW and not stopping.steady(
                    samples, most=stopping.WINDOW
                ):
                    self.notes.append(
                        f"not steady after {len(samples)} warm-up samples of {format_time(float(np.median(samples)))}"
                    )
                break
            step = stopping.WINDOW // 2
        if (
            self.choice.sampler in BATCHES
        ):  # the length of a batch follows from how long one launch takes
            self._sampler = self._make()
            before = self._device.now()
            cost = self._device.now() - before if self._take(1) else cost
        return cost

    def _launch_once(self) -> None:
        """Launch once, untimed."""
        target = self.target
        target.prepare(target.stream)
        target.launch(0, target.stream)
        self._device.streams.synchronize()

    def _find_stream(self, first: float) -> None:
        """Time a foreign callable where it works; by the host's clock where no stream shows it."""
        target = self.target
        restore, floor = self._shot().restore, self._harness.floors().empty
        try:
            with uncollected():
                found = find_stream(
                    self._device, restore, partial(target.launch, 0), target.stream, floor, first
                )
        except HoldExpired as expired:
            if self._again():
                self._find_stream(first)
            else:
                self._to_host(str(expired))
        except Elsewhere as reason:
            self._to_host(str(reason))
            self.work_seen = not isinstance(reason, NoWork)
        else:
            self._latency = found.seconds
            self._alone = [] if found.sample is None else [found.sample]
            self.alone = bool(self._alone)
            if found.stream is not target.stream and target.run_on is not None:
                self.target = target.run_on(found.stream)
            if found.name is not None:
                self.notes.append(f"timed on {found.name}, where it launches")

    # Placements

    def _move(self, wanted: int, cost: float, budget: float) -> bool:
        """Go to fresh addresses for the next placements; False, with a note, where there are none."""
        assert self.target.move is not None
        # A batch is captured for each placement, which takes longer than a cold sample.
        most = (
            wanted if self.choice.sampler in BATCHES else stopping.MOST_PLACEMENTS_FACTOR * wanted
        )
        # Those side by side are sampled in rounds, and a round of slow launches is not cut short by the budget.
        limit = stopping.affordable(cost, budget)
        try:
            self.target = self.target.move(min(wanted, limit), min(most, limit), self._random)
            self._device.streams.synchronize()  # what a case's function queued on other streams must not run beside a sample
            self._device.memory.settle()
        except OutOfMemory as full:
            self.notes.append(f"no further placement: {full}")
            self.target = replace(self.target, places=1)
            # Some of the buffers may have moved before memory ran out: a graph would launch on what they left.
            self._sampler = self._make()
            return False
        if self.target.foreign:
            # A case may have a kernel made at every placement, which is loaded at its first launch: nothing may hold the stream meanwhile.
            self._launch_once()
        self._sampler = self._make()
        # Page tables and instruction caches of the new addresses, which long work does not notice.
        if not (self.target.foreign and cost > LONG):
            self._take(1 if self.target.places > 1 or self.target.foreign else 2)
        return True

    def _fill(self, wanted: int, cost: float, begun: float, budget: float) -> None:
        """Sample the placements that live now until there are enough."""
        self._clear()
        # Placements that follow each other share the budget from the start; those side by side are sampled until they agree.
        quota = stopping.samples_per_placement(cost, budget, wanted)
        together = self.target.places >= wanted
        chunk = max(1, int(CHUNK_SECONDS / (cost * self.target.places))) if cost > 0 else quota
        if not together and (self._latency or 0.0) >= stopping.SHORT:
            chunk = min(chunk, stopping.FEW_IN_TURN)
        while True:
            count = len(self._kept[0]) + len(self._lost[0])
            left = stopping.rounds_left(count, self.target.places) if together else quota - count
            already = len(self._clocks)
            samples = [(0, seconds) for seconds in self._alone] or self._take(min(chunk, left))
            self._alone = []
            reported, ran = self._device.conditions(), self._clocks[already:]
            self._chunks.append(statistics.median(ran) if ran else None)
            now = self._slowing(reported, self._chunks[-1])
            self.seen.append(now)
            into = self._lost if now.throttle_reasons else self._kept
            for place, seconds in samples:
                into[place].append(seconds)
            if self._device.now() - self._looked >= CHUNK_SECONDS:
                self._look(1)
            if reported.throttle_reasons:
                self.wait_out()
            both = [kept + lost for kept, lost in zip(self._kept, self._lost, strict=True)]
            spent = self._device.now() - begun
            if (
                stopping.enough(both, wanted=self._plan.precision, spent=spent, budget=budget)
                if together
                else stopping.enough_in_turn(
                    both[0],
                    self._counting(self.medians),
                    wanted=self._plan.precision,
                    placements=wanted,
                    most=quota,
                )
            ):
                break
        self.discarded += sum(map(len, self._lost))
        self.placements += [tuple(kept) for kept in self._kept if kept]
        self._throttled += [
            tuple(lost) for kept, lost in zip(self._kept, self._lost, strict=True) if not kept
        ]

    def _clear(self) -> None:
        self._kept, self._lost = (
            [[] for _ in range(self.target.places)],
            [[] for _ in range(self.target.places)],
        )

    def _note_precision(self, wanted: int) -> None:
        if len(self.placements) < wanted:
            self.notes.append(f"{len(self.placements)} of {counted(wanted, 'placement')}")
        medians, width = self._counting(self.medians), self.half_width
        if width is not None and not stopping.precise(medians, self._plan.precision):
            noise, wanted_noise = (
                format_share(share)
                for share in (width / float(np.mean(medians)), self._plan.precision)
            )
            self.notes.append(
                f"less precise than gpumem_precision {wanted_noise}: noise {noise} after {counted(len(medians), 'placement')}"
            )

    # Samplers

    def _take(self, rounds: int) -> list[tuple[int, float]]:
        """Samples from the sampler, or from the host's clock if launches wait for the device."""
        try:
            with uncollected():
                return self._sampler.samples(rounds)
        except HoldExpired as expired:
            if not self._again():
                self._to_host(str(expired))
                self._drop()
                self._sampler = self._make()
        return self._take(rounds)

    def _drop(self) -> None:
        """Drop the samples so far: one measurement has one clock, and they are not averaged with those that follow."""
        self.placements.clear()
        self._throttled.clear()
        self.discarded = 0
        self._clear()

    def _again(self) -> bool:
        """True for the first hold that expires: what made a launch wait, such as a kernel that is loaded late, may happen once."""
        self._expired += 1
        return self._expired == 1

    def _to_host(self, reason: str) -> None:
        if not self.choice.fallback:
            raise BadCall(f'sampler "{self.choice.sampler}" was asked for, but {reason}') from None
        self.choice = Choice(
            "host", f"{reason}: wall-clock time, launch latency included", fallback=False
        )

    def _make(self) -> Sampler:
        """The sampler, for where the target is now."""
        shot = self._shot()
        if self.choice.sampler == "graph":
            try:
                return GraphSampler(shot, self.batch)
            except CannotCapture as reason:
                if not self.choice.fallback:
                    raise BadCall(f'sampler "graph" was asked for, but {reason}') from None
                self.choice = in_batches(str(reason))
                self._drop()
        if self.choice.sampler == "batched":
            return BatchedSampler(shot, self.batch)
        samplers: dict[str, Callable[[Shot], Sampler]] = {
            "host": HostSampler,
            "plain": PlainSampler,
            "blocked": BlockedSampler,
        }
        return samplers[self.choice.sampler](shot)

    def _shot(self) -> Shot:
        """One sample of the target where it is now."""
        target, mode, harness = self.target, self._plan.mode, self._harness
        return Shot(
            device=self._device,
            target=target,
            streams=harness.streams() if target.any_stream else (target.stream,),
            flush=harness.flush(mode),
            ranges=self._ranges,
            name=self._name,
            category=category_of(target, mode, self._device.facts.l2_bytes),
            random=self._random,
            resets=target.foreign
            and target.window is None
            and mode != "hot"
            and self._device.facts.persists,
            host_times=self._host_times,
            clocks=self._clocks,
            # Launches of one placement follow each other by themselves; those of several evict each other's data.
            untimed=UNTIMED if mode == "hot" and target.places > 1 else 0,
        )


def category_of(target: Target, mode: str, l2_bytes: int) -> str | None:
    """The NVTX category of a target's launches; of several that apply, the slowest part of the memory system.
    `l2_bytes`: size of the device's L2.
    Returns "managed" if pages are put back before every sample, "link" if declared bytes cross a link, "L2" if a window lies on part of
    the data or hot caches may hold it all, "DRAM" for other declared bytes, else None.
    """
    traffic, footprint = target.moved_bytes, target.footprint
    if target.managed:
        return MANAGED
    if traffic is not None and traffic.link:
        return LINK
    if target.window is not None or (
        mode == "hot" and (footprint is None or footprint <= l2_bytes)
    ):
        return L2
    return None if traffic is None else DRAM
