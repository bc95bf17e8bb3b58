"""The conductor: the phases of a measurement, from the first check of a target to its record."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import (
    OWN_CONTEXT,
    PLENTY,
    Device,
    DeviceError,
    HoldExpired,
    NotCounted,
    Stream,
)
from pytest_gpumem.measuring.bound import BadCall, BoundKernel
from pytest_gpumem.measuring.harness import Floors, Harness
from pytest_gpumem.measuring.samplers import BATCHES
from pytest_gpumem.measuring.sampling import Plan, Sampling, Stopwatch
from pytest_gpumem.measuring.target import NotChecked, Target
from pytest_gpumem.measuring.target_callable import callable_target
from pytest_gpumem.measuring.target_case import Case, CasePlacements
from pytest_gpumem.measuring.target_kernel import KernelLaunches
from pytest_gpumem.measuring.untimed import OUTSIDE, count_migrations, find_outside, find_what_ran
from pytest_gpumem.measuring.work import InTurn, StagedCopy, Together, Work, bound_of
from pytest_gpumem.measuring.works import work_target
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.current_device import on_its_device
from pytest_gpumem.memory.l2 import PersistingStream, open_streams
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.options import MODES, SAMPLERS
from pytest_gpumem.ranges import Ranges, phase
from pytest_gpumem.records.measurement import Conditions, Measurement
from pytest_gpumem.records.migrations import Migrations
from pytest_gpumem.records.overlap import Overlap, Part
from pytest_gpumem.records.what_ran import StepKind, WhatRan
from pytest_gpumem.units import format_share, format_time


class Passes(NamedTuple):
    """Untimed passes of a measurement."""

    pages: bool = False  # counts page faults and migrations
    ran: bool = False  # finds each step of a launch, with the machine code of its kernels, and counts the pages of managed buffers

    streams: bool = True  # finds work of a foreign launch outside of the timed interval


NO_PASSES = Passes()


class Conductor:
    """Describes and measures targets on one device, for a whole session."""

    def __init__(self, device: Device, ranges: Ranges, *, profiled: bool) -> None:
        self.device = device
        self.profiled = profiled  # a profiler is attached
        self._ranges = ranges
        self._harness = Harness(device, ranges, profiled=profiled)
        self._watched = False  # something was counted or watched in this process

    @on_its_device
    def target(
        self,
        /,
        function: BoundKernel | Work | Callable[..., object],
        arguments: tuple[Any, ...],
        keywords: dict[str, Any],
        *,
        arena: Arena,
        stream: PersistingStream | None = None,
        on_simulated: bool = False,
        **declared: Any,
    ) -> Target:
        """Describe what the short form measures: a kernel of the catalogue, work or any callable, with its arguments.
        `declared`: fields of a `Case` that the user gave for a callable: `moved`, `reads`, `writes`, `check`, `reference`.
        Raises `BadCall`: the arguments do not fit, `function` cannot be called, or something is declared that is known from a kernel.
        """
        queue = arena.stream if stream is None else _used(stream)
        if isinstance(function, Work):
            if arguments or keywords or declared or stream is not None:
                given = ", ".join(f"{name}=" for name in (declared or ("stream",)))
                raise BadCall(
                    f"gpu_benchmark({function.name}): work of gpu_work takes no arguments and no {given}: it has its own"
                )
            return work_target(function, arena)
        if isinstance(function, BoundKernel):
            if declared:
                name, value = next(iter(declared.items()))
                known = "check" if name in ("check", "reference") else "traffic"
                raise BadCall(
                    f"{name}={value!r}: the {known} of {function.name} is known from the kernel"
                )
            if stream is None and any(
                function.stream is one.stream for one in open_streams(self.device)
            ):
                raise BadCall(
                    f"{function.name}.with_stream(stream): with_stream() is for untimed calls; measure with stream=stream"
                )
            return KernelLaunches(function, arguments, keywords, arena, queue, stream).target
        if not callable(function):
            raise _not_callable(function)
        self.device.memory.make_room(unless_free=PLENTY)
        return callable_target(
            function, arguments, keywords, arena, queue, stream, declared, on_simulated=on_simulated
        )

    @on_its_device
    def case(self, build: Callable[[Memory], Case], *, arena: Arena) -> Target:
        """Describe what `gpu_benchmark.case(build)` measures. Raises `BadCall` if `build` is no function or returns no `Case`.
        `build`: makes the case at each placement.
        """
        if not callable(build):
            given = f"an object of type {type(build).__name__}"
            raise BadCall(
                f"gpu_benchmark.case() takes a function that is given a memory and returns a Case, not {given}"
            )
        self.device.memory.make_room(unless_free=PLENTY)
        return CasePlacements(build, arena, arena.stream).target

    def measure(
        self,
        target: Target,
        plan: Plan,
        *,
        arena: Arena,
        label: str,
        name: str,
        passes: Passes = NO_PASSES,
    ) -> Measurement:
        """Check, warm up, sample over placements, take the untimed passes, check again.
        `target`: from `target` or `case`; closed before this returns.
        `plan`: mode, sampler, placements, precision, budget.
        `arena`: holds the padding between placements; its seed makes the placements repeatable on the simulated device.
        `label`: tells the measurements of one test apart.
        `passes`: untimed passes to take after the samples.
        Raises `WrongResult`: the result of one launch is not the reference's, before or after timing.
        Raises `BadCall`: mode or sampler do not fit the target.
        Raises `Unsupported`: the device cannot do what the target needs.
        Raises `DeviceError`: a launch failed.
        """
        elsewhere = self.device.elsewhere()
        if target.foreign and elsewhere == OWN_CONTEXT:
            raise DeviceError(
                f"{OWN_CONTEXT} is current, not the GPU's primary one: work of the two cannot be measured together"
            )
        if target.foreign:
            target = dataclasses.replace(target, launch=_seen_once(self.device, target.launch))
        with self.device.current(), self.device.footprints.paused():
            measured = self._measure_and_close(target, plan, arena, label, name, passes)
        if elsewhere is None:
            return measured
        note = f"the test had made {elsewhere} current; this row is of the GPU that the session measures"
        return replace(measured, notes=(*measured.notes, note))

    def _measure_and_close(
        self, target: Target, plan: Plan, arena: Arena, label: str, name: str, passes: Passes
    ) -> Measurement:
        try:
            for option, value, accepted in (
                ("mode", plan.mode, MODES),
                ("sampler", plan.sampler, SAMPLERS),
            ):
                if value not in accepted:
                    raise BadCall(f"{option}={value!r}; accepted are {', '.join(accepted)}")
            return self._measure(target, plan, arena, label, name, passes)
        finally:
            try:
                arena.pad(0)
            finally:
                target.close()

    def _measure(
        self, target: Target, plan: Plan, arena: Arena, label: str, name: str, passes: Passes
    ) -> Measurement:
        device, harness, took = self.device, self._harness, Stopwatch(self.device.now)
        # What the test queued before, on whatever stream, must neither race with the check nor run beside a sample.
        device.streams.synchronize()
        with device.counters.loading() if target.foreign else nullcontext():
            unchecked = self._check(target, name)
        took.lap("check")
        self._prepare_l2(target)
        harness.wake()
        floors = harness.floors()
        sampling = Sampling(harness, target, plan, arena.seed, name, took)
        sampling.wait_out()
        before = device.conditions()
        sampling.sample()
        outside: float | str | None = None
        if target.foreign and sampling.choice.sampler in ("blocked", "batched"):
            sampling, outside = self._whole(sampling, name, look=passes.streams)
        before, after = sampling.around(before, device.conditions())
        target = sampling.target
        took.lap("samples")
        migrations, ran = self._untimed(sampling, arena, passes, name)
        measured = self._record(label, sampling, plan, floors, (before, after), migrations, ran)
        measured = replace(measured, outside=outside if isinstance(outside, float) else UNSET)
        if any(sampling.looks):
            harness.forget_floors()
        looked = passes.ran or (target.foreign and passes.streams)
        if migrations is not None or (looked and not self._watched and not device.facts.simulated):
            # What CUPTI leaves in a process once it has looked may change what a launch costs there.
            harness.forget_floors()
            self._watched = True
        took.lap("passes")
        unchecked = self._check(target, name) or unchecked
        took.lap("check")
        said = [one for one in (unchecked, outside) if isinstance(one, str)]
        notes = dict.fromkeys((*target.notes, *sampling.notes, *said))
        checked = target.check is not None and unchecked is None
        return replace(measured, checked=checked, notes=tuple(notes), took=took.seconds)

    def _prepare_l2(self, target: Target) -> None:
        # A read flush does not evict lines that were left persisting.
        if target.window is None and self.device.facts.persists:
            self.device.l2.reset_persisting()

    def _whole(
        self, sampling: Sampling, name: str, *, look: bool
    ) -> tuple[Sampling, float | str | None]:
        """The sampling, or one by the host's clock if a part of the work runs outside of the timed interval; and the seconds of that part
        where the user asked for this sampler, or a note if nothing looked for it."""
        if sampling.alone:
            return sampling, None
        if not look:
            return sampling, "own streams not checked"
        medians = sampling.medians
        try:
            with self._ranges.range(phase(name, "watch")):
                seconds = find_outside(self.device, sampling.target, self._harness.idle())
        except (NotCounted, HoldExpired) as reason:
            return sampling, f"own streams not checked: {reason}"
        if not medians or seconds <= OUTSIDE * statistics.fmean(medians):
            return sampling, None
        if not sampling.choice.fallback:
            return sampling, seconds
        again = sampling.by_host(
            f"{format_time(seconds)} of its work run on a stream that the timed one does not wait for"
        )
        again.sample()
        return again, None

    def _record(
        self,
        label: str,
        sampling: Sampling,
        plan: Plan,
        floors: Floors,
        conditions: tuple[Conditions, Conditions],
        migrations: Migrations | None,
        ran: WhatRan | None,
    ) -> Measurement:
        """The measurement of the samples."""
        target, sampler = sampling.target, sampling.choice.sampler
        # A function that waits for its own work, as one of JAX has to, leaves no work to be seen.
        works = sampling.work_seen or (
            ran is not None and any(ran.of(StepKind.KERNEL, StepKind.COPY, StepKind.MEMSET))
        )
        return Measurement(
            label=label,
            target=target.name,
            mode=plan.mode,
            sampler=sampler,
            sampler_reason=sampling.choice.reason,
            placements=tuple(sampling.placements),
            half_width=sampling.half_width,
            moved_bytes=target.moved_bytes,
            footprint=target.footprint,
            floor=floors.empty / sampling.batch if sampler in BATCHES else floors.empty,
            overhead=floors.launch if sampler == "blocked" else None,
            conditions=conditions,
            during=worst(sampling.seen),
            discarded=sampling.discarded,
            window=None if target.window is None else target.window.window,
            profiled=self.profiled,
            migrations=migrations,
            what_ran=ran,
            accesses_per_launch=target.accesses_per_launch,
            sectors_per_request=target.sectors_per_request,
            requested=target.requested,
            kernel_source=target.kernel_source,
            managed=bool(target.managed),
            work_seen=UNSET if works else False,
            launches_wait=True if self.device.launches_wait() else UNSET,
            busy=statistics.fmean(sampling.looks) if any(sampling.looks) else UNSET,
            host_time=UNSET if sampling.host_time is None else sampling.host_time,
        )

    def _untimed(
        self, sampling: Sampling, arena: Arena, passes: Passes, name: str
    ) -> tuple[Migrations | None, WhatRan | None]:
        """The page faults of a launch and what it runs, where passes are to find them."""
        device, target, profiled, migrations, ran = (
            self.device,
            sampling.target,
            self.profiled,
            None,
            None,
        )
        # First: the other pass puts managed pages back, which belongs to what a count finds before its launch.
        if passes.pages:
            with self._ranges.range(phase(name, "count")):
                migrations = count_migrations(device, target, profiled=profiled)
        if passes.ran:
            with self._ranges.range(phase(name, "watch")):
                latency = min(sampling.medians, default=0.0)
                ran = find_what_ran(device, target, arena.managed, latency, profiled=profiled)
        return migrations, ran

    def _check(self, target: Target, name: str) -> str | None:
        """Check the result of a launch; the reason if it could not be."""
        if target.check is not None:
            with self._ranges.range(phase(name, "check")):
                try:
                    target.check()
                except NotChecked as reason:
                    return str(reason)
        return None

    def floors(self) -> Floors:
        """What readings contain besides the timed work."""
        return self._harness.floors()

    def close(self) -> None:
        """Free the flush buffers."""
        self._harness.close()


def _used(stream: PersistingStream) -> Stream:
    """The stream of a persisting stream that a measurement uses. Raises `BadCall`: it is none, or has ended."""
    if not isinstance(stream, PersistingStream):
        raise BadCall(f"stream= takes what persisting_stream() gives, not {type(stream).__name__}")
    if stream.closed:
        raise BadCall(
            "stream= is a persisting stream whose `with` block has ended: measure inside the block"
        )
    stream.used = True
    return stream.stream


def _not_callable(given: object) -> BadCall:
    """The error of what `gpu_benchmark` cannot measure."""
    remedy = (
        "; pass gpu_benchmark.case() a function that returns it" if isinstance(given, Case) else ""
    )
    if given is None:
        remedy = ": pass the kernel and its arguments, as in gpu_benchmark(kernel, a, b), and do not call it"
    return BadCall(
        f"gpu_benchmark() takes a kernel of gpu_kernels or a callable, not an object of type {type(given).__name__}{remedy}"
    )


def _seen_once(
    device: Device, launch: Callable[[int, Stream], None]
) -> Callable[[int, Stream], None]:
    """A launch whose first call counts in the test's footprint and may load machine code. It is a warm-up; later ones are timed, and take
    the same again."""
    seen = False

    def launched(place: int, stream: Stream) -> None:
        nonlocal seen
        if seen:
            launch(place, stream)
            return
        seen = True
        with device.footprints.resumed(), device.counters.loading():
            launch(place, stream)

    return launched


def worst(seen: Sequence[Conditions]) -> Conditions | None:
    """The least favourable conditions: lowest clocks, every throttle reason, highest temperature and power, most other processes. None if
    there are none. A figure that the driver never gave stays None."""
    if not seen:
        return None

    def over(choose: Callable[..., Any], field: str) -> Any:
        return choose(
            (value for one in seen if (value := getattr(one, field)) is not None), default=None
        )

    known = [one.throttle_reasons for one in seen if one.throttle_reasons is not None]
    return Conditions(
        sm_clock_hz=over(min, "sm_clock_hz"),
        memory_clock_hz=over(min, "memory_clock_hz"),
        temperature_c=over(max, "temperature_c"),
        power_w=over(max, "power_w"),
        throttle_reasons=tuple(dict.fromkeys(reason for reasons in known for reason in reasons))
        if known
        else None,
        other_processes=over(max, "other_processes"),
    )


PART_SHARE = 0.25  # share of a measurement's budget that each part of overlapping work, and their sequence, is measured with
AGREE = 0.1
"""Largest difference between the sequence and the sum of its parts, as a share of the sum. Other traffic on a host's link makes copies up
to twice as long, for some milliseconds: on an H100 a sequence read 2.43 ms, its parts 1.22 and 0.37 ms."""
TRIES = 3  # times that parts and sequence are measured until they agree


def overlap_of(
    conductor: Conductor, work: Work, plan: Plan, *, arena: Arena, name: str
) -> Overlap | None:
    """Measure each part of overlapping work alone, and all parts in turn, by the plan of the work itself. None for work that overlaps
    nothing, and under a profiler, which slows each part in its own way."""
    if (
        not isinstance(work, (Together, StagedCopy))
        or work.before is not None
        or conductor.profiled
    ):
        return None
    sampler = "host" if work.on_host else plan.sampler
    short = dataclasses.replace(
        plan, sampler=sampler, placements=1, budget=PART_SHARE * plan.budget
    )

    def latency(part: Work) -> float:
        unchecked = dataclasses.replace(
            work_target(part, arena), check=None
        )  # the whole is checked, of which it is a part
        return conductor.measure(unchecked, short, arena=arena, label="", name=name).latency

    device = arena.device
    pieces = (*work.parts, InTurn(device, work.parts))
    seconds = [latency(piece) for piece in pieces]
    for _ in range(TRIES - 1):
        if abs(seconds[-1] - sum(seconds[:-1])) <= AGREE * sum(seconds[:-1]):
            break
        # What others do on the link makes a reading longer, never shorter.
        seconds = [
            min(before, latency(piece)) for before, piece in zip(seconds, pieces, strict=True)
        ]
    measured = list(zip(work.parts, seconds, strict=False))
    return Overlap(
        parts=tuple(Part(part.name, alone) for part, alone in measured),
        sequential=seconds[-1],
        bound=bound_of(device, [(part.engines, alone) for part, alone in measured]),
        streams=work.streams,
        chunks=work.chunks if isinstance(work, StagedCopy) else None,
    )


def with_overlap(
    conductor: Conductor, work: Work, measured: Measurement, plan: Plan, *, arena: Arena, name: str
) -> Measurement:
    """The measurement of work with its parts, where it overlaps some. While the link is disturbed the work is measured again, `TRIES` times
    at most, and the shortest latency counts: what others do on the link makes it longer, never shorter."""
    overlap = overlap_of(conductor, work, plan, arena=arena, name=name)
    if overlap is None:
        return measured
    for _ in range(TRIES - 1):
        if not _disturbed(measured, overlap):
            break
        again = conductor.measure(
            work_target(work, arena), plan, arena=arena, label=measured.label, name=name
        )
        if again.latency < measured.latency:
            measured = replace(again, what_ran=measured.what_ran, migrations=measured.migrations)
    return replace(
        measured, overlap=overlap, notes=(*measured.notes, overlap_note(overlap, measured.latency))
    )


def _disturbed(measured: Measurement, overlap: Overlap) -> bool:
    """True if the samples of overlapping work lie far apart, or it takes longer than its bound or estimate: others may also use the link
    evenly. (On an H100 all samples of a copy beside a kernel read 1.43 ms, 16 % above the bound, in one of three runs.)"""
    low, middle, high = np.quantile(measured.samples, (0.25, 0.5, 0.75))
    return bool(
        high - low > AGREE * middle
        or measured.latency > (1 + AGREE) * (overlap.estimate or overlap.bound)
    )


def overlap_note(overlap: Overlap, latency: float) -> str:
    """One sentence for a reader: the hidden share, the bound, and the text's estimate."""
    parts = ", ".join(f"{part.name} {format_time(part.seconds)}" for part in overlap.parts)
    hidden = overlap.hidden(latency)
    share = (
        "there is nothing to hide"
        if hidden is None
        else f"hides {format_share(hidden)} of what overlap can hide"
    )
    estimate = (
        "" if overlap.estimate is None else f", the text's estimate {format_time(overlap.estimate)}"
    )
    return f"{share}: in turn {format_time(overlap.sequential)}, bound {format_time(overlap.bound)}{estimate}; alone: {parts}"
