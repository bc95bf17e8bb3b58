"""The limits of a measurement by itself: a rule each, and the peak that no bandwidth exceeds.

A latency, bandwidth or overlap on the right side of its limit is PASS. On the wrong side it is FAIL
if it lies further away than a repetition in another session may (99 %, one-sided: the margin), else
UNDECIDED. Counts of pages and of steps are exact. `faster_than` compares two measurements of a
test; it holds where the factor exceeds the margin of a repetition (99 %), else it fails the test.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from pytest_gpumem.judging.finding import Check, basis, check_of
from pytest_gpumem.judging.spread import repetition_margin
from pytest_gpumem.limits import BASE, LIMITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
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

L2_MULTIPLES = 4  # footprint over L2 from which on bytes must come from DRAM


def no_share_of_peak(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """Return why a share of the device's DRAM peak means nothing; None if it means something."""
    if measurement.moved_bytes is None:
        return "its traffic is unknown (give `moved=`)"
    if measurement.moved_bytes.link:
        return "its bytes cross the host link, not the memory bus"
    if measurement.mode == "hot":
        return "in hot mode L2 serves what it can"
    if measurement.footprint is None:
        return "its footprint is unknown"
    if measurement.footprint < L2_MULTIPLES * facts.l2_bytes:
        least = short_bytes(L2_MULTIPLES * facts.l2_bytes)
        return f"its footprint is below {least}, {L2_MULTIPLES} x L2"
    if not facts.dram_peak:
        return "the peak is unknown (the driver reports no memory clock or no bus width)"
    return None


def share_of_peak(measurement: Measurement, facts: DeviceFacts) -> float | None:
    """Return bandwidth over the DRAM peak, or None where `no_share_of_peak` has a reason."""
    if measurement.bandwidth is None or no_share_of_peak(measurement, facts) is not None:
        return None
    return measurement.bandwidth / facts.dram_peak


def _beside(
    check: Check,
    measurement: Measurement,
    figure: str,
    limit: str,
    ratio: float,
    distance: float,
    sides: tuple[str, str],
    scale: float = 1.0,
) -> LimitResult:
    """Compare a figure with its limit; `scale`: change of the figure for one of the latency."""
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
    return _beside(check, measurement, format_time(latency), limit, ratio, ratio - 1, sides)


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
    return _beside(check, measurement, figure, limit, least / bandwidth, distance, sides)


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
    return _beside(check, measurement, figure, check.limit, ratio, distance, sides, scale)


def _faster_than(
    check: Check, measurement: Measurement, siblings: Mapping[str, Measurement]
) -> LimitResult | None:
    by, label = parse_claim(check.written)
    if measurement.label == label:
        return None  # a marker's claim is about the other measurements of the test
    other = siblings.get(label)
    if other is None:
        others = [repr(known) for known in siblings if known not in ("", measurement.label)]
        why = f"no measurement of the test is called {label!r}; others are "
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
    if high < by:
        return check.finding(Outcome.FAIL, f"{times} does not hold")
    return check.finding(Outcome.FAIL, f"{times} is not beyond doubt")


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
EXACT = tuple(COUNTS)
STEPS = ("max_kernels", "max_copies", "max_copied_bytes", "max_waits", "max_spill")
"""Limits on what a launch runs. They are exact, and hold on a GPU that others use too."""


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


def relative(limits: Limits) -> list[str]:
    """Return the limits on exact counts that are "base"."""
    return [name for name in EXACT if getattr(limits, name) == BASE]


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
