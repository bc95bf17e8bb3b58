"""Judges a measurement by itself: whether it can be judged, and each of its limits. Pure.

A latency, bandwidth or overlap on the right side of its limit is PASS. On the wrong side it is FAIL
beyond the margin, else UNDECIDED. The margin is how far a repetition in another session may lie
(99 %, one-sided). Counts of pages and of steps are exact. `faster_than` compares two measurements
of a test: it passes where the factor holds beyond the margin of both, else it is FAIL.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_gpumem.judging.finding import Check, basis, check_of, no_share_of_peak
from pytest_gpumem.limits import BASE, EXACT, LIMITS, STEPS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import FARTHEST
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, quantile
from pytest_gpumem.records.row import LimitResult
from pytest_gpumem.units import (
    counted,
    format_rate,
    format_share,
    format_time,
    parse_claim,
    parse_rate,
    parse_share,
    parse_time,
    short_bytes,
)

BETWEEN_PROCESSES = (27.5e-9, 0.0004)
"""Spread between processes, in seconds and as a share; recorded on an H200, 2026-11-21."""
BETWEEN_PLACEMENTS = (50e-9, 0.0017)
"""Spread between placements; recorded at that time."""
BETWEEN_DAYS = (13.5e-9, 0.0004)
"""Spread between days and between cards; recorded on H200s at that time."""
LAUNCH_OVERHEAD = 60e-9
"""Spread of the launch overhead between processes, in seconds; recorded at that time."""
PRIOR = 6
"""Degrees of freedom of an expected variance (d0 of Smyth 2004); recorded: 4 to 13."""
REPETITION = 0.99
"""Probability that a repetition in another session shows the same side of a limit; choice."""
NOTHING_RAN = 1.5
"""Latency over `floor` up to which nothing ran between two events."""
BUSY = 0.25
"""Share of the looks at which other work may keep the device busy; choice."""
WIDEST = 0.5
"""Largest half-width of a latency's 95 % interval, as a share of the latency; choice."""


# Whether it can be judged


def unreliable(measurement: Measurement) -> Iterator[str]:
    """Yield why a measurement cannot be judged."""
    yield from conditions(measurement)
    yield from doubts(measurement)


def conditions(measurement: Measurement) -> Iterator[str]:
    """Yield the conditions of the machine that forbid a judgement."""
    if measurement.profiled:
        yield "a profiler was attached"
    last = measurement.conditions[1]  # samples throttled earlier were discarded
    if last.throttle_reasons:
        clock = ""
        if last.sm_clock_hz is not None:
            clock = f" at {last.sm_clock_hz / 1e6:.0f} MHz"
        yield f"throttled at the last samples ({', '.join(last.throttle_reasons)}{clock})"
    during = measurement.during
    if measurement.discarded >= len(measurement.samples):
        reasons = "" if during is None else f" ({', '.join(during.throttle_reasons or ())})"
        taken = counted(measurement.discarded, "sample")
        yield f"{taken} taken under throttling{reasons}, {len(measurement.samples)} left"
    others = [seen.other_processes or 0 for seen in measurement.conditions]
    if during is not None:
        others.append(during.other_processes or 0)
    if max(others):
        yield f"{counted(max(others), 'other process')} on the device"
    if measurement.launches_wait:
        yield "CUDA_LAUNCH_BLOCKING is set, so that every launch waits for the device"
    if measurement.busy > BUSY:
        busy = format_share(measurement.busy)
        yield f"other work kept the device busy at {busy} of the looks between the samples"


def doubts(measurement: Measurement) -> Iterator[str]:
    """Yield why a measured time may not be that of the work."""
    if not measurement.work_seen:
        yield "no work was seen on the timed stream: the time may be the host's alone"
    if measurement.latency <= NOTHING_RAN * measurement.floor:
        yield (
            f"{format_time(measurement.latency)} is hardly longer than two events with nothing "
            f"between ({format_time(measurement.floor)}), as if nothing was launched on the timed "
            "stream"
        )


def too_wide(measurement: Measurement) -> LimitResult | None:
    """Return the finding about a latency that is hardly known."""
    noise = measurement.noise
    if noise is None or noise <= WIDEST:
        return None
    reason = (
        f"the 95 % interval is ± {format_share(noise)} of the latency, {basis(measurement)}: "
        "too wide to pass; measure more placements"
    )
    return LimitResult("", Outcome.UNDECIDED, Code.NOISY, reason)


def share_of(spread: tuple[float, float], latency: float) -> float:
    """Return a spread as a share of a latency in seconds, above 0."""
    time, share = spread
    return math.hypot(time / latency, share)


def repetition_margin(measurement: Measurement) -> float:
    """Return the log-ratio by which a repetition in another session may differ (99 %, one-sided).

    The expected variance between placements is moderated by the measured variance (Smyth 2004,
    "Linear models and empirical Bayes methods", eq. 3).
    """
    medians = measurement.counting
    latency = statistics.fmean(medians)
    logs = [math.log(median) for median in medians]
    mean = math.fsum(logs) / len(logs)
    squares = math.fsum((value - mean) ** 2 for value in logs)
    freedom = len(logs) - 1
    expected = share_of(BETWEEN_PLACEMENTS, latency)
    placement = (PRIOR * expected**2 + squares) / (PRIOR + freedom)
    if freedom > 1:  # never below the measured variance
        placement = max(placement, squares / freedom)
    deviation = math.hypot(
        share_of(BETWEEN_PROCESSES, latency),
        math.sqrt(placement / len(logs)),
        share_of(BETWEEN_DAYS, latency),
    )
    # The overhead is part of the latency, unless it is known and subtracted, or launches share it.
    if measurement.overhead is None and measurement.sampler not in ("graph", "batched"):
        deviation = math.hypot(deviation, LAUNCH_OVERHEAD / latency)
    return min(quantile(REPETITION, PRIOR) * deviation, FARTHEST)


def _compare(
    check: Check,
    measurement: Measurement,
    figure: str,
    limit: str,
    ratio: float,
    distance: float,
    sides: tuple[str, str],
    scale: float = 1.0,
) -> LimitResult:
    """Compare a figure with its limit. `ratio`: above 1 on the wrong side. `scale`: from a
    relative change of the latency to that of the figure."""
    margin = repetition_margin(measurement)
    reason = (
        f"{figure} is {sides[0] if ratio > 1 else sides[1]} {limit} by "
        f"{format_share(abs(distance))}, margin {format_share(math.expm1(margin) * scale)}, "
        f"{basis(measurement)}"
    )
    if ratio <= 1:
        return check.finding(Outcome.PASS, reason)
    if math.log(ratio) <= margin:
        return check.finding(Outcome.UNDECIDED, f"{reason}: too close to call", Code.NOISY)
    return check.finding(Outcome.FAIL, reason)


def _max_latency(check: Check, measurement: Measurement) -> LimitResult:
    longest, latency = parse_time(check.written), measurement.latency
    limit = f"max_latency {format_time(longest)} ({check.origin})"
    ratio, sides = latency / longest, ("above", "below")
    return _compare(check, measurement, format_time(latency), limit, ratio, ratio - 1, sides)


def _min_bandwidth(check: Check, measurement: Measurement, facts: DeviceFacts) -> LimitResult:
    (least, of_peak), bandwidth = parse_rate(check.written), measurement.bandwidth
    if bandwidth is None:
        return check.never("the traffic is unknown (give `moved=`)")
    if not bandwidth:
        return check.never("a launch moves no bytes")
    origin = check.origin
    if of_peak:
        why = no_share_of_peak(measurement, facts)
        if why is not None:
            if measurement.footprint is not None:
                why += f" (footprint {short_bytes(measurement.footprint)})"
            return check.never(f'{why}; give a rate such as "900 GB/s"')
        least *= facts.dram_peak
        origin = f"{check.written}, {origin}"
    limit = f"min_bandwidth {format_rate(least)} ({origin})"
    figure, distance = format_rate(bandwidth), bandwidth / least - 1
    sides = ("below", "above")
    return _compare(check, measurement, figure, limit, least / bandwidth, distance, sides)


def _min_overlap(check: Check, measurement: Measurement) -> LimitResult:
    overlap = measurement.overlap
    if overlap is None:
        if measurement.profiled:
            return check.never("a profiler is attached")
        return check.never("nothing overlaps in it (measure staged_copy or gpu_work.together)")
    hideable, hidden = overlap.hideable, overlap.hidden(measurement.latency)
    if hideable is None or hidden is None:
        rest = f"{format_time(overlap.sequential)} in turn, {format_time(overlap.bound)} at best"
        return check.never(f"there is nothing to hide, {rest}")
    least = parse_share(check.written)
    ratio = measurement.latency / (overlap.sequential - least * hideable)
    scale = measurement.latency / (hideable * least)
    figure = f"{format_share(hidden)} of what overlap can hide"
    distance, sides = hidden / least - 1, ("below", "above")
    return _compare(check, measurement, figure, check.limit, ratio, distance, sides, scale)


def _faster_than(
    check: Check, measurement: Measurement, siblings: Mapping[str, Measurement]
) -> LimitResult | None:
    by, label = parse_claim(check.written)
    if measurement.label == label:
        return None  # a marker's claim is about the other measurements of the test
    other = siblings.get(label)
    if other is None:
        others = [repr(known) for known in siblings if known not in ("", measurement.label)]
        why = f'the test has no measurement {label!r} (a factor: "20 x LABEL"); others are '
        return check.never(why + (", ".join(others) or "none"))
    ratio = math.log(other.latency / measurement.latency)
    reach = math.hypot(repetition_margin(measurement), repetition_margin(other))
    low, high = math.exp(ratio - reach), math.exp(ratio + reach)
    times = (
        f"{format_time(measurement.latency)} against {format_time(other.latency)} of {label} is "
        f"{math.exp(ratio):.4g} times as fast, between {low:.4g} and {high:.4g}, "
        f"{basis(measurement)}: faster_than {by:g} x {label} ({check.origin})"
    )
    if low > by:
        return check.finding(Outcome.PASS, f"{times} holds")
    why = "does not hold" if high < by else "is not beyond doubt"
    return check.finding(Outcome.FAIL, f"{times} {why}")


# Exact counts of a launch

COUNTS: Mapping[str, tuple[str, str]] = {
    "max_gpu_page_faults": ("gpu_faults", "GPU page fault"),
    "max_migrated": ("migrated", "migrated"),
    "max_kernels": ("kernels", "kernel"),
    "max_copies": ("copies", "copy"),
    "max_copied_bytes": ("copied_bytes", "copied"),
    "max_waits": ("waits", "host wait"),
    "max_spill": ("spill", "of local memory of a thread"),
}
"""Limits on exact counts of a launch: the field of `PageCounts` or `WhatRan`, and its word."""


def exact_count(measurement: Measurement, name: str) -> int | str:
    """Return the count that a limit is on, or why there is none. `name`: of the limit."""
    if name in STEPS:
        ran = measurement.what_ran
        if ran is not None and ran.order:
            count: int = getattr(ran, COUNTS[name][0])
            return count
        return (ran.not_watched if ran is not None else None) or "no launch was watched"
    if measurement.migrations is None:
        return "no counting pass was taken"
    if measurement.pages is None:
        return str(measurement.migrations.not_counted)
    of_pages: int = getattr(measurement.pages, COUNTS[name][0])
    return of_pages


def judge_count(
    check: Check, measurement: Measurement, past: Sequence[Measurement], of: str
) -> LimitResult:
    """Compare a count with a number, or with runs of `of` in words, such as "the baseline"."""
    count = exact_count(measurement, check.name)
    if isinstance(count, str):
        return check.not_judged(count, Code.CONDITIONS)
    figure = _count_text(check.name, count)
    if check.name == "max_migrated" and measurement.pages is not None:
        causes = measurement.pages.causes.items()
        parts = [f"{cause} {short_bytes(nbytes)}" for cause, nbytes in causes if nbytes]
        figure += f" ({', '.join(parts)})" if parts else ""
    counts = []
    for run in past:
        then = exact_count(run, check.name)
        if not isinstance(then, str):
            counts.append(then)
    if counts and check.written == BASE:
        figure += f", {_count_text(check.name, max(counts))} in {of}"
    return check.of_count(count, figure, counts, f"no run of {of} has this count")


def _count_text(name: str, count: int) -> str:
    word = COUNTS[name][1]
    if LIMITS[name].metavar == "BYTES":
        return f"{short_bytes(count)} {word} in a launch"
    return f"{counted(count, word)} in a launch"


JUDGED = ("max_latency", "min_bandwidth", "min_overlap", "faster_than", *EXACT)
"""Limits on a measurement by itself."""


def counts_steps(limits: Limits) -> bool:
    return any(getattr(limits, name) is not None for name in STEPS)


def absolute(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    siblings: Mapping[str, Measurement] | None = None,
    past: Sequence[Measurement] = (),
    names: Collection[str] = JUDGED,
) -> Iterator[LimitResult]:
    """Yield a finding for each limit that is set and among `names`.

    `past`: saved runs, which counts limited by "base" are compared with.
    """
    for name in names:
        check = check_of(limits, name)
        if check is None:
            continue
        finding: LimitResult | None
        if name == "max_latency":
            finding = _max_latency(check, measurement)
        elif name == "min_bandwidth":
            finding = _min_bandwidth(check, measurement, facts)
        elif name == "min_overlap":
            finding = _min_overlap(check, measurement)
        elif name == "faster_than":
            finding = _faster_than(check, measurement, siblings or {})
        else:
            finding = judge_count(check, measurement, past, "the baseline")
        if finding is not None:
            yield finding


def physical(measurement: Measurement, facts: DeviceFacts) -> Iterator[LimitResult]:
    """Yield a FAIL for a bandwidth above the DRAM peak that L2 cannot explain."""
    traffic, bandwidth = measurement.moved_bytes, measurement.bandwidth
    if traffic is None or not bandwidth or no_share_of_peak(measurement, facts) is not None:
        return
    # When a launch ends, up to a whole L2 of its writes has not reached DRAM.
    writes = traffic.writes if traffic.declared is None else traffic.declared
    unwritten = min(facts.l2_bytes, writes)
    if bandwidth * (1 - unwritten / traffic.total) > facts.dram_peak:
        rate, peak = format_rate(bandwidth), format_rate(facts.dram_peak)
        reason = f"the declared traffic is wrong: {rate} is above the device's peak of {peak}"
        yield LimitResult("", Outcome.FAIL, None, reason)
