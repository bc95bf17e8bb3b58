"""The rows of a duet: which it compares, their pairs of processes, and their verdicts. Pure.

The time is decided by the looks of `judging.duet`, the peak of memory by three pairs, and counts
by the first pair.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from msgspec import structs

from pytest_gpumem.judging.differences import differences
from pytest_gpumem.judging.duet import PEAKS, Pairs, judge_pairs, judge_peaks
from pytest_gpumem.judging.finding import change, counted, window_text, worst
from pytest_gpumem.judging.footprint import comparable, judge_footprint
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.judging.latencies import corrected_latencies, readings
from pytest_gpumem.judging.limits import EXACT, absolute
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Difference, LimitResult, Row, covers, selects
from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.processes import BASE, ProcessRecord
from pytest_gpumem.settings import flag_of
from pytest_gpumem.units import format_share, parse_growth, parse_margin, sizes

TIME, PEAK = "max_regression", "max_peak_regression"


MEASURING = ("device", "mode", "sampler", "placements", "precision", "budget", "total_budget")
"""Settings that base and head share: latencies under different ones are not comparable."""


@dataclass(frozen=True)
class RowFilter:
    """The rows that a duet compares; all rows without an argument."""

    tests: frozenset[str] | None = None
    """Node ids. Each selects as on pytest's command line, such as all parameters of a test."""
    limits: Mapping[str, Limits] | None = None
    """By row key, the limits that the duet judges. It then compares no other row."""
    old_names: Mapping[str, str] = field(default_factory=dict)
    """Of renamed tests: what they are called in base, by their names in head."""

    def selects(self, nodeid: str, key: str) -> bool:
        """Return whether a row is among them."""
        if self.limits is not None:
            return key in self.limits
        return self.tests is None or any(selects(name, nodeid) for name in self.tests)

    def missing(self, rows: Mapping[str, Row]) -> list[str]:
        """Return the requested names that select none of these rows."""
        if self.limits is not None:
            return sorted(set(self.limits).difference(rows))
        nodeids = [row.nodeid for row in rows.values()]
        missing = []
        for name in sorted(self.tests or ()):
            if not any(selects(name, nodeid) for nodeid in nodeids):
                missing.append(name)
        return missing

    def rows_of(self, process: ProcessRecord) -> dict[str, Row]:
        """Return the selected rows of a process by key; those of memory alone only by `limits`."""
        rows = {}
        for row in process.rows:
            of_time = row.measurement is not None or row.footprint is None
            if (of_time or self.limits is not None) and self.selects(row.nodeid, row.key):
                rows[row.key] = row
        return rows


def under_other_name(nodeid: str, names: Mapping[str, str]) -> str:
    """Return a node id with the other name of its test. `names`: the other ones, by name."""
    for name, other in names.items():
        if selects(name, nodeid):
            return other + nodeid[len(name) :]
    return nodeid


def under_new_names(process: ProcessRecord, old_names: Mapping[str, str]) -> ProcessRecord:
    """Return a process of base with the names that its renamed tests have in head."""
    new_names = {old: new for new, old in old_names.items()}
    rows, outcomes = [], {}
    for row in process.rows:
        rows.append(structs.replace(row, nodeid=under_other_name(row.nodeid, new_names)))
    for nodeid, outcome in process.outcomes.items():
        outcomes[under_other_name(nodeid, new_names)] = outcome
    return replace(process, rows=tuple(rows), outcomes=outcomes)


def check_alike(base: ProcessRecord, head: ProcessRecord) -> None:
    """Raise `RunError` where a setting of measuring differs: names it and both values."""
    for name in MEASURING:
        if name not in base.settings or name not in head.settings:
            continue
        was, now = base.settings[name], head.settings[name]
        if was != now:
            raise RunError(
                f"base and head measure in different ways: {name} is {was!r} in base and {now!r} "
                f"in head; give {flag_of(name)} among pytest's arguments"
            )


class Trouble(NamedTuple):
    """Why a process has nothing to compare of a row."""

    why: str
    fails: bool  # it crashed, or the test failed by more than its limits


def trouble_of(key: str, row: Row | None, process: ProcessRecord) -> Trouble | None:
    """Return why a process has nothing to compare of a row, whatever its conditions, or None.

    A test that only broke limits was measured all the same.
    """
    if process.error is not None:
        return Trouble(f"crashed: {process.error}", True)
    why, fails = "no such measurement", False
    nodeid = test_of(key, process)
    if row is not None:
        fails = row.failed and not _broke_only_limits(row.nodeid, process)
        if not row.measured_something:
            why = row.verdict.reason or why
        elif fails:
            why = "its test failed"
        else:
            return None
    if nodeid is None:
        return Trouble(why, fails)
    outcome, words = process.outcomes[nodeid]
    if row is None:
        fails = outcome == "failed" and not _broke_only_limits(nodeid, process)
    if key.startswith(f"{nodeid}::"):  # its file
        return Trouble(words or outcome, fails)
    return Trouble(f"{outcome}, {words}" if words else outcome, fails)


def _broke_only_limits(nodeid: str, process: ProcessRecord) -> bool:
    """True if verdicts fail a test, and no assertion or error does."""
    rows = [row for row in process.rows if row.nodeid == nodeid and row.measured_something]
    if any(row.test_error is True for row in rows):
        return False
    return any(is_failure(row.verdict, strict=False) for row in rows)


def test_of(key: str, process: ProcessRecord) -> str | None:
    """Return the test or file of a key or a name, among those that did not pass in a process."""
    for nodeid in process.outcomes:
        # A file that cannot be imported fails all tests in it.
        if covers(nodeid, key) or selects(key, nodeid):
            return nodeid
    return None


def measured_differently(base: Measurement, head: Measurement) -> str | None:
    """Return in words how head measures a row in another way, which may hide a slow-down, or None.

    More declared bytes hide none.
    """
    for name in ("mode", "sampler"):
        was, now = getattr(base, name), getattr(head, name)
        if was != now:
            return f"{name} was {was} in base and is {now} in head"
    if base.window != head.window:
        was, now = window_text(base.window), window_text(head.window)
        return f"the window was {was} in base and is {now} in head"
    if base.moved_bytes is None:
        return None
    if head.moved_bytes is None:
        return "head no longer declares its bytes"
    was, now = base.moved_bytes.total, head.moved_bytes.total
    return f"head declares {now:,} bytes, and base {was:,}" if now < was else None


# The pairs of a row


@dataclass(frozen=True)
class DuetVerdict:
    """The verdict on one row."""

    key: str
    outcome: Outcome | None  # None: there is nothing to compare
    sentence: str
    results: tuple[LimitResult, ...] = ()  # by limit, the worst first
    pairs: Pairs | None = None  # of the time
    base: tuple[Row, ...] = ()  # the row in each process of base
    head: tuple[Row, ...] = ()
    differences: tuple[Difference, ...] = ()  # of a FAIL: head's from base

    @property
    def latencies(self) -> tuple[float | None, float | None]:
        """Seconds of base and head: the medians over their processes; None without any."""
        return _median_latency(self.base), _median_latency(self.head)

    @property
    def head_peak(self) -> int:
        """Bytes: the median over the processes of head."""
        peaks = [row.footprint.peak for row in self.head if row.footprint is not None]
        return int(statistics.median(peaks)) if peaks else 0


@dataclass
class RowPairs:
    """The pairs of a row."""

    key: str
    nodeid: str
    limits: Limits  # those that the duet judges
    base: list[Row] = field(default_factory=list)
    head: list[Row] = field(default_factory=list)
    time: Pairs | None = None
    results: dict[str, LimitResult] = field(default_factory=dict)  # what is decided, by limit
    ended: tuple[Outcome | None, str, Code | None] | None = None
    """Outcome, reason and code, where further pairs would decide nothing."""

    @property
    def open(self) -> bool:
        """True if a further pair may decide something."""
        return self.ended is None and any(name not in self.results for name in self._names())

    def _names(self) -> list[str]:
        return [name for name in (TIME, PEAK, *EXACT) if getattr(self.limits, name) is not None]

    def end(self, outcome: Outcome | None, reason: str, code: Code | None = None) -> None:
        """Take no further pair."""
        self.ended = outcome, reason, code

    def add(self, base: Row, head: Row, facts: DeviceFacts) -> None:
        """Judge with one more pair."""
        self.base.append(base)
        self.head.append(head)
        if base.measurement is not None and head.measurement is not None:
            other = measured_differently(base.measurement, head.measurement)
            if other is not None:
                reason = f"measured in another way, which may hide a slow-down: {other}"
                self.end(Outcome.FAIL, reason, Code.MEASURED_DIFFERENTLY)
                return
            if self.limits.max_regression is not None and TIME not in self.results:
                self._add_time(base.measurement, head.measurement, self.limits.max_regression)
        if len(self.base) == 1:
            self._judge_counts(base, head, facts)
        if len(self.base) == PEAKS and self.limits.max_peak_regression is not None:
            self.results[PEAK] = self._peak(self.limits.max_peak_regression)

    def _add_time(self, base: Measurement, head: Measurement, written: str) -> None:
        if self.time is None:
            limit = math.log1p(parse_margin(written).over(base.latency))
            self.time = Pairs((), limit, None)
        ratios = (*self.time.log_ratios, log_ratio(base, head))
        self.time = judge_pairs(ratios, self.time.limit)
        if self.time.outcome is not None:
            self.results[TIME] = _of_time(self.time)

    def _judge_counts(self, base: Row, head: Row, facts: DeviceFacts) -> None:
        names = [name for name in EXACT if getattr(self.limits, name) is not None]
        findings: Iterable[LimitResult] = ()
        if base.measurement is not None and head.measurement is not None:
            past = (base.measurement,)
            findings = absolute(
                head.measurement, self.limits, facts, past=past, names=names, of=BASE
            )
        elif base.footprint is not None and head.footprint is not None:
            saved = [base.footprint]
            findings = judge_footprint(head.footprint, self.limits, saved, names, of=BASE)
        for name in names:
            reason = f"{name} cannot be judged: it was not counted on both sides"
            self.results[name] = LimitResult(name, Outcome.UNDECIDED, Code.NOT_READ, reason)
        for finding in findings:
            self.results[finding.limit] = finding

    def _peak(self, written: str) -> LimitResult:
        was = [row.footprint for row in self.base if row.footprint is not None]
        now = [row.footprint for row in self.head if row.footprint is not None]
        alike = all(comparable(footprint, was[0]) for footprint in [*was, *now])
        if len(was) < PEAKS or len(now) < PEAKS or not alike:
            reason = f"{PEAK} cannot be judged: memory was not watched alike on both sides"
            return LimitResult(PEAK, Outcome.UNDECIDED, Code.NOT_READ, reason)
        before = [footprint.peak for footprint in was]
        after = [footprint.peak for footprint in now]
        outcome = judge_peaks(after, before, parse_growth(written).most)
        base, head = max(before), int(statistics.median(after))
        head_text, base_text = sizes(head, base)
        share = f" ({change(head / base - 1)})" if base else ""
        above, code = "not above", None
        if outcome is Outcome.FAIL:
            above, code = "above", Code.TOO_MUCH_MEMORY
        reason = (
            f"a peak of {head_text} against {base_text} of base{share}, {above} {PEAK} {written}"
        )
        return LimitResult(PEAK, outcome, code, reason)

    def verdict(self) -> DuetVerdict:
        """Return the verdict by the pairs so far."""
        outcome: Outcome | None
        if self.ended is not None:
            outcome, reason, code = self.ended
            texts, results = [reason], list[LimitResult]()
            if outcome is not None and outcome is not Outcome.NEW:
                results.append(LimitResult("", outcome, code, reason))
        else:
            results = self._results()
            outcome = worst(results)
            texts = [result.reason for result in results]
        differing: tuple[Difference, ...] = ()
        if self.base:
            base, head = self.base[-1], self.head[-1]
            was, now = base.measurement, head.measurement
            if was is not None and now is not None and was.target != now.target:
                texts.append(f"it now measures {now.target}, not {was.target}")
            if outcome is Outcome.FAIL and was is not None and now is not None:
                differing = differences(was, now)
        rows = tuple(self.base), tuple(self.head)
        return DuetVerdict(
            self.key, outcome, "; ".join(texts), tuple(results), self.time, *rows, differing
        )

    def _results(self) -> list[LimitResult]:
        """By limit, the worst first."""
        results = []
        for name in self._names():
            reason = f"{name} was not judged: the duet ended before"
            result = LimitResult(name, Outcome.UNDECIDED, Code.NOISY, reason)
            if name in self.results:
                result = self.results[name]
            elif name == TIME and self.time is not None:
                result = _of_time(self.time)
            results.append(result)
        return sorted(results, key=lambda result: result.outcome.rank)


def log_ratio(base: Measurement, head: Measurement) -> float:
    """Logarithm of head's latency over base's, both corrected to one launch overhead."""
    was, now = corrected_latencies([*readings(base), *readings(head)])
    return math.log(now / was)


def _of_time(pairs: Pairs) -> LimitResult:
    """The result about the time, with the change, its interval and the limit in words."""
    text = f"{change(pairs.change)} over {counted(len(pairs.log_ratios), 'pair')} of processes"
    low, high = pairs.bounds
    if math.isfinite(low) and low != high:
        text += f", between {change(low)} and {change(high)}"
    limit = f"{TIME} {format_share(math.expm1(pairs.limit))}"
    if pairs.outcome is Outcome.PASS:
        return LimitResult(TIME, Outcome.PASS, None, f"{text}: within {limit}")
    if pairs.outcome is Outcome.FAIL:
        return LimitResult(TIME, Outcome.FAIL, Code.SLOWER, f"{text}: slower than {limit} allows")
    text += f": open at {limit}"
    if math.isfinite(high):
        text += f"; at {format_share(max(high, 0.0))} it would pass"
    return LimitResult(TIME, Outcome.UNDECIDED, Code.NOISY, text)


def _median_latency(rows: Sequence[Row]) -> float | None:
    latencies = [row.measurement.latency for row in rows if row.measurement is not None]
    return statistics.median(latencies) if latencies else None
