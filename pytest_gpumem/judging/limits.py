"""The limits of a measurement by itself: a rule each, and the peak that no bandwidth exceeds.

A latency, bandwidth or overlap on the right side of its limit is PASS. On the wrong side it is FAIL if it lies further away than a
repetition in another session may (99 %, one-sided: the margin), else UNDECIDED. Counts of pages and of steps are exact. `faster_than`
compares two measurements of one test; it holds where the factor exceeds the margin of a repetition (99 %), else it fails the test.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from msgspec import UNSET

from pytest_gpumem.judging.finding import Finding, against_most, basis, counted, find, of_limit
from pytest_gpumem.judging.screen import POWER
from pytest_gpumem.judging.spread import of_repetition
from pytest_gpumem.judging.traffic import no_share_text
from pytest_gpumem.limits import count_of, over_baseline
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import DramBytes, Limits, Measurement
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.records.what_ran import StepKind, WhatRan
from pytest_gpumem.units import (
    Share,
    format_rate,
    format_share,
    format_time,
    parse_bytes,
    parse_claim,
    parse_rate,
    parse_share,
    parse_time,
    short_bytes,
)

BASELINE = "the baseline"
LONGEST_TEXT = 1000  # characters of `kernels_text`


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


def _max_host_time(one: _LimitCheck) -> Finding:
    """Without a margin: it is the machine's time, which other programs of the host change too."""
    longest, seconds = parse_time(one.written), one.measurement.host_time
    if seconds is UNSET:
        return one.not_counted(f"the sampler {one.measurement.sampler} queues no launch by itself")
    name = f"max_host_time {format_time(longest)} ({one.origin})"
    return against_most(
        name, seconds, longest, f"{format_time(seconds)} of the host to queue one launch"
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
    """The rule of a limit on an exact count of one launch. The limit may be relative to the newest saved run that has the count.
    `count`: of a measurement, or why it has none.
    `causes`: what adds up to the count, in words.
    """

    def rule(one: _LimitCheck) -> Finding:
        if isinstance(found := count(one.measurement), str):
            return one.not_counted(found)
        figure = words(found) + causes(one.measurement)
        if (growth := over_baseline(one.written)) is None:
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
            one.limit, found, growth.most(known[-1]), f"{figure}, {words(known[-1])} in {one.of}"
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


def _same_kernels(one: _LimitCheck) -> Finding:
    """Compare with the newest saved run whose kernels are known; NEW without one."""
    if isinstance(ran := _watched(one.measurement), str):
        return one.not_counted(ran)
    known = [earlier for past in one.past if not isinstance(earlier := _watched(past), str)]
    if not known:
        return find(
            Outcome.NEW,
            "no history",
            Code.NO_BASELINE,
            limit=one.limit,
            why=f"no run of {one.of} recorded its kernels",
        )
    then, now = (_shapes(each) for each in (known[-1], ran))
    if then == now:
        return find(Outcome.PASS, "same kernels", limit=one.limit, past=one.of)
    gone, came = (
        sorted({*map(_shape, then)} - {*map(_shape, now)}),
        sorted({*map(_shape, now)} - {*map(_shape, then)}),
    )
    changed = [
        f"{word} {', '.join(shapes)}"
        for word, shapes in (("no longer", gone), ("new", came))
        if shapes
    ]
    words = "; ".join(changed) or "their number or order has changed"
    return find(
        Outcome.FAIL,
        "other kernels",
        limit=one.limit,
        changed=words,
        past="" if one.of == BASELINE else f" against {one.of}",
    )


_Shape = tuple[
    str,
    tuple[int, int, int] | None,
    tuple[int, int, int] | None,
    tuple[int, int, int] | None,
    int | None,
]


def _shapes(ran: WhatRan) -> list[_Shape]:
    return [
        (step.name, step.grid, step.block, step.cluster, step.dynamic_shared)
        for step in ran.of(StepKind.KERNEL)
    ]


def _shape(shape: _Shape) -> str:
    name, grid, block, cluster, shared = shape
    parts = [f"{name} {'x'.join(map(str, grid or ()))} of {'x'.join(map(str, block or ()))}"]
    parts += [f"in clusters of {'x'.join(map(str, cluster))}"] if cluster else []
    return " ".join(
        [*parts, *([f"with {short_bytes(shared)} of dynamic shared memory"] if shared else [])]
    )


COUNTS: Mapping[str, Callable[[Measurement], int | str]] = {
    "max_gpu_page_faults": _pages(lambda pages: pages.gpu_faults),
    "max_migrated": _pages(lambda pages: pages.migrated),
    "max_kernels": _steps(lambda ran: ran.kernels),
    "max_copies": _steps(lambda ran: ran.copies),
    "max_copied_bytes": _steps(lambda ran: ran.copied_bytes),
    "max_waits": _steps(lambda ran: ran.waits),
    "max_registers": _steps(lambda ran: ran.registers),
    "max_spill": _steps(lambda ran: ran.spill),
}
"""By limit, the exact count of one launch that it is on, or why there is none."""

_STEP_WORDS: Mapping[str, Callable[[int], str]] = {
    "max_kernels": lambda count: f"{counted(count, 'kernel')} in one launch",
    "max_copies": lambda count: f"{count} {'copy' if count == 1 else 'copies'} in one launch",
    "max_copied_bytes": lambda count: f"{short_bytes(count)} copied in one launch",
    "max_waits": lambda count: f"the host waits {counted(count, 'time')} in one launch",
    "max_registers": lambda count: f"{counted(count, 'register')} of a thread",
    "max_spill": lambda count: f"{short_bytes(count)} of local memory of a thread",
}
STEPS: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    **{name: _exact(COUNTS[name], words) for name, words in _STEP_WORDS.items()},
    "same_kernels": _same_kernels,
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


def kernels_text(measurement: Measurement) -> str | None:
    """The kernels of one launch with their shapes, in order, as `same_kernels` compares them; None if they are not known."""
    if isinstance(ran := _watched(measurement), str):
        return None
    runs = [(shape, len(list(alike))) for shape, alike in groupby(map(_shape, _shapes(ran)))]
    text = (
        "; ".join(f"{count} x {shape}" if count > 1 else shape for shape, count in runs)
        or "no kernel"
    )
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{counted(ran.kernels, 'kernel')}, sha256 {hashlib.sha256(text.encode()).hexdigest()}"


def _counter(
    figure: Callable[[DramBytes], float | None],
    of: str,
    words: Callable[[float], str],
    parse: Callable[[str], float],
    *,
    least: bool = False,
) -> Callable[[_LimitCheck], Finding | None]:
    """The rule of a limit on a figure of the hardware's counters: the most, or the least.
    `of`: what has the figure.
    """

    def rule(one: _LimitCheck) -> Finding | None:
        if one.measurement.dram_bytes is None:
            return None
        if (found := figure(one.measurement.dram_bytes)) is None:
            return one.not_counted(f"Nsight Compute counted no {of}")
        if not least:
            return against_most(one.limit, found, parse(one.written), words(found))
        outcome, side = (
            (Outcome.FAIL, "below") if found < parse(one.written) else (Outcome.PASS, "not below")
        )
        return find(outcome, "counted", figure=words(found), side=side, limit=one.limit)

    return rule


COUNTERS: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    "max_dram_bytes": _counter(
        lambda counted: counted.total,
        "bytes of DRAM",
        lambda found: f"{short_bytes(int(found))} of DRAM in one launch",
        parse_bytes,
    ),
    "max_sectors_per_request": _counter(
        lambda counted: counted.sectors_per_request,
        "loads of global memory",
        lambda found: f"{found:.3g} sectors a load of a warp",
        float,
    ),
    "min_l2_hit_rate": _counter(
        lambda counted: counted.l2_hit_rate,
        "hits of L2",
        lambda found: f"an L2 hit rate of {format_share(found)}",
        parse_share,
        least=True,
    ),
}
"""Limits on figures of the hardware's counters, by name; not judged where nothing was counted."""

RULES: Mapping[str, Callable[[_LimitCheck], Finding | None]] = {
    "max_latency": _max_latency,
    "max_host_time": _max_host_time,
    "min_bandwidth": _min_bandwidth,
    "min_overlap": _min_overlap,
    "faster_than": _faster_than,
    **EXACT,
    **COUNTERS,
}
"""By the limit's name. `judge` compares `max_regression` and `fail_if_faster` with the baseline."""


def waits_for_counts(measurement: Measurement, limits: Limits) -> str | None:
    """A note on limits that are not judged here; None if there are none."""
    names = [name for name in COUNTERS if getattr(limits, name) is not None]
    if not names or measurement.dram_bytes is not None:
        return None
    return f"{', '.join(names)}: judged by gpumem profile ncu --traffic"


def counts_steps(limits: Limits) -> bool:
    """True if a limit is on what one launch runs."""
    return any(getattr(limits, name) is not None for name in STEPS)


def relative(limits: Limits) -> list[str]:
    """The limits that compare an exact figure with the baseline's: a count, the kernels, or the peak of the memory."""
    names = [
        name
        for name in EXACT
        if (written := getattr(limits, name)) and (name == "same_kernels" or over_baseline(written))
    ]
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


def uncounted(measurement: Measurement, limits: Limits) -> bool:
    """True if a limit on pages or steps is set and nothing was counted."""
    pages = limits.max_gpu_page_faults is not None or limits.max_migrated is not None
    ran = measurement.what_ran
    return (
        pages and (measurement.migrations is None or measurement.migrations.launch is None)
    ) or (counts_steps(limits) and (ran is None or not ran.order))


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
