"""The limits of a measurement by itself: a rule each, and the peak that no bandwidth exceeds.

A latency, bandwidth or overlap on the right side of its limit is PASS. On the wrong side it is FAIL if it lies further away than a
repetition in another session may (99 %, one-sided: the margin), else UNDECIDED. Counts of pages and of steps are exact. `faster_than`
compares two measurements of one test; it holds where the factor exceeds the margin of a repetition (99 %), else it fails the test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.judging.finding import Finding, against_most, basis, counted, find, of_limit
from pytest_gpumem.judging.screen import POWER
from pytest_gpumem.judging.spread import of_repetition
from pytest_gpumem.judging.traffic import no_share_text
from pytest_gpumem.limits import BASE, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.migrations import PageCounts
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
class _LimitCheck:
    """A limit and the measurement that it applies to."""

    measurement: Measurement
    name: str  # the limit's name
    written: str  # the limit, as written
    origin: str
    facts: DeviceFacts
    siblings: Mapping[str, Measurement]  # the measurements of its test by label
    past: Sequence[Measurement] = ()  # the saved runs that it is compared with, oldest first
    of: str = BASELINE  # what these runs are, in words

    @property
    def limit(self) -> str:
        """ "max_waits 0 (marker)"."""
        return f"{self.name} {self.written} ({self.origin})"

    def not_counted(self, why: str) -> Finding:
        return find(Outcome.UNDECIDED, "not counted", Code.CONDITIONS, limit=self.limit, why=why)

    def not_judged(self, why: str) -> Finding:
        return find(Outcome.FAIL, "not judged", limit=self.limit, why=why)

    def beside(
        self,
        figure: str,
        limit: str,
        ratio: float,
        of_limit: float,
        wrong: str,
        right: str,
        *,
        scale: float = 1.0,
    ) -> Finding:
        """Compare.
        `ratio`: measured latency over the longest allowed one.
        `of_limit`: the figure over the limit, as they are printed.
        `scale`: change of the figure, as a share of the limit, for a change of the latency, as a share of it.
        """
        margin = of_repetition(self.measurement).reach(POWER)
        words = {
            "figure": figure,
            "limit": limit,
            "side": wrong if ratio > 1 else right,
            "distance": format_share(abs(of_limit - 1)),
        }
        words |= {
            "margin": format_share(math.expm1(margin) * scale),
            "basis": basis(self.measurement),
        }
        if ratio > 1 and math.log(ratio) <= margin:
            return find(Outcome.UNDECIDED, "too close", Code.NOISY, **words)
        return find(Outcome.FAIL if ratio > 1 else Outcome.PASS, "beside", None, **words)


def _max_latency(one: _LimitCheck) -> Finding:
    longest = parse_time(one.written)
    name, latency = f"max_latency {format_time(longest)} ({one.origin})", one.measurement.latency
    return one.beside(
        format_time(latency), name, latency / longest, latency / longest, "above", "below"
    )


def _min_bandwidth(one: _LimitCheck) -> Finding:
    least, bandwidth = parse_rate(one.written), one.measurement.bandwidth
    if not bandwidth:
        return one.not_judged(
            "the traffic is unknown (give `moved=`)"
            if bandwidth is None
            else "a launch moves no bytes"
        )
    origin = one.origin
    if isinstance(least, Share):
        if (why := no_share_text(one.measurement, one.facts)) is not None:
            return one.not_judged(f'{why}; give a rate such as "900 GB/s"')
        least = least.value * one.facts.dram_peak
        origin = f"{one.written}, {origin}"
    name = f"min_bandwidth {format_rate(least)} ({origin})"
    return one.beside(
        format_rate(bandwidth), name, least / bandwidth, bandwidth / least, "below", "above"
    )


def _min_overlap(one: _LimitCheck) -> Finding:
    measurement, overlap = one.measurement, one.measurement.overlap
    if overlap is None:
        nothing = "nothing overlaps in it (measure staged_copy or gpu_work.together)"
        return one.not_judged("a profiler is attached" if measurement.profiled else nothing)
    hideable, hidden = overlap.hideable, overlap.hidden(measurement.latency)
    if hideable is None or hidden is None:
        rest = f"{format_time(overlap.sequential)} in turn, {format_time(overlap.bound)} at best"
        return one.not_judged(f"there is nothing to hide, {rest}")
    least = parse_share(one.written)
    ratio, scale = (
        measurement.latency / (overlap.sequential - least * hideable),
        measurement.latency / (hideable * least),
    )
    return one.beside(
        f"{format_share(hidden)} of what overlap can hide",
        one.limit,
        ratio,
        hidden / least,
        "below",
        "above",
        scale=scale,
    )


def _faster_than(one: _LimitCheck) -> Finding | None:
    measurement, (by, label) = one.measurement, parse_claim(one.written)
    if measurement.label == label:
        return None  # a marker's claim is about the other measurements of the test
    name, other = f"faster_than {by:g} x {label} ({one.origin})", one.siblings.get(label)
    if other is None:
        known = (
            ", ".join(repr(known) for known in one.siblings if known not in ("", measurement.label))
            or "none"
        )
        return find(
            Outcome.FAIL,
            "not judged",
            limit=name,
            why=f"the test has no measurement labelled {label!r}; others are {known}",
        )
    ratio = math.log(other.latency / measurement.latency)
    reach = (of_repetition(measurement) + of_repetition(other)).reach(POWER)
    low, high = math.exp(ratio - reach), math.exp(ratio + reach)
    times = (
        f"{format_time(measurement.latency)} against {format_time(other.latency)} of {label} is {math.exp(ratio):.4g} times as fast, "
        f"between {low:.4g} and {high:.4g}, {basis(measurement)}"
    )
    form = "beats" if low > by else "does not beat" if high < by else "may not beat"
    return find(Outcome.PASS if low > by else Outcome.FAIL, form, times=times, limit=name)


def _exact(
    count: Callable[[Measurement], int | str],
    words: Callable[[int], str],
    causes: Callable[[Measurement], str] = lambda measurement: "",
) -> Callable[[_LimitCheck], Finding]:
    """The rule of a limit on an exact count of one launch. `BASE` is the count of the newest saved run that has it.
    `count`: of a measurement, or why it has none.
    `causes`: what adds up to the count, in words.
    """

    def rule(one: _LimitCheck) -> Finding:
        if isinstance(found := count(one.measurement), str):
            return one.not_counted(found)
        figure = words(found) + causes(one.measurement)
        if one.written != BASE:
            return against_most(one.limit, found, count_of(one.written), figure)
        known = [then for past in one.past if not isinstance(then := count(past), str)]
        if not known:
            return find(
                Outcome.NEW,
                "no history",
                Code.NO_BASELINE,
                limit=one.limit,
                why=f"no run of {one.of} has this count",
            )
        return against_most(
            one.limit, found, known[-1], f"{figure}, {words(known[-1])} in {one.of}"
        )

    return rule


def _pages(count: Callable[[PageCounts], int]) -> Callable[[Measurement], int | str]:
    def of(measurement: Measurement) -> int | str:
        pages = measurement.migrations
        if pages is None or pages.launch is None:
            return str(pages.not_counted) if pages is not None else "no counting pass was taken"
        return count(pages.launch)

    return of


def _causes(measurement: Measurement) -> str:
    if measurement.migrations is None or measurement.migrations.launch is None:
        return ""
    causes = ", ".join(
        f"{cause} {short_bytes(nbytes)}"
        for cause, nbytes in measurement.migrations.launch.causes.items()
        if nbytes
    )
    return f" ({causes})" if causes else ""


def _watched(measurement: Measurement) -> WhatRan | str:
    """What one launch ran, or why no step of it is known."""
    ran = measurement.what_ran
    if ran is not None and ran.order:
        return ran
    return ran.not_watched if ran is not None and ran.not_watched else "no launch was watched"


def _steps(count: Callable[[WhatRan], int]) -> Callable[[Measurement], int | str]:
    def of(measurement: Measurement) -> int | str:
        return ran if isinstance(ran := _watched(measurement), str) else count(ran)

    return of


COUNTS: Mapping[str, Callable[[Measurement], int | str]] = {
    "max_gpu_page_faults": _pages(lambda pages: pages.gpu_faults),
    "max_migrated": _pages(lambda pages: pages.migrated),
    "max_kernels": _steps(lambda ran: ran.kernels),
    "max_copies": _steps(lambda ran: ran.copies),
    "max_copied_bytes": _steps(lambda ran: ran.copied_bytes),
    "max_waits": _steps(lambda ran: ran.waits),
    "max_spill": _steps(lambda ran: ran.spill),
}
"""By limit, the exact count of one launch that it is on, or why there is none."""

_STEP_WORDS: Mapping[str, Callable[[int], str]] = {
    "max_kernels": lambda count: f"{counted(count, 'kernel')} in one launch",
    "max_copies": lambda count: f"{count} {'copy' if count == 1 else 'copies'} in one launch",
    "max_copied_bytes": lambda count: f"{short_bytes(count)} copied in one launch",
    "max_waits": lambda count: f"the host waits {counted(count, 'time')} in one launch",
    "max_spill": lambda count: f"{short_bytes(count)} of local memory of a thread",
}
STEPS: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    name: _exact(COUNTS[name], words) for name, words in _STEP_WORDS.items()
}
"""Limits on what one launch runs, by name. They are exact, and hold on a GPU that others use too."""
EXACT: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    "max_gpu_page_faults": _exact(
        COUNTS["max_gpu_page_faults"],
        lambda count: f"{counted(count, 'page fault')} of the GPU in one launch",
    ),
    "max_migrated": _exact(
        COUNTS["max_migrated"],
        lambda count: f"{short_bytes(count)} migrated in one launch",
        _causes,
    ),
    **STEPS,
}
"""Limits on exact counts of one launch, by name."""


RULES: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    "max_latency": _max_latency,
    "min_bandwidth": _min_bandwidth,
    "min_overlap": _min_overlap,
    "faster_than": _faster_than,
    **EXACT,
}
"""By the limit's name. `judge` compares `max_regression` with the baseline."""


def counts_steps(limits: Limits) -> bool:
    """True if a limit is on what one launch runs."""
    return any(getattr(limits, name) is not None for name in STEPS)


def relative(limits: Limits) -> list[str]:
    """The limits that compare an exact figure with the base's: a count, or the peak of the memory."""
    names = [name for name in EXACT if getattr(limits, name) == BASE]
    return [*names, *(["max_peak_regression"] if limits.max_peak_regression is not None else [])]


def absolute(
    measurement: Measurement,
    limits: Limits,
    facts: DeviceFacts,
    siblings: Mapping[str, Measurement] | None = None,
    past: Sequence[Measurement] = (),
    names: Collection[str] = tuple(RULES),
    of: str = BASELINE,
) -> Iterator[Finding]:
    """One finding for each limit that is set and among `names`. Raises `QuantityError`: a limit that cannot be read.
    `of`: what the runs of `past` are, in words.
    """
    for name in names:
        if (written := getattr(limits, name)) is not None:
            finding = RULES[name](
                _LimitCheck(
                    measurement,
                    name,
                    written,
                    limits.origin.get(name, "limit"),
                    facts,
                    siblings or {},
                    past,
                    of,
                )
            )
            if finding is not None:
                yield of_limit(name, finding)


def physical(measurement: Measurement, facts: DeviceFacts) -> Iterator[Finding]:
    """A bandwidth above the DRAM peak, where L2 cannot explain it: fewer bytes moved than declared."""
    traffic, bandwidth = measurement.moved_bytes, measurement.bandwidth
    if traffic is None or not bandwidth or measurement.no_share_of_peak(facts) is not None:
        return
    # When a launch ends, up to a whole L2 of its writes has not reached DRAM.
    unwritten = min(
        facts.l2_bytes, traffic.writes if traffic.declared is None else traffic.declared
    )
    if bandwidth * (1 - unwritten / traffic.total) > facts.dram_peak:
        yield find(
            Outcome.FAIL,
            "beyond the peak",
            bandwidth=format_rate(bandwidth),
            peak=format_rate(facts.dram_peak),
        )
