"""The limits of a footprint. Bytes are counted: a limit holds or does not, and no statistics are needed.

A growth of the peak is judged by the least peak of a run's processes against the least one of the saved runs, so that small steps do not
add up. Where unchanged code has different peaks, as by caches and autotuning, a run fails only if chance explains its peaks in at most one
run of two hundred. Other limits are on the process that takes the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pytest_gpumem.judging.finding import Finding, against_most, counted, find, of_limit
from pytest_gpumem.judging.screen import UPPER
from pytest_gpumem.limits import BASE, MAX_WAITS, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_share, parse_bytes, parse_growth, short_bytes, sizes


@dataclass(frozen=True)
class PastFootprint:
    """The footprint of a saved run."""

    footprint: Footprint
    revision: str | None  # revision of its code; None if unknown


@dataclass(frozen=True)
class _FootprintCheck:
    footprint: Footprint
    limit: str  # its name, value and origin
    written: str
    past: Sequence[PastFootprint]
    no_history: str | None
    of: str | None = None  # what the one run of `past` is, in words; None: saved runs


def _most(
    name: str, words: Callable[[int, Footprint], str]
) -> Callable[[_FootprintCheck], Finding]:
    """The rule of a limit on a figure of a footprint, in the process of the run that has most of it. `words` has it in words."""

    def rule(one: _FootprintCheck) -> Finding:
        own: int = getattr(one.footprint, name)
        count = max(own, *(getattr(further, name) for further in one.footprint.further), own)
        text = words(count, one.footprint)
        if count > own:
            text += f" in another process of the run, {short_bytes(own)} in the first"
        return against_most(one.limit, count, parse_bytes(one.written), text, Code.TOO_MUCH_MEMORY)

    return rule


def _kept(count: int, footprint: Footprint) -> str:
    kinds = (
        (use, "" if use.kind == "device" else f" {use.kind}")
        for use in footprint.uses
        if use.kept > 0
    )
    text = _in_brackets(f"{use.library} {short_bytes(use.kept)}{kind}" for use, kind in kinds)
    beside = sum(use.allowed for use in footprint.uses)
    return f"{short_bytes(count)} kept{text}{f', beside {short_bytes(beside)} that allow_kept names' if beside else ''}"


def _max_peak_regression(one: _FootprintCheck) -> Finding:
    limit, now = one.limit, one.footprint
    read = [past for past in one.past if past.footprint.watched]  # others have waits alone
    alike = [past for past in read if comparable(now, past.footprint)]
    if not alike:
        if read:
            changed = "the driver's allocations are watched on one side only"
            return find(
                Outcome.UNDECIDED,
                "measured differently",
                Code.MEASURED_DIFFERENTLY,
                limit=limit,
                changed=changed,
            )
        return find(
            Outcome.NEW,
            "no history",
            Code.NO_BASELINE,
            limit=limit,
            why=one.no_history or "the baseline holds no such row",
        )
    peaks, own = [peak for past in alike for peak in peaks_of(past.footprint)], peaks_of(now)
    before, peak = min(peaks), min(own)
    growth = f"{'+' if peak >= before else ''}{short_bytes(peak - before)}"
    if before:
        growth += f", {format_share(peak / before - 1, sign=True)}"
    peak_text, before_text = sizes(peak, before)
    figure = f"a peak of {peak_text} against {before_text} of {one.of or counted(len(alike), 'saved run')} ({growth})"
    if len(set(own)) > 1:
        figure += (
            f"; processes of this run vary between {short_bytes(peak)} and {short_bytes(max(own))}"
        )
    most = parse_growth(one.written).most(before)
    high, processes = variation(alike, most)
    if peak > most and high:
        figure += f"; {high} of {counted(processes, 'process')} of unchanged code had a peak above {short_bytes(most)} too"
        if by_chance(high, processes, len(own)) > MISTAKEN:
            return find(Outcome.UNDECIDED, "peak varies", Code.NOISY, limit=limit, figure=figure)
    return against_most(limit, peak, most, figure, Code.TOO_MUCH_MEMORY)


def comparable(one: Footprint, other: Footprint) -> bool:
    """True if both saw the same: the driver's allocations on both sides, or on none."""
    return (one.driver_peak is None) == (other.driver_peak is None)


def peaks_of(footprint: Footprint) -> tuple[int, ...]:
    """The peaks of all processes of a run."""
    return (footprint.peak, *(one.peak for one in footprint.further))


def with_further(footprint: Footprint, key: str, further: Iterable[Mapping[str, Row]]) -> Footprint:
    """A footprint with those of the same row in further processes of the run. `further`: rows of each by their key."""
    seen = [
        row.footprint
        for rows in further
        if (row := rows.get(key)) is not None and row.footprint is not None
    ]
    return replace(
        footprint, further=(*footprint.further, *(one.repeat for one in seen if one.watched))
    )


def variation(past: Sequence[PastFootprint], most: int) -> tuple[int, int]:
    """How often the peak of unchanged code is above `most`: such processes, and all. Processes are of unchanged code if they are of one
    run, or of runs of one revision without other changes. Where all of them are above, another change may be the reason: they do not count.
    """
    groups: dict[object, list[int]] = {}
    for index, one in enumerate(past):
        known = one.revision is not None and not one.revision.endswith("-dirty")
        groups.setdefault(one.revision if known else index, []).extend(peaks_of(one.footprint))
    counting = [peaks for peaks in groups.values() if min(peaks) <= most]
    return sum(peak > most for peaks in counting for peak in peaks), sum(map(len, counting))


def by_chance(high: int, processes: int, own: int) -> float:
    """The probability that all processes of a run of unchanged code have a higher peak.
    `high`: saved processes with a higher peak, of all `processes`. Both count one more, because few processes say little.
    `own`: processes of the run.
    """
    return ((high + 1) / (processes + 1)) ** own


MISTAKEN = 1 - UPPER
"""Highest `by_chance` with a FAIL."""


def _max_waits(one: _FootprintCheck) -> Finding:
    waits = one.footprint.waits
    assert waits is not None
    figure = f"the host waits {counted(waits.count, 'time')}"
    if waits.lines:
        figure += f": {waits.text}"
    if waits.not_read is not None:
        return find(
            Outcome.UNDECIDED, "not read", Code.NOT_READ, limit=one.limit, why=waits.not_read
        )
    if one.written != BASE:
        return against_most(one.limit, waits.count, count_of(one.written), figure)
    past = []
    for saved in one.past:
        before = saved.footprint.waits
        if before is not None and before.not_read is None:
            past.append((before.count, saved.revision))
    if not past:
        why = one.no_history or f"no run of {one.of or 'the baseline'} read waits"
        return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=one.limit, why=why)
    newest, revision = past[-1]
    alike = [count for count, of in past if of == revision]
    if min(alike) < max(alike) < waits.count:
        low, high = (counted(count, "time") for count in (min(alike), max(alike)))
        return find(
            Outcome.UNDECIDED,
            "varies",
            Code.NOISY,
            figure=figure,
            limit=one.limit,
            low=low,
            high=high,
        )
    figure += f", {counted(newest, 'time')} in {one.of or 'the baseline'}"
    return against_most(one.limit, waits.count, max(alike), figure)


RULES: Mapping[str, Callable[[_FootprintCheck], Finding]] = {
    "max_peak": _most("peak", lambda count, _: f"a peak of {short_bytes(count)}"),
    "max_peak_regression": _max_peak_regression,
    "max_kept": _most("kept", _kept),
    MAX_WAITS: _max_waits,
}
"""By the limit's name. Waits are judged where they were to be read."""
OF_PEAK = ("max_peak", "max_peak_regression")
AT_THE_END = ("max_kept",)
"""Limits on what is there when the test has ended; the others are judged at the end of its body."""


def judge_footprint(
    footprint: Footprint,
    limits: Limits,
    past: Sequence[PastFootprint],
    names: Sequence[str],
    no_history: str | None = None,
    of: str | None = None,
    *,
    fixtures_alone: bool = False,
) -> Iterator[Finding]:
    """One finding for each limit that is set.
    `past`: the saved runs of the row, oldest first.
    `names`: the limits to judge.
    `no_history`: why there is no saved run.
    `of`: what the one run of `past` is, in words.
    `fixtures_alone`: it is of a whole test on a simulated device, where nothing outlives the fixtures.
    Raises `QuantityError`: a limit that cannot be read.
    """
    for name in names:
        if (written := getattr(limits, name)) is None or (
            name == MAX_WAITS and footprint.waits is None
        ):
            continue
        one = _FootprintCheck(
            footprint,
            f"{name} {written} ({limits.origin.get(name, 'limit')})",
            written,
            past,
            no_history,
            of,
        )
        found = RULES[name](one)
        if name == MAX_WAITS:
            yield of_limit(name, found)
            continue
        if not footprint.watched and found.outcome is not Outcome.FAIL:
            why = "; ".join(footprint.not_watched) or "nothing was watched"
            found = find(Outcome.UNDECIDED, "not read", Code.NOT_READ, limit=one.limit, why=why)
        elif fixtures_alone and name in AT_THE_END and not footprint.kept:
            found = find(
                Outcome.UNDECIDED,
                "not read",
                Code.NOT_READ,
                limit=one.limit,
                why=ENDS_WITH_FIXTURES,
            )
        elif found.outcome is Outcome.PASS and (unseen := _unseen(one, name)) is not None:
            found = find(
                Outcome.UNDECIDED, "not counted", Code.CONDITIONS, limit=one.limit, why=unseen
            )
        yield of_limit(name, found)


ENDS_WITH_FIXTURES = "a simulated device has only the buffers of fixtures, which end with them"


def _unseen(one: _FootprintCheck, name: str) -> str | None:
    """Why what was seen proves nothing; None if it does."""
    footprint = one.footprint
    if footprint.bound:
        return f"up to {short_bytes(footprint.bound)} more of the GPU's memory are taken; {'; '.join(footprint.not_watched)}"
    if footprint.driver_peak is None and (footprint.bound is None or name not in AT_THE_END):
        return f"memory that the driver gave and got back meanwhile was not seen; {'; '.join(footprint.not_watched)}"
    if footprint.peak_bound is not None and name in OF_PEAK:
        most = dataclasses.replace(one, footprint=replace(footprint, peak=footprint.peak_bound))
        if RULES[name](most).outcome is not Outcome.PASS:
            return f"the peak is at most {short_bytes(footprint.peak_bound)}; {'; '.join(footprint.not_watched)}"
    return None


def _in_brackets(parts: Iterable[str]) -> str:
    return f" ({text})" if (text := ", ".join(parts)) else ""
