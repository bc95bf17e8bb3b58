"""The limits of a measurement by itself: a rule each, and the peak that no bandwidth exceeds.

A latency, bandwidth or overlap on the right side of its limit is PASS. On the wrong side it is FAIL
if it lies further away than a repetition in another session may (99 %, one-sided: the margin), else
UNDECIDED. Counts of pages and of steps are exact. `faster_than` compares two measurements of one
test; it holds where the factor exceeds the margin of a repetition (99 %), else it fails the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.judging.finding import Finding, against_most, basis, counted, find, of_limit
from pytest_gpumem.judging.spread import repetition_margin
from pytest_gpumem.judging.traffic import no_share_text
from pytest_gpumem.limits import BASE, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.what_ran import WhatRan
from pytest_gpumem.units import (
    Share,
    format_rate,
    format_share,
    format_time,
    parse_claim,
    parse_rate,
    parse_share,
    parse_time,
    short_bytes,
)

BASELINE = "the baseline"


@dataclass(frozen=True)
class LimitCheck:
    """A limit and the measurement that it applies to."""

    measurement: Measurement
    name: str  # the limit's name
    written: str  # the limit, as written
    origin: str
    facts: DeviceFacts
    siblings: Mapping[str, Measurement]  # the measurements of its test by label
    past: Sequence[Measurement] = ()  # the saved runs that it is compared with
    of: str = BASELINE  # what these runs are, in words

    @property
    def limit(self) -> str:
        """The limit in words: "max_waits 0 (marker)"."""
        return f"{self.name} {self.written} ({self.origin})"

    def not_judged(self, why: str) -> Finding:
        """Return the FAIL of a limit that this measurement can never meet."""
        return find(Outcome.FAIL, "not judged", limit=self.limit, why=why)


Rule = Callable[[LimitCheck], "Finding | None"]


def _beside(
    check: LimitCheck,
    figure: str,
    limit: str,
    ratio: float,
    of_limit: float,
    sides: tuple[str, str],
    scale: float = 1.0,
) -> Finding:
    """Compare a figure with its limit.

    `ratio`: measured latency over the longest allowed.
    `of_limit`: the figure over the limit, as they are printed.
    `sides`: the words of the wrong and of the right side.
    `scale`: change of the figure, as a share of the limit, for a change of the latency as a share.
    """
    margin = repetition_margin(check.measurement)
    wrong = ratio > 1
    words = {
        "figure": figure,
        "limit": limit,
        "side": sides[0] if wrong else sides[1],
        "distance": format_share(abs(of_limit - 1)),
        "margin": format_share(math.expm1(margin) * scale),
        "basis": basis(check.measurement),
    }
    if not wrong:
        return find(Outcome.PASS, "beside", None, **words)
    if math.log(ratio) <= margin:
        return find(Outcome.UNDECIDED, "too close", Code.NOISY, **words)
    return find(Outcome.FAIL, "beside", None, **words)


def _max_latency(check: LimitCheck) -> Finding:
    longest, latency = parse_time(check.written), check.measurement.latency
    name = f"max_latency {format_time(longest)} ({check.origin})"
    ratio = latency / longest
    return _beside(check, format_time(latency), name, ratio, ratio, ("above", "below"))


def _min_bandwidth(check: LimitCheck) -> Finding:
    least, bandwidth = parse_rate(check.written), check.measurement.bandwidth
    if bandwidth is None:
        return check.not_judged("the traffic is unknown (give `moved=`)")
    if not bandwidth:
        return check.not_judged("a launch moves no bytes")
    origin = check.origin
    if isinstance(least, Share):
        why = no_share_text(check.measurement, check.facts)
        if why is not None:
            return check.not_judged(f'{why}; give a rate such as "900 GB/s"')
        least = least.value * check.facts.dram_peak
        origin = f"{check.written}, {origin}"
    name = f"min_bandwidth {format_rate(least)} ({origin})"
    figure = format_rate(bandwidth)
    return _beside(check, figure, name, least / bandwidth, bandwidth / least, ("below", "above"))


def _min_overlap(check: LimitCheck) -> Finding:
    measurement, overlap = check.measurement, check.measurement.overlap
    if overlap is None:
        if measurement.profiled:
            return check.not_judged("a profiler is attached")
        return check.not_judged("nothing overlaps in it (measure staged_copy or gpu_work.together)")
    hideable, hidden = overlap.hideable, overlap.hidden(measurement.latency)
    if hideable is None or hidden is None:
        rest = f"{format_time(overlap.sequential)} in turn, {format_time(overlap.bound)} at best"
        return check.not_judged(f"there is nothing to hide, {rest}")
    least = parse_share(check.written)
    ratio = measurement.latency / (overlap.sequential - least * hideable)
    scale = measurement.latency / (hideable * least)
    figure = f"{format_share(hidden)} of what overlap can hide"
    return _beside(check, figure, check.limit, ratio, hidden / least, ("below", "above"), scale)


def _faster_than(check: LimitCheck) -> Finding | None:
    measurement, (by, label) = check.measurement, parse_claim(check.written)
    if measurement.label == label:
        return None  # a marker's claim is about the other measurements of the test
    name = f"faster_than {by:g} x {label} ({check.origin})"
    other = check.siblings.get(label)
    if other is None:
        others = [repr(known) for known in check.siblings if known not in ("", measurement.label)]
        known = ", ".join(others) or "none"
        why = f"the test has no measurement labelled {label!r}; others are {known}"
        return find(Outcome.FAIL, "not judged", limit=name, why=why)
    ratio = math.log(other.latency / measurement.latency)
    reach = math.hypot(repetition_margin(measurement), repetition_margin(other))
    low, high = math.exp(ratio - reach), math.exp(ratio + reach)
    times = (
        f"{format_time(measurement.latency)} against {format_time(other.latency)} of {label} is "
        f"{math.exp(ratio):.4g} times as fast, between {low:.4g} and {high:.4g}, "
        f"{basis(measurement)}"
    )
    if low > by:
        return find(Outcome.PASS, "beats", times=times, limit=name)
    form = "does not beat" if high < by else "may not beat"
    return find(Outcome.FAIL, form, times=times, limit=name)


# Exact counts of one launch


def _count(check: LimitCheck) -> Finding:
    """The rule of a limit on an exact count. `BASE` is the greatest count of the saved runs."""
    count = COUNTS[check.name](check.measurement)
    if isinstance(count, str):
        code = Code.CONDITIONS
        return find(Outcome.UNDECIDED, "not counted", code, limit=check.limit, why=count)
    figure = _count_text(check.name, count)
    if check.name == "max_migrated":
        figure += _causes(check.measurement)
    if check.written != BASE:
        return against_most(check.limit, count, count_of(check.written), figure)
    known = []
    for run in check.past:
        then = COUNTS[check.name](run)
        if not isinstance(then, str):
            known.append(then)
    if not known:
        why = f"no run of {check.of} has this count"
        return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=check.limit, why=why)
    most = max(known)
    figure = f"{figure}, {_count_text(check.name, most)} in {check.of}"
    return against_most(check.limit, count, most, figure)


def _count_text(name: str, count: int) -> str:
    if name == "max_gpu_page_faults":
        return f"{counted(count, 'page fault')} of the GPU in one launch"
    if name == "max_migrated":
        return f"{short_bytes(count)} migrated in one launch"
    if name == "max_kernels":
        return f"{counted(count, 'kernel')} in one launch"
    if name == "max_copies":
        return f"{count} {'copy' if count == 1 else 'copies'} in one launch"
    if name == "max_copied_bytes":
        return f"{short_bytes(count)} copied in one launch"
    if name == "max_waits":
        return f"the host waits {counted(count, 'time')} in one launch"
    return f"{short_bytes(count)} of local memory of a thread"


def _causes(measurement: Measurement) -> str:
    if measurement.migrations is None or measurement.migrations.launch is None:
        return ""
    causes = []
    for cause, nbytes in measurement.migrations.launch.causes.items():
        if nbytes:
            causes.append(f"{cause} {short_bytes(nbytes)}")
    return f" ({', '.join(causes)})" if causes else ""


def _of_pages(figure: str) -> Callable[[Measurement], int | str]:
    def count(measurement: Measurement) -> int | str:
        pages = measurement.migrations
        if pages is None:
            return "no counting pass was taken"
        if pages.launch is None:
            return str(pages.not_counted)
        value: int = getattr(pages.launch, figure)
        return value

    return count


def _of_steps(figure: str) -> Callable[[Measurement], int | str]:
    def count(measurement: Measurement) -> int | str:
        ran: WhatRan | None = measurement.what_ran
        if ran is not None and ran.order:
            value: int = getattr(ran, figure)
            return value
        if ran is not None and ran.not_watched:
            return ran.not_watched
        return "no launch was watched"

    return count


COUNTS: Mapping[str, Callable[[Measurement], int | str]] = {
    "max_gpu_page_faults": _of_pages("gpu_faults"),
    "max_migrated": _of_pages("migrated"),
    "max_kernels": _of_steps("kernels"),
    "max_copies": _of_steps("copies"),
    "max_copied_bytes": _of_steps("copied_bytes"),
    "max_waits": _of_steps("waits"),
    "max_spill": _of_steps("spill"),
}
"""By limit, the exact count of one launch that it is on, or why there is none."""
STEPS = ("max_kernels", "max_copies", "max_copied_bytes", "max_waits", "max_spill")
"""Limits on what one launch runs. They are exact, and hold on a GPU that others use too."""
EXACT = tuple(COUNTS)
"""Limits on exact counts of one launch."""
RULES: Mapping[str, Rule] = {
    "max_latency": _max_latency,
    "min_bandwidth": _min_bandwidth,
    "min_overlap": _min_overlap,
    "faster_than": _faster_than,
    **dict.fromkeys(EXACT, _count),
}
"""By the limit's name. `judge` compares `max_regression` with the baseline."""


def counts_steps(limits: Limits) -> bool:
    """True if a limit is on what one launch runs."""
    return any(getattr(limits, name) is not None for name in STEPS)


def relative(limits: Limits) -> list[str]:
    """Return the limits that compare an exact figure with base's: a count, or the peak."""
    names = [name for name in EXACT if getattr(limits, name) == BASE]
    if limits.max_peak_regression is not None:
        names.append("max_peak_regression")
    return names


def absolute(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    siblings: Mapping[str, Measurement] | None = None,
    past: Sequence[Measurement] = (),
    names: Collection[str] = tuple(RULES),
    of: str = BASELINE,
) -> Iterator[Finding]:
    """Yield a finding for each limit that is set and among `names`.

    `of`: what the runs of `past` are, in words.
    Raises `QuantityError`: a limit that cannot be read.
    """
    for name in names:
        written = getattr(limits, name)
        if written is None:
            continue
        origin = limits.origin.get(name, "limit")
        check = LimitCheck(measurement, name, written, origin, facts, siblings or {}, past, of)
        finding = RULES[name](check)
        if finding is not None:
            yield of_limit(name, finding)


def physical(measurement: Measurement, facts: DeviceFacts) -> Iterator[Finding]:
    """Yield a FAIL for a bandwidth above the DRAM peak that L2 cannot explain."""
    traffic, bandwidth = measurement.moved_bytes, measurement.bandwidth
    if traffic is None or not bandwidth or measurement.no_share_of_peak(facts) is not None:
        return
    # When a launch ends, up to a whole L2 of its writes has not reached DRAM.
    writes = traffic.writes if traffic.declared is None else traffic.declared
    unwritten = min(facts.l2_bytes, writes)
    if bandwidth * (1 - unwritten / traffic.total) > facts.dram_peak:
        rate, peak = format_rate(bandwidth), format_rate(facts.dram_peak)
        yield find(Outcome.FAIL, "beyond the peak", bandwidth=rate, peak=peak)
