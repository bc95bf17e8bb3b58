"""The limits of a footprint. Bytes and allocations are counted: a limit holds or does not, and no statistics are needed.

A growth of the peak is judged against the least peak of the saved runs, so that small steps do not add up; where runs of one revision
have different peaks, as by caches and autotuning, against the largest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pytest_gpumem.judging.calls import PastCalls, judge_calls
from pytest_gpumem.judging.finding import Finding, against_most, counted, find, of_limit
from pytest_gpumem.limits import OF_CALLS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.units import format_bytes, format_share, parse_bytes, parse_growth, short_bytes


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
    count: Callable[[Footprint], int], words: Callable[[int, Footprint], str], parse: Callable[[str], int] = parse_bytes
) -> Callable[[_FootprintCheck], Finding]:
    """The rule of a limit on a count of a footprint, which `words` has in words."""

    def rule(one: _FootprintCheck) -> Finding:
        found = count(one.footprint)
        return against_most(one.limit, found, parse(one.written), words(found, one.footprint), Code.TOO_MUCH_MEMORY)

    return rule


def _kept(count: int, footprint: Footprint) -> str:
    kinds = ((use, "" if use.kind == "device" else f" {use.kind}") for use in footprint.uses)
    return f"{size(count)} kept{_in_brackets(f'{use.library} {size(use.kept)}{kind}' for use, kind in kinds if use.kept > 0)}"


def _reserved(count: int, footprint: Footprint) -> str:
    parts = (f"{use.library} {size(use.reserved)}" for use in footprint.uses if use.reserved > 0)
    return f"{size(count)} reserved and unused{_in_brackets(parts)}"


def _max_peak_regression(one: _FootprintCheck) -> Finding:
    limit, now = one.limit, one.footprint
    alike = [past for past in one.past if comparable(now, past.footprint)]
    if not alike:
        if one.past:
            changed = "the driver's allocations are watched on one side only"
            return find(Outcome.UNDECIDED, "measured differently", Code.MEASURED_DIFFERENTLY, limit=limit, changed=changed)
        return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=limit, why=one.no_history or "the baseline holds no such row")
    peaks = [peak for past in alike for peak in peaks_of(past.footprint)]
    varies = varying(alike)
    before = max(peaks) if varies else min(peaks)
    peak = max(peaks_of(now)) if not varies else min(peaks_of(now))
    growth = f"{'+' if peak >= before else ''}{short_bytes(peak - before)}"
    if before:
        growth += f", {format_share(peak / before - 1, sign=True)}"
    figure = f"a peak of {size(peak)} against {size(before)} of {one.of or counted(len(alike), 'saved run')} ({growth})"
    if varies:
        figure += f"; unchanged code varies between {size(min(peaks))} and {size(max(peaks))}"
    elif len(set(peaks_of(now))) > 1:
        figure += f"; processes of this run vary between {size(min(peaks_of(now)))} and {size(peak)}"
    return against_most(limit, peak, parse_growth(one.written).most(before), figure, Code.TOO_MUCH_MEMORY)


def comparable(one: Footprint, other: Footprint) -> bool:
    """True if both saw the same: the driver's allocations on both sides, or on none."""
    return (one.driver_peak is None) == (other.driver_peak is None)


def peaks_of(footprint: Footprint) -> tuple[int, ...]:
    """The peaks of all processes of a run."""
    return (footprint.peak, *footprint.further_peaks)


def varying(past: Sequence[PastFootprint]) -> bool:
    """True if processes of one run, or runs of one revision without other changes, have different peaks."""
    by_revision: dict[str, set[int]] = {}
    for one in past:
        if len(set(peaks_of(one.footprint))) > 1:
            return True
        if one.revision is not None and not one.revision.endswith("-dirty"):
            by_revision.setdefault(one.revision, set()).add(one.footprint.peak)
    return any(len(peaks) > 1 for peaks in by_revision.values())


def _calls(name: str) -> Callable[[_FootprintCheck], Finding]:
    """The rule of a limit on calls."""

    def rule(one: _FootprintCheck) -> Finding:
        assert one.footprint.calls is not None
        past = [PastCalls(past.footprint.calls, past.revision) for past in one.past if past.footprint.calls is not None]
        return judge_calls(name, one.footprint.calls, one.limit, one.written, past, one.no_history, one.of or "the baseline")

    return rule


RULES: Mapping[str, Callable[[_FootprintCheck], Finding]] = {
    "max_peak": _most(lambda footprint: max(peaks_of(footprint)), lambda count, _: f"a peak of {size(count)}"),
    "max_allocations": _most(lambda footprint: footprint.allocations, lambda count, _: counted(count, "allocation"), int),
    "max_peak_regression": _max_peak_regression,
    "max_kept": _most(lambda footprint: footprint.kept, _kept),
    "max_reserved": _most(lambda footprint: footprint.reserved, _reserved),
    **{name: _calls(name) for name in OF_CALLS},
}
"""By the limit's name. Those of calls are judged where calls were to be counted."""
OF_PEAK = ("max_peak", "max_peak_regression")
AT_THE_END = ("max_kept", "max_reserved")  # limits on what is there when the test has ended; the others are judged at the end of its body


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
        if (written := getattr(limits, name)) is None or (name in OF_CALLS and footprint.calls is None):
            continue
        one = _FootprintCheck(footprint, f"{name} {written} ({limits.origin.get(name, 'limit')})", written, past, no_history, of)
        found = RULES[name](one)
        if name in OF_CALLS:
            yield of_limit(name, found)
            continue
        if not footprint.watched and found.outcome is not Outcome.FAIL:
            why = "; ".join(footprint.not_watched) or "nothing was watched"
            found = find(Outcome.UNDECIDED, "not read", Code.NOT_READ, limit=one.limit, why=why)
        elif fixtures_alone and name in AT_THE_END and not (footprint.kept or footprint.reserved):
            found = find(Outcome.UNDECIDED, "not read", Code.NOT_READ, limit=one.limit, why=ENDS_WITH_FIXTURES)
        elif found.outcome is Outcome.PASS and (unseen := _unseen(one, name)) is not None:
            found = find(Outcome.UNDECIDED, "not counted", Code.CONDITIONS, limit=one.limit, why=unseen)
        yield of_limit(name, found)


ENDS_WITH_FIXTURES = "a simulated device has only the buffers of fixtures, which end with them"


def _unseen(one: _FootprintCheck, name: str) -> str | None:
    """Why what was seen proves nothing; None if it does."""
    footprint = one.footprint
    if footprint.bound:
        return f"up to {size(footprint.bound)} more of the GPU's memory are taken; {'; '.join(footprint.not_watched)}"
    if footprint.peak_bound is not None and name in OF_PEAK:
        most = dataclasses.replace(one, footprint=replace(footprint, peak=footprint.peak_bound))
        if RULES[name](most).outcome is not Outcome.PASS:
            return f"the peak is at most {size(footprint.peak_bound)}; {'; '.join(footprint.not_watched)}"
    return None


def size(nbytes: int) -> str:
    """A rounded size beside its bytes where it is not whole: "1.07 GiB (1148903424 B)"."""
    exact = format_bytes(nbytes)
    return exact if len(exact) <= 9 or abs(nbytes) < 10_000 else f"{short_bytes(nbytes)} ({nbytes} B)"


def _in_brackets(parts: Iterable[str]) -> str:
    return f" ({text})" if (text := ", ".join(parts)) else ""
