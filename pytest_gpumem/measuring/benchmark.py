"""The conductor: takes a target from its first check to a finished measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Device, HoldExpired, Launch, MemoryKind, OutOfMemory, Stream
from pytest_gpumem.kernels.stream import VECTOR_BYTES
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.controls import idle_launch, middle_mean
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.measuring.placements import MOST_PLACEMENTS_FACTOR
from pytest_gpumem.measuring.samplers import (
    UNTIMED,
    BatchedSampler,
    BlockedSampler,
    Choice,
    HostSampler,
    PlainSampler,
    Sampler,
    Shot,
    batch_of,
    choose,
    held,
)
from pytest_gpumem.measuring.staging import Work
from pytest_gpumem.measuring.stopping import WINDOW, affordable, enough, go_on, half_width, precise, samples_per_placement, steady
from pytest_gpumem.measuring.target import CallableTarget, Case, CaseTarget, KernelTarget, Target, compulsory
from pytest_gpumem.measuring.untimed import count as count_migrations
from pytest_gpumem.measuring.untimed import watch as watch_launch
from pytest_gpumem.measuring.whereabouts import Elsewhere, find
from pytest_gpumem.measuring.works import WorkTarget
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream, open_streams
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import MEASURE, Ranges, phase
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.settings import MODES
from pytest_gpumem.units import format_share, format_time

MANAGED, LINK, L2, DRAM = "managed", "link", "L2", "DRAM"


def category_of(target: Target, mode: str, l2_bytes: int) -> str | None:
    """The category of a target's launches; of several that hold, the slowest part decides.

    Args:
        target: what is measured.
        mode: state of the cache before each sample.
        l2_bytes: size of the device's L2.

    Gives "managed" where pages are put back before every sample, "link" where declared bytes cross a link, "L2" where a window lies on
    part of the data, or where caches stay as they are and may hold it all, "DRAM" for other bytes, and None where nothing is known.
    """
    traffic, footprint = target.traffic, target.footprint
    if target.homes:
        return MANAGED
    if traffic is not None and traffic.link:
        return LINK
    if target.window is not None or (mode == "hot" and (footprint is None or footprint <= l2_bytes)):
        return L2
    return None if traffic is None else DRAM


def worst(seen: Sequence[Conditions]) -> Conditions | None:
    """The least favourable of what was seen: lowest clocks, every throttle reason, highest temperature and power, most other processes.

    None for nothing seen. A figure that the driver never gave stays None.
    """
    if not seen:
        return None
    return Conditions(
        sm_clock_hz=_over(min, [c.sm_clock_hz for c in seen]),
        memory_clock_hz=_over(min, [c.memory_clock_hz for c in seen]),
        temperature_c=_over(max, [c.temperature_c for c in seen]),
        power_w=_over(max, [c.power_w for c in seen]),
        throttle_reasons=tuple(dict.fromkeys(reason for c in seen for reason in c.throttle_reasons)),
        other_processes=_most([c.other_processes for c in seen]),
    )


def _over(choose: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return choose(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


WARM_UP_SHARE = 0.25
"""Share of the budget that a warm-up may use."""
PROFILED_SAMPLES = 5
"""Samples under a profiler, which measures each of them in its own way."""
STREAMS = 4
"""Streams that take turns: what a launch adds to a reading differs between streams by 30 ns and between processes by 60 ns (standard
deviations on an H200); more than four streams average no better."""
FLOOR_SAMPLES = 40
"""Readings of an empty interval, and of a launch that does next to nothing, on each stream."""
CHUNK_SECONDS = 0.025
"""Seconds of samples between two looks at clocks and throttle reasons."""
WAKE_BATCH = 100
"""Flushes between two looks at the clocks."""
WAKE_SECONDS = 0.3
"""Seconds that a GPU is kept busy, once a session, if its clocks were not up: an idle GPU raises them over tens of milliseconds, longer
than a warm-up by number of samples would see."""
WAKE_LIMIT = 2.0
"""Seconds after which a GPU that does not become steady is measured all the same; every measurement warms up besides."""


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001
    """Wanted half-width of the confidence interval over placements, as a share of the latency."""
    budget: float = 1.0
    """Seconds for one measurement."""


@dataclass(frozen=True)
class Floors:
    """What a reading contains besides the work that is timed."""

    empty: float
    """Seconds that two events with nothing between them read."""
    launch: float
    """Seconds that they read with a launch between them that does nothing: launch overhead of this process."""


class Conductor:
    """Measures targets on one device; lives as long as the session, because flush buffers and the clock's floor are made once."""

    def __init__(self, device: Device, ranges: Ranges, *, profiled: bool) -> None:
        self._device = device
        self._ranges = ranges
        self._profiled = profiled
        self._flushes: dict[str, Flush] = {}
        self._streams: tuple[Stream, ...] = ()
        self._floors: Floors | None = None
        self._awake = False

    # Targets

    def target(
        self,
        function: BoundKernel | Work | Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        arena: Arena,
        stream: PersistingStream | None = None,
        moved: int | None = None,
    ) -> Target:
        """What the short form measures: a kernel of the catalogue or any callable, with its arguments.

        Raises:
            BadCall: the arguments do not fit, `function` cannot be called, or `moved` is given for a kernel whose traffic is known.
        """
        if stream is not None and not isinstance(stream, PersistingStream):
            raise BadCall(f"stream= takes what persisting_stream() gives, not {type(stream).__name__}")
        if stream is not None and stream.closed:
            raise BadCall("stream= is a persisting stream whose `with` block has ended: measure inside the block")
        if stream is not None:
            stream.used = True
        queue: Stream = arena.stream if stream is None else stream.stream
        if isinstance(function, Work):
            if arguments or keywords or moved is not None or stream is not None:
                raise BadCall(f"gpu_benchmark({function.name}): work of gpu_work takes no arguments, moved= or stream=: it has its own")
            return WorkTarget(function, arena)
        if isinstance(function, BoundKernel):
            if moved is not None:
                raise BadCall(f"moved={moved!r}: the traffic of {function.name} is known from the kernel")
            if stream is None and any(function.stream is one.stream for one in open_streams(self._device)):
                raise BadCall(f"{function.name}.with_stream(stream): with_stream() is for untimed calls; measure with stream=stream")
            return KernelTarget(function, arguments, keywords, arena, queue, stream)
        if not callable(function):
            raise BadCall(f"gpu_benchmark() takes a kernel of gpu_kernels or a callable, not {function!r}")
        self._device.make_room()
        return CallableTarget(function, arguments, keywords, arena, queue, stream, compulsory("moved", moved))

    def case(self, build: Callable[[Memory], Case], *, arena: Arena, persisting: Mapping[str, Any] | None = None) -> Target:
        """What `gpu_benchmark.case(build)` measures. Raises `BadCall` if `build` is no function or gives no `Case`.

        Args:
            build: makes the case at each placement.
            arena: the test's.
            persisting: arguments of the persisting stream that a case with a window runs on; default: everything fitted.
        """
        if not callable(build):
            raise BadCall(f"gpu_benchmark.case() takes a function that is given a memory and returns a Case, not {build!r}")
        self._device.make_room()
        return CaseTarget(build, arena, arena.stream, persisting)

    # Measuring

    def measure(
        self, target: Target, plan: Plan, *, arena: Arena, label: str, name: str, count: bool = False, watch: bool = False
    ) -> Measurement:
        """Check, warm up, sample over placements, count page faults and watch a launch if asked for, check again.

        Args:
            target: from `target` or `case`; closed before this returns.
            plan: mode, sampler, placements, precision, budget.
            arena: holds the padding between placements; its seed makes the placements repeatable on the simulated device.
            label: what tells the measurement apart inside its test.
            name: the test's NVTX range name.
            count: take an untimed pass that counts page faults and migrations.
            watch: take an untimed pass that tells which kernels, copies and memsets a launch consists of.

        Raises:
            WrongResult: the result of one launch is not the reference's, before or after timing.
            BadCall: mode or sampler do not fit the target.
            Unsupported: the device cannot do what the target needs.
            DeviceError: a launch failed.
        """
        try:
            if plan.mode not in MODES:
                raise BadCall(f"mode={plan.mode!r}; accepted are {', '.join(MODES)}")
            return self._measure(target, plan, arena, label, name, count, watch)
        finally:
            try:
                arena.pad(0)
            finally:
                target.close()

    def _measure(self, target: Target, plan: Plan, arena: Arena, label: str, name: str, count: bool, watch: bool) -> Measurement:
        # What the test queued before, on whatever stream, must neither race with the check nor run beside a sample.
        self._device.synchronize()
        if target.can_check:
            with self._ranges.range(phase(name, "check")):
                target.check()
        facts = self._device.facts
        if target.window is None and facts.persisting_l2_max_bytes and facts.mig_profile is None:
            self._device.reset_persisting()  # a read flush does not evict lines that somebody left persisting
        self._wake()
        floors = self.floors()
        before = self._device.conditions()
        run = _Run(self, target, plan, arena, name, floors.empty)
        run.sample()
        after = self._device.conditions()
        migrations = None
        if count:
            with self._ranges.range(phase(name, "count")):
                migrations = count_migrations(self._device, target, profiled=self._profiled)
        activity = None
        if watch:
            with self._ranges.range(phase(name, "watch")):
                activity = watch_launch(self._device, target, profiled=self._profiled)
        if count or watch:
            # What CUPTI leaves in a process once it has looked may change what a launch costs there.
            self._floors = None
        if target.can_check:
            with self._ranges.range(phase(name, "check")):
                target.check()
        window = target.window.window if target.window is not None else None
        medians = run.medians
        return Measurement(
            label=label,
            target=target.name,
            mode=plan.mode,
            sampler=run.sampler.name,
            sampler_reason=run.choice.reason,
            placements=tuple(run.placements),
            half_width=half_width(medians),
            traffic=target.traffic,
            footprint=target.footprint,
            floor=floors.empty / run.batch if run.sampler.name == "batched" else floors.empty,
            overhead=floors.launch if run.sampler.name == "blocked" else None,
            conditions=(before, after),
            during=worst(run.seen),
            discarded=run.discarded,
            window=window,
            profiled=self._profiled,
            checked=target.can_check,
            notes=tuple(dict.fromkeys((*target.notes, *run.notes))),
            migrations=migrations,
            activity=activity,
            accesses_per_launch=target.accesses_per_launch,
            sectors_per_request=target.sectors_per_request,
            requested=target.requested,
            kernel_source=target.kernel_source,
            managed=bool(target.homes),
        )

    @property
    def device(self) -> Device:
        return self._device

    @property
    def profiled(self) -> bool:
        return self._profiled

    def flush(self, mode: str) -> Flush:
        """The flush of a mode, made at its first use."""
        if mode not in self._flushes:
            flush = self._flushes[mode] = Flush(self._device, mode)
            # A kernel is loaded at its first launch, which waits for the device: never behind a held stream.
            stream = self.streams()[0]
            flush(stream)
            self._device.synchronize(stream)
        return self._flushes[mode]

    def streams(self) -> tuple[Stream, ...]:
        """The streams that take turns where a target can run on any."""
        if not self._streams:
            self._streams = tuple(self._device.stream() for _ in range(STREAMS))
        return self._streams

    def shot(self, target: Target, places: int, mode: str, name: str, random: np.random.Generator) -> Shot:
        """One sample of a target, for the samplers."""
        homes = target.homes

        def put_home(stream: Stream) -> None:
            for buffer in homes:
                buffer.put_home(stream)

        return Shot(
            device=self._device,
            streams=self.streams() if target.any_stream else (target.stream,),
            places=places,
            homes=put_home if homes else None,
            prepare=target.prepare,
            flush=self.flush(mode),
            launch=target.launch,
            ranges=self._ranges,
            name=name,
            moved=None if target.traffic is None else target.traffic.total,
            category=category_of(target, mode, self._device.facts.l2_bytes),
            random=random,
            restores=target.restores or bool(homes),
            # Launches of one placement follow each other by themselves; those of several evict each other's data.
            untimed=UNTIMED if mode == "hot" and places > 1 else 0,
        )

    def range(self, name: str, what: str) -> Any:
        """The NVTX range of a phase."""
        return self._ranges.range(phase(name, what))

    def ready(self) -> None:
        """See that the clocks are up, which `measure` does besides."""
        self._wake()

    def _wake(self) -> None:
        """Keep the device busy, once a session, until its clocks have settled."""
        if self._awake or self._profiled:
            return
        stream, start, end = self._device.stream(), self._device.event(), self._device.event()
        begun, means = self._device.now(), list[float]()
        flush = self.flush("clean-cold")
        asleep = self._device.conditions()
        while True:
            self._device.record(start, stream)
            for _ in range(WAKE_BATCH):
                flush(stream)
            self._device.record(end, stream)
            self._device.synchronize(stream)
            means.append(self._device.elapsed(start, end) / WAKE_BATCH)
            spent, now = self._device.now() - begun, self._device.conditions()
            unchanged = (now.sm_clock_hz, now.memory_clock_hz) == (asleep.sm_clock_hz, asleep.memory_clock_hz)
            if (unchanged and now.sm_clock_hz is not None) or (spent > WAKE_SECONDS and steady(means)) or spent > WAKE_LIMIT:
                break
        self._awake = True

    def floors(self) -> Floors:
        """What readings contain besides the work that is timed; measured once, and again after a count of pages or launches."""
        if self._floors is None:
            arena = Arena(self._device, seed=0)
            try:
                memory = arena.allocate(VECTOR_BYTES, MemoryKind.DEVICE)
                empty = self._readings(None)
                self._floors = Floors(float(np.median(empty)), middle_mean(self._readings(idle_launch(self._device.facts, memory))))
            finally:
                arena.close()
        return self._floors

    def _readings(self, launch: Launch | None) -> list[float]:
        """Seconds between two events with one launch, or nothing, between them; on all streams."""
        start, end = self._device.event(), self._device.event()
        readings, hold_works = list[float](), not self._profiled
        if launch is not None:  # the first one loads the kernel, which waits for the device: nothing may be held then
            self._device.launch(launch, self.streams()[0])
            self._device.synchronize()
        for _ in range(FLOOR_SAMPLES):
            for stream in self.streams():
                with held(self._device, stream) if hold_works else nullcontext():
                    self._device.record(start, stream)
                    if launch is not None:
                        self._device.launch(launch, stream)
                    self._device.record(end, stream)
                try:
                    self._device.synchronize(stream)
                except HoldExpired:  # something makes every launch wait, such as CUDA_LAUNCH_BLOCKING
                    hold_works = False
                readings.append(self._device.elapsed(start, end))
        return readings[STREAMS:]  # the first launch on each stream is slow

    def close(self) -> None:
        """Free the flush buffers."""
        for flush in self._flushes.values():
            flush.close()
        self._flushes.clear()


class _Run:
    """The sampling of one target: its state between placements."""

    def __init__(self, conductor: Conductor, target: Target, plan: Plan, arena: Arena, name: str, floor: float) -> None:
        self._conductor = conductor
        self._device = conductor.device
        self._target = target
        self._plan = plan
        self._name = name
        self._floor = floor
        self._random = np.random.default_rng(conductor.device.entropy(arena.seed))
        self._live = 1
        self._latency: float | None = None
        self._kept: list[list[float]] = []
        """Samples of the placements that live now."""
        self._lost: list[list[float]] = []
        """The same, taken under throttling."""
        self.placements: list[tuple[float, ...]] = []
        self._throttled: list[tuple[float, ...]] = []
        self.seen: list[Conditions] = []
        """Conditions between the first sample and the last."""
        self.notes: list[str] = []
        self.discarded = 0
        self.choice: Choice = choose(
            plan.sampler,
            mode=plan.mode,
            foreign=target.foreign,
            pages_move=bool(target.homes),
            waits=target.waits,
            restores=target.restores,
            profiled=conductor.profiled,
        )
        self.sampler: Sampler

    @property
    def batch(self) -> int:
        """Launches of one batch."""
        return batch_of(self._latency, foreign=self._target.foreign)

    @property
    def medians(self) -> list[float]:
        return [float(np.median(p)) for p in self.placements]

    def sample(self) -> None:
        """Warm up, then fill `placements`."""
        if self._conductor.profiled:
            self._profile()
            return
        begun = self._device.now()
        with self._conductor.range(self._name, "warm-up"):
            cost = self._warm_up()
        most = self._target.max_placements
        wanted = self._plan.placements if most is None else min(most, self._plan.placements)
        budget = max(self._plan.budget - (self._device.now() - begun), 0.1 * self._plan.budget)
        begun = self._device.now()
        with self._conductor.range(self._name, MEASURE):
            while True:
                begun_already = bool(self.placements or self._throttled)
                # What moves one placement at a time starts where it is.
                if wanted > 1 and (self._target.any_stream or begun_already) and not self._move(wanted, cost, budget) and begun_already:
                    break
                self._fill(wanted, cost, begun, budget)
                spent = self._device.now() - begun
                seen = [float(np.median(p)) for p in (*self.placements, *self._throttled)]
                limit = MOST_PLACEMENTS_FACTOR * wanted if most is None else most
                if not go_on(seen, wanted=self._plan.precision, placements=wanted, most=limit, spent=spent, budget=budget):
                    break
        if not self.placements:
            # Everything was throttled: the samples stay visible, and its conditions leave the row UNDECIDED.
            self.placements = list(self._throttled)
            self.notes.append("every sample was taken under throttling")
        self._say_precision(wanted)

    def _fill(self, wanted: int, cost: float, begun: float, budget: float) -> None:
        """Samples of the placements that live now, until there are enough."""
        self._kept, self._lost = [[] for _ in range(self._live)], [[] for _ in range(self._live)]
        # Placements that follow each other share the budget from the start; those side by side are sampled until they agree.
        quota = samples_per_placement(cost, budget, wanted)
        together = self._live >= wanted
        chunk = max(1, int(CHUNK_SECONDS / (cost * self._live))) if cost > 0 else quota
        while True:
            taken = len(self._kept[0]) + len(self._lost[0])
            samples = self._take(chunk if together else min(chunk, quota - taken))
            now = self._device.conditions()
            self.seen.append(now)
            into = self._lost if now.throttle_reasons else self._kept
            for place, seconds in samples:
                into[place].append(seconds)
            both = [kept + lost for kept, lost in zip(self._kept, self._lost, strict=True)]
            spent = self._device.now() - begun
            if enough(both, wanted=self._plan.precision, spent=spent, budget=budget) if together else len(both[0]) >= quota:
                break
        self.discarded += sum(map(len, self._lost))
        self.placements += [tuple(kept) for kept in self._kept if kept]
        self._throttled += [tuple(lost) for kept, lost in zip(self._kept, self._lost, strict=True) if not kept]

    def _say_precision(self, wanted: int) -> None:
        medians = self.medians
        width = half_width(medians)
        if len(medians) < wanted:
            self.notes.append(f"{len(medians)} of {wanted} placements")
        if width is not None and not precise(medians, self._plan.precision):
            share = format_share(width / float(np.mean(medians)))
            self.notes.append(
                f"not as precise as wanted: {len(medians)} placements leave a half-width of {share} > {format_share(self._plan.precision)}"
            )

    def _profile(self) -> None:
        self.sampler = self._make()
        with self._conductor.range(self._name, "warm-up"):
            self._once()
        self.placements = [tuple(seconds for _, seconds in self.sampler.samples(PROFILED_SAMPLES))]  # the sampler ranges each launch
        self.notes.append("measured under a profiler: times are not comparable")

    def _once(self) -> None:
        """One launch that nobody times."""
        self._target.prepare(self._target.stream)
        self._target.launch(0, self._target.stream)
        self._device.synchronize()

    def _warm_up(self) -> float:
        """Sample until steady; gives the seconds that one sample costs."""
        # The first launch compiles and loads; nothing may hold the stream meanwhile.
        self._once()
        self._device.settle()
        if self._target.foreign and self.choice.sampler != "host":
            self._find_stream()
        self.sampler = self._make()
        limit = WARM_UP_SHARE * self._plan.budget
        samples: list[float] = []
        step = 2
        begun = self._device.now()
        while True:
            before, sampler = self._device.now(), self.sampler
            taken = [seconds for _, seconds in self._take(step)]
            spent = self._device.now() - begun
            # What was lost before a fallback is not what a sample costs.
            cost = (self._device.now() - before) / len(taken) if sampler is self.sampler else taken[-1]
            samples += taken
            self._latency = taken[-1]
            if steady(samples):
                break
            if spent > limit:
                # Too few samples to see a drift through their noise are no drift.
                if len(samples) >= WINDOW and not steady(samples, most=WINDOW):
                    self.notes.append(f"not steady after {len(samples)} warm-up samples of {format_time(float(np.median(samples)))}")
                break
            step = WINDOW // 2
        if self.choice.sampler == "batched":  # the length of a batch follows from how long one launch takes
            self.sampler = self._make()
            before = self._device.now()
            cost = self._device.now() - before if self._take(1) else cost
        return cost

    def _find_stream(self) -> None:
        """Time a foreign callable where it works; by the host's clock where no stream shows it."""
        target = self._target
        restore = self._shot().restore
        try:
            found, name = find(self._device, restore, partial(target.launch, 0), target.stream, self._floor)
        except HoldExpired as expired:
            self._to_host(str(expired))
        except Elsewhere as reason:
            self._to_host(str(reason))
        else:
            if found is not target.stream:
                target.run_on(found)
            if name is not None:
                self.notes.append(f"timed on {name}, where it launches")

    def _to_host(self, reason: str) -> None:
        if not self.choice.fallback:
            raise BadCall(f'sampler "{self.choice.sampler}" was asked for, but {reason}') from None
        self.choice = Choice("host", f"{reason}: wall-clock time, launch latency included", fallback=False)

    def _take(self, rounds: int) -> list[tuple[int, float]]:
        """Samples from the sampler, or from the host's clock if a launch waits for the device."""
        try:
            return self.sampler.samples(rounds)
        except HoldExpired as expired:
            self._to_host(str(expired))
            self._start_anew()
            self.sampler = self._make()
            return self.sampler.samples(rounds)

    def _start_anew(self) -> None:
        """One measurement, one clock: what another sampler took cannot be averaged with what follows."""
        self.placements.clear()
        self._throttled.clear()
        self._kept, self._lost = [[] for _ in range(self._live)], [[] for _ in range(self._live)]
        self.discarded = 0

    def _move(self, wanted: int, cost: float, budget: float) -> bool:
        """Fresh addresses for the next placements; says so where they are not to be had."""
        # A batch is captured for each placement, which takes longer than a cold sample.
        most = wanted if self.choice.sampler == "batched" else MOST_PLACEMENTS_FACTOR * wanted
        # Those side by side are sampled in rounds, and a round of slow launches is not cut short by the budget.
        limit = affordable(cost, budget)
        try:
            self._live = self._target.spread(min(wanted, limit), min(most, limit), self._random)
            self._device.synchronize()  # what a case's function queued on other streams must not run beside a sample
            self._device.settle()
        except OutOfMemory as full:
            self.notes.append(f"no further placement: {full}")
            self._live = 1
            # Some of the buffers may have moved before memory ran out: a graph would launch on what they left.
            self.sampler = self._make()
            return False
        self.sampler = self._make()
        self._take(1 if self._live > 1 else 2)  # page tables and instruction caches of the new addresses
        return True

    def _shot(self) -> Shot:
        return self._conductor.shot(self._target, self._live, self._plan.mode, self._name, self._random)

    def _make(self) -> Sampler:
        shot, sampler = self._shot(), self.choice.sampler
        if sampler == "batched":
            return BatchedSampler(shot, self.batch, capture=not self._target.foreign)
        if sampler == "host":
            return HostSampler(shot)
        if sampler == "plain":
            return PlainSampler(shot)
        return BlockedSampler(shot)
