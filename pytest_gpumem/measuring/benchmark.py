"""The conductor: takes a target from its first check to a finished measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import CannotCapture, Device, HoldExpired, OutOfMemory, Stream
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.measuring.samplers.batched import BatchedSampler
from pytest_gpumem.measuring.samplers.blocked import HOLD_TIMEOUT, BlockedSampler
from pytest_gpumem.measuring.samplers.choose import Choice, choose
from pytest_gpumem.measuring.samplers.graph import GraphSampler
from pytest_gpumem.measuring.samplers.host import HostSampler
from pytest_gpumem.measuring.samplers.plain import PlainSampler
from pytest_gpumem.measuring.samplers.shot import Sampler, Shot
from pytest_gpumem.measuring.steady import WINDOW, steady
from pytest_gpumem.measuring.stopping import go_on, half_width, precise, samples_per_placement
from pytest_gpumem.measuring.target import CallableTarget, Case, CaseTarget, KernelTarget, Target, compulsory
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.l2 import PersistingStream
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.ranges import Ranges, phase
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.settings import MODES
from pytest_gpumem.units import MiB, format_share, format_time

PADDING_STEP = 2 * MiB
"""Device memory is mapped in pages of 2 MiB: less padding would not move anything."""
MOST_PADDING = 64
"""Steps of padding at most, 128 MiB."""
WARM_UP_SHARE = 0.25
"""Share of the budget that a warm-up may use."""
BATCH = 20
"""Launches between two events in hot mode."""
FOREIGN_BATCH = 5
"""The same for foreign callables, each of which may launch many kernels: a stream holds some thousand before queueing waits."""
PROFILED_SAMPLES = 5
"""Samples under a profiler, which measures each of them in its own way."""
FLOOR_SAMPLES = 50
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


class Conductor:
    """Measures targets on one device; lives as long as the session, because flush buffers and the clock's floor are made once."""

    def __init__(self, device: Device, ranges: Ranges, *, profiled: bool) -> None:
        self._device = device
        self._ranges = ranges
        self._profiled = profiled
        self._flushes: dict[str, Flush] = {}
        self._floor: float | None = None
        self._awake = False

    # Targets

    def target(
        self,
        function: BoundKernel | Callable[..., object],
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
        if isinstance(function, BoundKernel):
            if moved is not None:
                raise BadCall(f"moved={moved!r}: the traffic of {function.name} is known from the kernel")
            return KernelTarget(function, arguments, keywords, arena, queue, stream)
        if not callable(function):
            raise BadCall(f"gpu_benchmark() takes a kernel of gpu_kernels or a callable, not {function!r}")
        return CallableTarget(function, arguments, keywords, arena, queue, stream, compulsory("moved", moved))

    def case(self, build: Callable[[Memory], Case], *, arena: Arena) -> Target:
        """What `gpu_benchmark.case(build)` measures. Raises `BadCall` if `build` is no function or gives no `Case`."""
        if not callable(build):
            raise BadCall(f"gpu_benchmark.case() takes a function that is given a memory and returns a Case, not {build!r}")
        return CaseTarget(build, arena, arena.stream)

    # Measuring

    def measure(self, target: Target, plan: Plan, *, arena: Arena, label: str, name: str) -> Measurement:
        """Check, warm up, sample over placements, check again.

        Args:
            target: from `target` or `case`; closed before this returns.
            plan: mode, sampler, placements, precision, budget.
            arena: holds the padding between placements; its seed makes the placements repeatable on the simulated device.
            label: what tells the measurement apart inside its test.
            name: the test's NVTX range name.

        Raises:
            WrongResult: the result of one launch is not the reference's, before or after timing.
            BadCall: mode or sampler do not fit the target.
            Unsupported: the device cannot do what the target needs.
            DeviceError: a launch failed.
        """
        try:
            if plan.mode not in MODES:
                raise BadCall(f"mode={plan.mode!r}; accepted are {', '.join(MODES)}")
            return self._measure(target, plan, arena, label, name)
        finally:
            try:
                arena.pad(0)
            finally:
                target.close()

    def _measure(self, target: Target, plan: Plan, arena: Arena, label: str, name: str) -> Measurement:
        # What the test queued before, on whatever stream, must neither race with the check nor run beside a sample.
        self._device.synchronize()
        if target.can_check:
            with self._ranges.range(phase(name, "check")):
                target.check()
        self._wake()
        floor = self._measured_floor()
        before = self._device.conditions()
        run = _Run(self, target, plan, arena, name)
        run.sample()
        after = self._device.conditions()
        if run.discarded and run.discarded >= len([s for p in run.placements for s in p]):
            # Throttling that shows under load alone: it must reach the judge.
            after = replace(after, throttle_reasons=tuple(dict.fromkeys((*after.throttle_reasons, *run.throttle_reasons))))
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
            floor=floor / run.batch if run.sampler.name == "batched" else floor,
            conditions=(before, after),
            discarded=run.discarded,
            window=window,
            profiled=self._profiled,
            checked=target.can_check,
            notes=(*target.notes, *run.notes),
            accesses_per_launch=target.accesses_per_launch,
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
            self._flushes[mode] = Flush(self._device, mode)
        return self._flushes[mode]

    def shot(self, target: Target, mode: str, name: str) -> Shot:
        """One sample of a target, for the samplers."""
        homes = target.homes

        def put_home() -> None:
            for buffer in homes:
                buffer.put_home(target.stream)

        return Shot(
            self._device, target.stream, put_home if homes else None, target.prepare, self.flush(mode), target.launch, self._ranges, name
        )

    def range(self, name: str, what: str) -> Any:
        """The NVTX range of a phase."""
        return self._ranges.range(phase(name, what))

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

    def _measured_floor(self) -> float:
        """Median of what two events with nothing between them read, in seconds; measured once."""
        if self._floor is None:
            stream, start, end = self._device.stream(), self._device.event(), self._device.event()
            readings, hold_works = list[float](), not self._profiled
            for _ in range(FLOOR_SAMPLES):
                hold = self._device.hold(stream, HOLD_TIMEOUT) if hold_works else None
                self._device.record(start, stream)
                self._device.record(end, stream)
                if hold is not None:
                    hold.release()
                try:
                    self._device.synchronize(stream)
                except HoldExpired:  # something makes every launch wait, such as CUDA_LAUNCH_BLOCKING
                    hold_works = False
                readings.append(self._device.elapsed(start, end))
            self._floor = float(np.median(readings))
        return self._floor

    def close(self) -> None:
        """Free the flush buffers."""
        for flush in self._flushes.values():
            flush.close()
        self._flushes.clear()


class _Run:
    """The sampling of one target: its state between placements."""

    def __init__(self, conductor: Conductor, target: Target, plan: Plan, arena: Arena, name: str) -> None:
        self._conductor = conductor
        self._device = conductor.device
        self._target = target
        self._plan = plan
        self._arena = arena
        self._name = name
        self._random = np.random.default_rng(arena.seed)
        self.placements: list[tuple[float, ...]] = []
        self._throttled: list[tuple[float, ...]] = []
        self.notes: list[str] = []
        self.throttle_reasons: tuple[str, ...] = ()
        self.discarded = 0
        self.batch = FOREIGN_BATCH if target.foreign else BATCH
        self._count = WINDOW
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
        self._count = samples_per_placement(cost, budget, wanted)
        begun = self._device.now()
        with self._conductor.range(self._name, "measure"):
            while True:
                samples = tuple(self._take(self._count))
                self._keep(samples, self._device.conditions())
                spent = self._device.now() - begun
                seen = [*self.medians, *(float(np.median(p)) for p in self._throttled)]
                if most is not None and len(seen) >= most:
                    break
                if not go_on(seen, wanted=self._plan.precision, placements=wanted, spent=spent, budget=budget):
                    break
                if not self._move():
                    break
        if not self.placements:
            # Everything was throttled: the samples stay visible, and the conditions make the verdict UNRELIABLE.
            self.placements = list(self._throttled)
            self.notes.append("every sample was taken under throttling")
        self._say_precision(wanted)

    def _keep(self, samples: tuple[float, ...], conditions: Conditions) -> None:
        if conditions.throttle_reasons:
            self.throttle_reasons = tuple(dict.fromkeys((*self.throttle_reasons, *conditions.throttle_reasons)))
            self.discarded += len(samples)
            self._throttled.append(samples)
        else:
            self.placements.append(samples)

    def _say_precision(self, wanted: int) -> None:
        medians = self.medians
        width = half_width(medians)
        if len(medians) < wanted:
            self.notes.append(f"{len(medians)} of {wanted} placements")
        if width is not None and not precise(medians, self._plan.precision):
            self.notes.append(
                f"budget used before the precision: half-width {format_share(width / float(np.mean(medians)))} > "
                f"{format_share(self._plan.precision)}"
            )

    def _profile(self) -> None:
        self.sampler = self._make()
        with self._conductor.range(self._name, "warm-up"):
            self._target.prepare()
            self._target.launch()
            self._device.synchronize(self._target.stream)
        self.placements = [tuple(self.sampler.samples(PROFILED_SAMPLES))]  # the sampler ranges each launch
        self.notes.append("measured under a profiler: times are not comparable")

    def _warm_up(self) -> float:
        """Sample until steady; gives the seconds that one sample costs."""
        # The first launch compiles and loads; nothing may hold the stream meanwhile.
        self._target.prepare()
        self._target.launch()
        self._device.synchronize(self._target.stream)
        self.sampler = self._make()
        limit = WARM_UP_SHARE * self._plan.budget
        samples: list[float] = []
        step = 2
        begun = self._device.now()
        while True:
            before, sampler = self._device.now(), self.sampler
            taken = self._take(step)
            spent = self._device.now() - begun
            # What was lost before a fallback is not what a sample costs.
            cost = (self._device.now() - before) / len(taken) if sampler is self.sampler else taken[-1]
            samples += taken
            if steady(samples):
                break
            if spent > limit:
                if len(samples) >= WINDOW:
                    self.notes.append(f"not steady after {len(samples)} warm-up samples of {format_time(float(np.median(samples)))}")
                break
            step = WINDOW // 2
        return cost

    def _take(self, count: int) -> list[float]:
        """Samples from the sampler, or from the next one if it turns out not to work."""
        try:
            return self.sampler.samples(count)
        except HoldExpired as expired:
            if not self.choice.fallback:
                raise BadCall(f'sampler "{self.choice.sampler}" was asked for, but {expired}') from None
            self.choice = Choice("host", f"{expired}: wall-clock time, launch latency included", fallback=False)
            self._start_anew()
            self.sampler = self._make()
            return self.sampler.samples(count)

    def _start_anew(self) -> None:
        """One measurement, one clock: what another sampler took cannot be averaged with what follows."""
        self.placements.clear()
        self._throttled.clear()
        self.discarded = 0

    def _move(self) -> bool:
        """Fresh addresses for the next placement; says so where they are not to be had."""
        try:
            self._arena.pad(int(self._random.integers(1, MOST_PADDING + 1)) * PADDING_STEP)
            self._target.place()
            self._device.synchronize()  # what a case's function queued on other streams must not run beside a sample
        except OutOfMemory as full:
            self.notes.append(f"no further placement: {full}")
            return False
        self.sampler = self._make()
        self._take(2)  # page tables and instruction caches of the new addresses
        return True

    def _make(self) -> Sampler:
        shot = self._conductor.shot(self._target, self._plan.mode, self._name)
        sampler = self.choice.sampler
        if sampler == "graph":
            try:
                return GraphSampler(shot, self._count)
            except CannotCapture as reason:
                if not self.choice.fallback:
                    raise BadCall(f'sampler "graph" was asked for, but {reason}') from None
                self.choice = replace(self.choice, sampler="blocked", reason=f"cannot be captured: {reason}")
                self._start_anew()
                return BlockedSampler(shot)
        if sampler == "batched":
            return BatchedSampler(shot, self.batch, capture=not self._target.foreign)
        if sampler == "host":
            return HostSampler(shot)
        if sampler == "plain":
            return PlainSampler(shot)
        return BlockedSampler(shot)
