"""The limits of a footprint. Bytes are counted: a limit holds or does not.

A growth of the peak is judged against the greatest peak of the reference. Where the reference has
different peaks, as by caches and autotuning, a growth beyond the limit needs a duet. Other limits
are on the process of the run that takes the most.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from msgspec.structs import replace

from pytest_gpumem.judging.finding import Finding, against_most, counted, find, of_limit
from pytest_gpumem.limits import BASE, MAX_WAITS, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import format_share, parse_bytes, parse_growth, short_bytes, sizes


@dataclass(frozen=True)
class FootprintCheck:
    """A limit and the footprint that it applies to."""

    footprint: Footprint
    limit: str  # its name, value and origin
    written: str
    past: Sequence[Footprint]
    no_history: str | None
    of: str | None = None  # what the one run of `past` is, in words; None: saved runs

    def compared_with_nothing(self, why: str) -> Finding:
        """Return the finding of a limit that has nothing to compare with."""
        why = self.no_history or why
        return find(Outcome.NEW, "no history", Code.NO_BASELINE, limit=self.limit, why=why)

    def not_read(self, why: str) -> Finding:
        """Return the finding of a limit whose bytes are unknown."""
        return find(Outcome.UNDECIDED, "not read", Code.NOT_READ, limit=self.limit, why=why)


def _max_peak(check: FootprintCheck) -> Finding:
    peak = max(peaks_of(check.footprint))
    return _at_most(check, peak, check.footprint.peak, f"a peak of {short_bytes(peak)}")


def _max_kept(check: FootprintCheck) -> Finding:
    footprint = check.footprint
    kept = max(footprint.kept, *(further.kept for further in footprint.further), 0)
    uses = []
    for use in footprint.uses:
        if use.kept > 0:
            kind = "" if use.kind == "device" else f" {use.kind}"
            uses.append(f"{use.library} {short_bytes(use.kept)}{kind}")
    text = f"{short_bytes(kept)} kept"
    if uses:
        text += f" ({', '.join(uses)})"
    beside = sum(use.allowed for use in footprint.uses)
    if beside:
        text += f", beside {short_bytes(beside)} that allow_kept names"
    return _at_most(check, kept, footprint.kept, text)


def _at_most(check: FootprintCheck, most: int, first: int, text: str) -> Finding:
    """Compare the bytes of the process that takes the most. `first`: those of the first."""
    if most > first:
        text += f" in another process of the run, {short_bytes(first)} in the first"
    limit = parse_bytes(check.written)
    return against_most(check.limit, most, limit, text, Code.TOO_MUCH_MEMORY)


def _max_peak_regression(check: FootprintCheck) -> Finding:
    footprint = check.footprint
    read = [past for past in check.past if past.watched]  # others have waits alone
    alike = [past for past in read if comparable(footprint, past)]
    if not read:
        return check.compared_with_nothing("the baseline holds no such row")
    if not alike:
        changed = "the driver's allocations are watched on one side only"
        code = Code.MEASURED_DIFFERENTLY
        return find(
            Outcome.UNDECIDED, "measured differently", code, limit=check.limit, changed=changed
        )
    saved = [peak for past in alike for peak in peaks_of(past)]
    peaks = peaks_of(footprint)
    peak, greatest = median_low(peaks), max(saved)
    sign = "+" if peak >= greatest else ""
    growth = f"{sign}{short_bytes(peak - greatest)}"
    if greatest:
        growth += f", {format_share(peak / greatest - 1, sign=True)}"
    peak_text, greatest_text = sizes(peak, greatest)
    runs = check.of or counted(len(alike), "saved run")
    figure = f"a peak of {peak_text} against {greatest_text} of {runs} ({growth})"
    if len(set(peaks)) > 1:
        low, high = short_bytes(min(peaks)), short_bytes(max(peaks))
        figure += f"; processes of this run vary between {low} and {high}"
    most = parse_growth(check.written).most(greatest)
    if peak > most and min(saved) < greatest:
        low, high = short_bytes(min(saved)), short_bytes(greatest)
        figure += f"; unchanged code varies between {low} and {high}"
        return find(Outcome.UNDECIDED, "peak varies", Code.NOISY, limit=check.limit, figure=figure)
    return against_most(check.limit, peak, most, figure, Code.TOO_MUCH_MEMORY)


def comparable(footprint: Footprint, other: Footprint) -> bool:
    """True if the driver's allocations were seen on both sides, or on neither."""
    return (footprint.driver_peak is None) == (other.driver_peak is None)


def peaks_of(footprint: Footprint) -> tuple[int, ...]:
    """Return the peaks of all processes of a run."""
    return (footprint.peak, *(further.peak for further in footprint.further))


def with_further(footprint: Footprint, key: str, further: Iterable[Mapping[str, Row]]) -> Footprint:
    """Return a footprint with those of the same row in further processes of the run.

    `further`: rows of each process by their key.
    """
    repeats = list(footprint.further)
    for rows in further:
        row = rows.get(key)
        if row is not None and row.footprint is not None and row.footprint.watched:
            repeats.append(row.footprint.repeat)
    return replace(footprint, further=tuple(repeats))


def _max_waits(check: FootprintCheck) -> Finding:
    waits = check.footprint.waits
    assert waits is not None
    figure = f"the host waits {counted(waits.count, 'time')}"
    if waits.lines:
        figure += f": {waits.text}"
    if waits.not_read is not None:
        return check.not_read(waits.not_read)
    if check.written != BASE:
        return against_most(check.limit, waits.count, count_of(check.written), figure)
    past = []
    for saved in check.past:
        if saved.waits is not None and saved.waits.not_read is None:
            past.append(saved.waits.count)
    of = check.of or "the baseline"
    if not past:
        return check.compared_with_nothing(f"no run of {of} read waits")
    figure += f", {counted(max(past), 'time')} in {of}"
    return against_most(check.limit, waits.count, max(past), figure)


RULES: Mapping[str, Callable[[FootprintCheck], Finding]] = {
    "max_peak": _max_peak,
    "max_peak_regression": _max_peak_regression,
    "max_kept": _max_kept,
    MAX_WAITS: _max_waits,
}
"""By the limit's name. Waits are judged where they were to be read."""
OF_PEAK = ("max_peak", "max_peak_regression")
AT_THE_END = ("max_kept",)
"""Limits on what is there when the test has ended; the others are judged at its body's end."""
ENDS_WITH_FIXTURES = "a simulated device has only the buffers of fixtures, which end with them"


def judge_footprint(
    footprint: Footprint,
    limits: Limits,
    past: Sequence[Footprint],
    names: Sequence[str],
    no_history: str | None = None,
    of: str | None = None,
    *,
    fixtures_alone: bool = False,
) -> Iterator[Finding]:
    """Yield a finding for each limit that is set.

    `past`: of the saved runs of the row.
    `names`: the limits to judge.
    `no_history`: why there is no saved run.
    `of`: what the one run of `past` is, in words.
    `fixtures_alone`: a whole test on a simulated device, where nothing outlives the fixtures.
    Raises `QuantityError`: a limit that cannot be read.
    """
    for name in names:
        written = getattr(limits, name)
        if written is None or (name == MAX_WAITS and footprint.waits is None):
            continue
        limit = f"{name} {written} ({limits.origin.get(name, 'limit')})"
        check = FootprintCheck(footprint, limit, written, past, no_history, of)
        finding = RULES[name](check)
        if name != MAX_WAITS:
            finding = _as_far_as_seen(check, name, finding, fixtures_alone)
        yield of_limit(name, finding)


def _as_far_as_seen(
    check: FootprintCheck, name: str, finding: Finding, fixtures_alone: bool
) -> Finding:
    """Return the finding about bytes, or UNDECIDED where too little was seen for it."""
    footprint = check.footprint
    if not footprint.watched and finding.outcome is not Outcome.FAIL:
        return check.not_read("; ".join(footprint.not_watched) or "nothing was watched")
    if fixtures_alone and name in AT_THE_END and not footprint.kept:
        return check.not_read(ENDS_WITH_FIXTURES)
    if finding.outcome is not Outcome.PASS:
        return finding
    unseen = _unseen(check, name)
    if unseen is None:
        return finding
    why = f"{unseen}; {'; '.join(footprint.not_watched)}"
    code = Code.CONDITIONS
    return find(Outcome.UNDECIDED, "not counted", code, limit=check.limit, why=why)


def _unseen(check: FootprintCheck, name: str) -> str | None:
    """Return why a PASS proves nothing; None if it does."""
    footprint = check.footprint
    if footprint.bound:
        return f"up to {short_bytes(footprint.bound)} more of the GPU's memory are taken"
    if footprint.driver_peak is None and (footprint.bound is None or name not in AT_THE_END):
        return "memory that the driver gave and got back meanwhile was not seen"
    if footprint.peak_bound is not None and name in OF_PEAK:
        highest = replace(footprint, peak=footprint.peak_bound)
        if RULES[name](dataclasses.replace(check, footprint=highest)).outcome is not Outcome.PASS:
            return f"the peak is at most {short_bytes(footprint.peak_bound)}"
    return None
