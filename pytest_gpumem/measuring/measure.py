"""The way of a measurement, in order: check the target, wait for a quiet GPU, find the stream of
foreign code, warm up, sample placement after placement until the interval is narrow enough, take
the untimed passes, check again.

`samplers` takes a sample, `stopping` says when there are enough, and `untimed` has the passes.
"""

from __future__ import annotations

import statistics
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from pytest_gpumem.devices.protocol import OWN_CONTEXT, DeviceError
from pytest_gpumem.measuring import stopping
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.harness import HOLD_TIMEOUT, Disturbances, Harness
from pytest_gpumem.measuring.samplers import Sampler
from pytest_gpumem.measuring.target import Target
from pytest_gpumem.measuring.untimed import count_migrations, find_what_ran
from pytest_gpumem.options import MODES
from pytest_gpumem.ranges import MEASURE, phase
from pytest_gpumem.records.measurement import Measurement, modes_of, without_exceptions, worst

WARM_UP_SHARE = 0.25  # share of the budget that a warm-up may use
PROFILED_SAMPLES = 5
WAIT_SHARE = 0.3  # share of the budget to wait while the device is throttled or busy
LOOKS = 3  # looks for other work before the samples, and after them
CHUNK_SECONDS = 0.025  # seconds of samples between two readings of the conditions, or two looks


@dataclass(frozen=True)
class Plan:
    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001  # wanted half-width over placements, as a share of the latency
    budget: float = 1.0  # seconds for a measurement
    # Untimed passes
    pages: bool = False  # counts page faults and migrations
    ran: bool = False  # finds each step of a launch, with the machine code of its kernels


def measure(harness: Harness, target: Target, plan: Plan, name: str) -> Measurement:
    """Measure a target, and close it.

    `name`: of the test's NVTX ranges.
    Raises `WrongResult`: the result of a launch is not the reference's.
    Raises `BadCall`: mode or sampler do not fit the target.
    Raises `Unsupported`, `DeviceError`: the device cannot do it, or a launch failed.
    """
    device = harness.device
    if target.foreign and device.in_own_context():
        raise DeviceError(
            f"{OWN_CONTEXT} is current, not the GPU's primary one: work of the two cannot "
            "be measured together"
        )
    with device.current(), device.footprints.paused():
        try:
            if plan.mode not in MODES:
                raise BadCall(f"mode={plan.mode!r}; accepted are {', '.join(MODES)}")
            return _Measuring(harness, target, plan, name).run()
        finally:
            target.close()
            target.arena.pad(0)


class _Measuring:
    def __init__(self, harness: Harness, target: Target, plan: Plan, name: str) -> None:
        self.harness, self.target, self.plan, self.name = harness, target, plan, name
        self.device, self.notes = harness.device, list[str]()
        self.counting = tuple if target.window is None else without_exceptions
        self.others = Disturbances(harness, WAIT_SHARE * plan.budget)

    def run(self) -> Measurement:
        harness, device, target, plan = self.harness, self.device, self.target, self.plan

        # Check. Work that the test queued before must not race with it.
        device.streams.synchronize()
        with device.counters.loading() if target.foreign else nullcontext():
            not_checked = self._check()

        # Make the GPU ready. A flush that reads leaves lines that persist.
        if target.window is None and device.facts.persists:
            device.l2.reset_persisting()
        harness.wake()
        if target.foreign or plan.ran:
            harness.wake_counters()
        floors = harness.floors()

        # Warm up and sample.
        self.sampler = sampler = Sampler(harness, target, plan.mode, plan.sampler, self.name)
        self._sample()
        others, readings = self.others, sampler.readings

        # Untimed passes. What ran is last: it puts managed pages back, which a count must find so.
        migrations, ran = None, None
        if plan.pages:
            with self._range("count"):
                migrations = count_migrations(target, profiled=harness.profiled)
        if plan.ran:
            with self._range("watch"):
                ran = find_what_ran(target, min(readings.medians), profiled=harness.profiled)
        busy = any(others.looks)
        if busy or plan.pages:
            harness.forget_floors()

        # Check again.
        not_checked = self._check() or not_checked
        if not_checked is not None:
            self.notes.append(not_checked)

        return Measurement(
            label="",
            target=target.name,
            mode=plan.mode,
            sampler=sampler.name,
            sampler_reason=sampler.reason,
            placements=tuple(readings.placements),
            half_width=stopping.half_width(self.counting(readings.medians)),
            moved_bytes=target.moved_bytes,
            footprint=target.footprint,
            floor=floors.empty / sampler.batch,
            overhead=floors.launch if sampler.name == "blocked" else None,
            conditions=(others.seen[0], others.seen[-1]),
            during=worst(others.seen),
            discarded=readings.discarded,
            window=None if target.window is None else target.window.window,
            profiled=harness.profiled,
            migrations=migrations,
            what_ran=ran,
            accesses_per_launch=target.accesses_per_launch,
            sectors_per_request=target.sectors_per_request,
            requested=target.requested,
            work_seen=sampler.work_seen,
            launches_wait=device.launches_wait(),
            busy=statistics.fmean(others.looks) if busy else 0.0,
            host_time=statistics.median(sampler.host_times) if sampler.host_times else None,
            checked=target.verify is not None and not_checked is None,
            notes=tuple(dict.fromkeys((*target.notes, *sampler.notes, *others.notes, *self.notes))),
        )

    def _range(self, step: str) -> AbstractContextManager[None]:
        return self.harness.ranges.range(phase(self.name, step))

    def _check(self) -> str | None:
        """Check a launch; return why its result could not be compared, if so."""
        if self.target.verify is None:
            return None
        with self._range("check"):
            return self.target.check()

    def _sample(self) -> None:
        sampler, readings, plan = self.sampler, self.sampler.readings, self.plan
        target, now = self.target, self.device.now
        if self.harness.profiled:
            self._sample_profiled()
            return
        self.others.wait_out()
        self.others.look(LOOKS)
        begun = now() - self.others.waited
        with self._range("warm-up"):
            cost = self._warm_up()
        sampler.host_times.clear()
        sampler.clocks.clear()

        wanted = plan.placements if target.moves else 1
        most = stopping.MOST_PLACEMENTS_FACTOR * wanted
        budget = max(plan.budget - (now() - begun), 0.1 * plan.budget)
        begun = now()
        with self._range(MEASURE):
            while True:
                started = bool(readings.placements or readings.throttled)
                # What moves a placement at a time starts where it is.
                if wanted > 1 and (target.any_stream or started):
                    # The budget cuts no round of placements side by side short.
                    limit = stopping.affordable(cost, budget)
                    # Capturing a batch for each placement takes longer than a cold sample.
                    at_once = wanted if sampler.in_batches else most
                    moved = sampler.move(min(wanted, limit), min(at_once, limit))
                    if not moved and started:
                        break
                self._sample_placements(wanted, cost, begun, budget)
                spent = now() - begun
                medians = readings.medians
                for samples in readings.throttled:
                    medians.append(statistics.median(samples))
                modes = 0 if target.window is None else max(modes_of(medians), default=0)
                if modes and len(medians) < most and spent < budget:
                    continue  # more placements show which mode counts
                if not stopping.go_on(
                    self.counting(medians),
                    wanted_share=plan.precision,
                    placements=wanted,
                    most=most,
                    spent=spent,
                    budget=budget,
                ):
                    break
        self.others.look(LOOKS)
        if not readings.placements:
            # The samples stay visible, and their conditions leave the row UNDECIDED.
            readings.placements = list(readings.throttled)
        if sampler.expired == 1:
            self.notes.append(
                "a launch waited for the device once, until its hold expired: it was tried again"
            )
        if len(readings.placements) < wanted:
            self.notes.append(f"{len(readings.placements)} of {wanted} placements")

    def _warm_up(self) -> float:
        """Sample until steady; return the seconds that a sample costs."""
        now, sampler = self.device.now, self.sampler

        def clock() -> float:
            # The time-out of a hold is not what a sample costs.
            return now() - HOLD_TIMEOUT * sampler.expired

        latency = sampler.find_stream()
        limit = WARM_UP_SHARE * self.plan.budget
        if latency > limit:
            # The launches so far were its warm-up.
            sampler.latency = latency
            sampler.renew()
            return latency
        sampler.renew()
        begun = clock()
        if sampler.in_batches:
            sampler.latency = sampler.samples(1)[-1][1]
            sampler.renew()
        samples: list[float] = []
        step = 1
        while True:
            step_begun = clock()
            latest = [seconds for _, seconds in sampler.samples(step)]
            spent = clock() - begun
            cost = max((clock() - step_begun) / len(latest), latest[-1])
            samples += latest
            sampler.latency = latest[-1]
            if stopping.steady(samples) or spent > limit:
                break
            step = max(1, min(stopping.WINDOW // 2, int((limit - spent) / cost)))
        if sampler.in_batches:
            # The length of a batch follows from the latency.
            sampler.renew()
            step_begun = now()
            sampler.samples(1)
            cost = now() - step_begun
        return cost

    def _sample_placements(self, wanted: int, cost: float, begun: float, budget: float) -> None:
        """Sample the placements that live now until there are enough samples."""
        plan, sampler, readings = self.plan, self.sampler, self.sampler.readings
        places = self.target.places
        # Placements in turn share the budget; those side by side are sampled until they agree.
        side_by_side = places >= wanted
        quota = stopping.samples_per_placement(cost, budget, wanted)
        chunk = max(1, int(CHUNK_SECONDS / (cost * places)))
        readings.begin(places)
        enough = False
        while not enough:
            count, clocks_before = len(readings.live[0]), len(sampler.clocks)
            left = stopping.rounds_left(count, places) if side_by_side else quota - count
            samples = sampler.samples(min(chunk, left))
            throttled = self.others.after_samples(sampler.clocks[clocks_before:])
            readings.add(samples, throttled=throttled)
            enough = len(readings.live[0]) >= quota
            if side_by_side:
                spent = self.device.now() - begun
                enough = stopping.enough(
                    readings.live, wanted_share=plan.precision, spent=spent, budget=budget
                )
        readings.finish()

    def _sample_profiled(self) -> None:
        """Take few samples: a profiler measures each of them differently."""
        sampler = self.sampler
        sampler.renew()
        with self._range("warm-up"):
            sampler.launch_once()
        sampler.readings.begin(1)
        sampler.readings.add(sampler.samples(PROFILED_SAMPLES), throttled=False)
        sampler.readings.finish()
        self.others.seen.append(self.device.conditions())
        self.notes.append("measured under a profiler: times are not comparable")
