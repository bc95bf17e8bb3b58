"""A measurement, in order: check the target, wait for a quiet GPU, warm up, sample placement after
placement until the interval is narrow enough, take the untimed passes, check again.

`timing` takes the samples, `stopping` says when there are enough, `untimed` has the passes.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext

from msgspec import UNSET

from pytest_gpumem.devices.protocol import HoldExpired, NotCounted
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.measuring import stopping
from pytest_gpumem.measuring.finding_stream import LONG
from pytest_gpumem.measuring.harness import Harness, at_full_speed, without_throttling, worst
from pytest_gpumem.measuring.plan import Passes, Plan, Stopwatch
from pytest_gpumem.measuring.samplers import HOLD_TIMEOUT
from pytest_gpumem.measuring.target import NotChecked, Target
from pytest_gpumem.measuring.timing import Timing
from pytest_gpumem.measuring.untimed import OUTSIDE, count_migrations, find_outside, find_what_ran
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.ranges import MEASURE, phase
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.what_ran import StepKind
from pytest_gpumem.units import format_share, format_time

WARM_UP_SHARE = 0.25  # share of the budget that a warm-up may use
PROFILED_SAMPLES = 5
WAIT_SHARE = 0.3  # share of the budget to wait while the device is throttled or busy
LOOKS = 3  # looks for other work before the samples, and after them
CHUNK_SECONDS = 0.025  # seconds of samples between two readings of the conditions, or two looks


def measure(
    harness: Harness,
    target: Target,
    plan: Plan,
    passes: Passes,
    arena: Arena,
    label: str,
    name: str,
) -> Measurement:
    """Measure a target; see `Conductor.measure`."""
    device, ranges = harness.device, harness.ranges
    stopwatch = Stopwatch(device.now)

    # Check. Work that the test queued before, on whatever stream, must not race with it.
    device.streams.synchronize()
    with device.counters.loading() if target.foreign else nullcontext():
        not_checked = _check(harness, target, name)
    stopwatch.lap("check")

    # Make the GPU ready. A read flush does not evict lines that were left persisting.
    if target.window is None and device.facts.persists:
        device.l2.reset_persisting()
    harness.wake()
    floors = harness.floors()

    # Warm up and sample.
    sampling = Sampling(harness, target, plan, arena.seed, name, stopwatch)
    sampling.wait_out()
    before = device.conditions()
    sampling.sample()
    outside: float | None = None
    if target.foreign and sampling.timing.choice.sampler in ("blocked", "batched"):
        outside = _seconds_outside(sampling, passes)
        if outside is not None and sampling.timing.choice.fallback:
            # The host's clock sees all of the work.
            sampling = sampling.by_host(outside)
            sampling.sample()
            outside = None
    before, after = sampling.slowing(before, device.conditions())
    timing, readings, target = sampling.timing, sampling.timing.readings, sampling.timing.target
    stopwatch.lap("samples")

    # Untimed passes. What ran is last: it puts managed pages back, which a count must find so.
    migrations, ran = None, None
    if passes.pages:
        with ranges.range(phase(name, "count")):
            migrations = count_migrations(device, target, profiled=harness.profiled)
    if passes.ran:
        with ranges.range(phase(name, "watch")):
            latency = min(readings.medians, default=0.0)
            ran = find_what_ran(device, target, arena.managed, latency, profiled=harness.profiled)
    window = None if target.window is None else target.window.window
    launches_wait = device.launches_wait()
    looked = passes.ran or (target.foreign and passes.streams)
    harness.after_passes(busy=any(sampling.looks), counted=migrations is not None, looked=looked)
    stopwatch.lap("passes")

    # Check again.
    not_checked = _check(harness, target, name) or not_checked
    stopwatch.lap("check")

    notes = [*target.notes, *sampling.notes]
    if not_checked is not None:
        notes.append(not_checked)
    notes += sampling.last_notes
    work_seen = timing.work_seen
    if ran is not None and any(ran.of(StepKind.KERNEL, StepKind.COPY, StepKind.MEMSET)):
        # A function that waits for its own work, as those of JAX, leaves no work to be seen.
        work_seen = True
    sampler = timing.choice.sampler
    return Measurement(
        label=label,
        target=target.name,
        mode=plan.mode,
        sampler=sampler,
        sampler_reason=timing.choice.reason,
        placements=tuple(readings.placements),
        half_width=sampling.half_width,
        moved_bytes=target.moved_bytes,
        footprint=target.footprint,
        floor=floors.empty / timing.batch if timing.batched else floors.empty,
        overhead=floors.launch if sampler == "blocked" else None,
        conditions=(before, after),
        during=worst(sampling.seen),
        discarded=readings.discarded,
        window=window,
        profiled=harness.profiled,
        migrations=migrations,
        what_ran=ran,
        accesses_per_launch=target.accesses_per_launch,
        sectors_per_request=target.sectors_per_request,
        requested=target.requested,
        managed=bool(target.managed),
        work_seen=UNSET if work_seen else False,
        launches_wait=launches_wait or UNSET,
        busy=statistics.fmean(sampling.looks) if any(sampling.looks) else UNSET,
        host_time=statistics.median(timing.host_times) if timing.host_times else UNSET,
        outside=UNSET if outside is None else outside,
        checked=target.check is not None and not_checked is None,
        notes=tuple(dict.fromkeys(notes)),
        took=stopwatch.seconds,
    )


def _check(harness: Harness, target: Target, name: str) -> str | None:
    """Check the result of a launch; return the reason if it could not be compared."""
    if target.check is None:
        return None
    with harness.ranges.range(phase(name, "check")):
        try:
            target.check()
        except NotChecked as reason:
            return str(reason)
    return None


def _seconds_outside(sampling: Sampling, passes: Passes) -> float | None:
    """Return the seconds of a launch's work outside of the timed interval, if they matter."""
    timing, harness = sampling.timing, sampling.harness
    if timing.alone:
        return None
    if not passes.streams:
        sampling.last_notes.append("own streams not checked")
        return None
    medians = timing.readings.medians
    try:
        with harness.ranges.range(phase(sampling.name, "watch")):
            seconds = find_outside(harness.device, timing.target, harness.idle())
    except (NotCounted, HoldExpired) as reason:
        sampling.last_notes.append(f"own streams not checked: {reason}")
        return None
    if not medians or seconds <= OUTSIDE * statistics.fmean(medians):
        return None
    return seconds


class Sampling:
    """The samples of a target: warm-up, then placements, with looks for other work."""

    def __init__(
        self,
        harness: Harness,
        target: Target,
        plan: Plan,
        seed: int,
        name: str,
        stopwatch: Stopwatch,
    ) -> None:
        self.harness, self.plan, self.name = harness, plan, name
        self.timing = Timing(harness, target, plan.mode, plan.sampler, seed, name)
        self.seen: list[Conditions] = []  # conditions between the first sample and the last
        self.looks: list[bool] = []  # whether other work kept the device busy
        self.last_notes: list[str] = []  # for the end of the record's notes
        self.notes = self.timing.notes
        self._device, self._stopwatch = harness.device, stopwatch
        self._looked = 0.0  # when the last look ended
        self._chunk_clocks: list[float | None] = []  # SM clock that ran, of each chunk of samples
        self._waited = 0.0  # seconds of waiting while the device was throttled or busy

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval of the latency over placements, in seconds."""
        return stopping.half_width(self.timing.counting(self.timing.readings.medians))

    def by_host(self, outside: float) -> Sampling:
        """Return a sampling of the same target by the host's clock."""
        target = self.timing.target
        again = Sampling(self.harness, target, self.plan, 0, self.name, self._stopwatch)
        what = f"{format_time(outside)} of its work run"
        reason = f"{what} on a stream that the timed one does not wait for"
        again.timing.take_over(self.timing, reason)
        return again

    def wait_out(self) -> None:
        """Wait while the device is throttled or busy, within a share of the budget."""
        if not self.harness.profiled:
            most = WAIT_SHARE * self.plan.budget - self._waited
            self._waited += self.harness.wait_out(most)

    def slowing(self, before: Conditions, after: Conditions) -> tuple[Conditions, Conditions]:
        """Return conditions without throttle reasons that slowed nothing."""
        first, last = None, None
        if self._chunk_clocks:
            first, last = self._chunk_clocks[0], self._chunk_clocks[-1]
        return self._slowing(before, first), self._slowing(after, last)

    def sample(self) -> None:
        """Warm up, then fill the readings of `timing`."""
        if self.harness.profiled:
            self._sample_profiled()
            return
        now, plan, timing, readings = self._device.now, self.plan, self.timing, self.timing.readings
        self._look(LOOKS)
        begun = now() - self._waited
        with self.harness.ranges.range(phase(self.name, "warm-up")):
            cost = self._warm_up()
        self._stopwatch.lap("warm-up")
        timing.host_times.clear()
        timing.clocks.clear()

        wanted, most = plan.placements, stopping.MOST_PLACEMENTS_FACTOR * plan.placements
        if timing.target.move is None:
            wanted, most = 1, 1
        budget = max(plan.budget - (now() - begun), 0.1 * plan.budget)
        begun = now() - (timing.first_sample or 0.0)
        with self.harness.ranges.range(phase(self.name, MEASURE)):
            while True:
                started = bool(readings.placements or readings.throttled)
                # What moves a placement at a time starts where it is.
                if wanted > 1 and (timing.target.any_stream or started):
                    moved = self._move(wanted, cost, budget)
                    if not moved and started:
                        break
                self._stopwatch.lap("placements")
                self._sample_placements(wanted, cost, begun, budget)
                self._stopwatch.lap("samples")
                spent = now() - begun
                medians = readings.all_medians
                if timing.has_modes(medians) and len(medians) < most and spent < budget:
                    continue  # more placements show which mode counts
                if not stopping.go_on(
                    timing.counting(medians),
                    wanted=plan.precision,
                    placements=wanted,
                    most=most,
                    spent=spent,
                    budget=budget,
                ):
                    break
        self._look(LOOKS)
        self._add_notes(wanted)

    def _warm_up(self) -> float:
        """Sample until steady; return the seconds that a sample costs."""
        now, timing = self._device.now, self.timing
        # The first launch compiles and loads; nothing may hold the stream meanwhile.
        begun = now()
        timing.launch_once()
        first = now() - begun
        self._device.memory.settle()
        if timing.target.foreign and timing.choice.sampler != "host":
            timing.find_stream(first)
        limit = WARM_UP_SHARE * self.plan.budget
        if timing.latency is not None and timing.latency > max(limit, LONG):
            # The look for its stream was its warm-up.
            timing.renew()
            return timing.latency
        timing.first_sample = None
        timing.renew()
        begun, expired_before = now(), timing.expired
        if timing.batched:
            timing.latency = timing.samples(1)[-1][1]
            timing.renew()
        samples: list[float] = []
        step = 1
        while True:
            step_begun, expired = now(), timing.expired
            latest = [seconds for _, seconds in timing.samples(step)]
            # The time-out of a hold is not what a sample costs.
            spent = now() - begun - HOLD_TIMEOUT * (timing.expired - expired_before)
            step_seconds = now() - step_begun - HOLD_TIMEOUT * (timing.expired - expired)
            cost = max(step_seconds / len(latest), latest[-1])
            samples += latest
            timing.latency = latest[-1]
            if stopping.steady(samples):
                break
            if spent > limit:
                self._note_unsteady(samples)
                break
            step = stopping.WINDOW // 2
        if timing.batched:
            # The length of a batch follows from the latency.
            timing.renew()
            step_begun = now()
            timing.samples(1)
            cost = now() - step_begun
        return cost

    def _move(self, wanted: int, cost: float, budget: float) -> bool:
        """Go to fresh addresses for the next placements; return False if there are none."""
        most = stopping.MOST_PLACEMENTS_FACTOR * wanted
        if self.timing.batched:
            most = wanted  # capturing a batch for each placement takes longer than a cold sample
        # The budget cuts no round of placements side by side short.
        limit = stopping.affordable(cost, budget)
        # Long work does not notice new page tables.
        warm = not (self.timing.target.foreign and cost > LONG)
        return self.timing.move(min(wanted, limit), min(most, limit), warm=warm)

    def _sample_placements(self, wanted: int, cost: float, begun: float, budget: float) -> None:
        """Sample the placements that live now until there are enough samples."""
        plan, timing, readings = self.plan, self.timing, self.timing.readings
        places = timing.target.places
        # Placements in turn share the budget; those side by side are sampled until they agree.
        side_by_side = places >= wanted
        quota = stopping.samples_per_placement(cost, budget, wanted)
        chunk = quota
        if cost > 0:
            chunk = max(1, int(CHUNK_SECONDS / (cost * places)))
        if not side_by_side and (timing.latency or 0.0) >= stopping.SHORT:
            chunk = min(chunk, stopping.FEW_IN_TURN)
        readings.begin(places)
        while True:
            count = len(readings.live[0])
            left = stopping.rounds_left(count, places) if side_by_side else quota - count
            self._sample_chunk(min(chunk, left))
            spent = self._device.now() - begun
            if side_by_side:
                enough = stopping.enough(
                    readings.live, wanted=plan.precision, spent=spent, budget=budget
                )
            else:
                enough = stopping.enough_in_turn(
                    readings.live[0],
                    timing.counting(readings.medians),
                    wanted=plan.precision,
                    placements=wanted,
                    most=quota,
                )
            if enough:
                break
        readings.finish()

    def _sample_chunk(self, rounds: int) -> None:
        """Take samples, then read the conditions, and look for other work from time to time."""
        timing = self.timing
        clocks_before = len(timing.clocks)
        if timing.first_sample is not None:
            samples = [(0, timing.first_sample)]
            timing.first_sample = None
        else:
            samples = timing.samples(rounds)
        reported, clocks = self._device.conditions(), timing.clocks[clocks_before:]
        self._chunk_clocks.append(statistics.median(clocks) if clocks else None)
        now = self._slowing(reported, self._chunk_clocks[-1])
        self.seen.append(now)
        timing.readings.add(samples, throttled=bool(now.throttle_reasons))
        if self._device.now() - self._looked >= CHUNK_SECONDS:
            self._look(1)
        if reported.throttle_reasons:
            self.wait_out()

    def _sample_profiled(self) -> None:
        """Take few samples: a profiler measures each of them in its own way."""
        self.timing.renew()
        with self.harness.ranges.range(phase(self.name, "warm-up")):
            self.timing.launch_once()
        self.timing.readings.begin(1)
        self.timing.readings.add(self.timing.samples(PROFILED_SAMPLES), throttled=False)
        self.timing.readings.finish()
        self.notes.append("measured under a profiler: times are not comparable")

    def _look(self, times: int) -> None:
        """Look whether other work keeps the device busy."""
        for _ in range(times):
            self.looks.append(self.harness.busy())
        self._looked = self._device.now()

    def _slowing(self, reported: Conditions, ran_at_hz: float | None) -> Conditions:
        """Return conditions without throttle reasons if the SM clock ran at full speed."""
        note = at_full_speed(reported, ran_at_hz, self._device.facts.sm_clock_hz)
        if note is None:
            return reported
        self.notes.append(note)
        return without_throttling(reported)

    def _note_unsteady(self, samples: list[float]) -> None:
        # Too few samples to see a drift through their noise are no drift.
        window = stopping.WINDOW
        if len(samples) >= window and not stopping.steady(samples, most=window):
            median = format_time(statistics.median(samples))
            self.notes.append(f"not steady after {len(samples)} warm-up samples of {median}")

    def _add_notes(self, wanted: int) -> None:
        """Note what the samples lack."""
        readings = self.timing.readings
        if not readings.placements:
            # The samples stay visible, and their conditions leave the row UNDECIDED.
            readings.placements = list(readings.throttled)
            self.notes.append("every sample was taken under throttling")
        if self.timing.expired == 1:
            self.notes.append(
                "a launch waited for the device once, until its hold expired: it was tried again"
            )
        if len(readings.placements) < wanted:
            self.notes.append(f"{len(readings.placements)} of {counted(wanted, 'placement')}")
        medians, width = self.timing.counting(readings.medians), self.half_width
        if width is not None and not stopping.precise(medians, self.plan.precision):
            noise = format_share(width / statistics.fmean(medians))
            self.notes.append(
                f"less precise than gpumem_precision {format_share(self.plan.precision)}: "
                f"noise {noise} after {counted(len(medians), 'placement')}"
            )
