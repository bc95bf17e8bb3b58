"""The rows of a duet, their pairs of processes, and what these decide. Pure.

The looks of `judging.duet` decide the time, three pairs the peak of memory, the first pair counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.judging.differences import differences
from pytest_gpumem.judging.duet import PEAKS, Pairs, judge_pairs, judge_peaks
from pytest_gpumem.judging.finding import change, counted, window_text, worst
from pytest_gpumem.judging.footprint import comparable, judge_footprint
from pytest_gpumem.judging.limits import EXACT, absolute
from pytest_gpumem.judging.regression import corrected_logs
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Difference, LimitResult, Row, selects
from pytest_gpumem.runs.processes import BASE, ProcessRecord
from pytest_gpumem.units import format_share, parse_growth, parse_margin, sizes

TIME, PEAK = "max_regression", "max_peak_regression"
JUDGED = (TIME, PEAK, *EXACT)
"""The limits that a duet judges."""


@dataclass(frozen=True)
class RowFilter:
    """The rows that a duet compares; all rows without an argument."""

    tests: frozenset[str] | None = None  # node ids, as on pytest's command line
    limits: Mapping[str, Limits] | None = None  # by row key, those to judge, of no other row
    old_names: Mapping[str, str] = field(default_factory=dict)
    """Of renamed tests: what they are called in base, by their names in head."""

    def missing(self, rows: Mapping[str, Row]) -> list[str]:
        """Return the requested names that select none of these rows."""
        if self.limits is not None:
            return sorted(set(self.limits).difference(rows))
        missing = []
        for name in sorted(self.tests or ()):
            if not any(selects(name, row.nodeid) for row in rows.values()):
                missing.append(name)
        return missing

    def rows_of(self, process: ProcessRecord) -> dict[str, Row]:
        """Return the selected rows of a process by key; those of memory alone only by `limits`."""
        rows = {}
        for key, row in process.rows.items():
            selected = row.measurement is not None or row.footprint is None
            if self.limits is not None:
                selected = key in self.limits
            if selected:
                rows[key] = row
        return rows


@dataclass
class DuetRow:
    """A row of a duet: its pairs of processes so far, and what they decide."""

    key: str
    nodeid: str = ""
    limits: Limits = field(default_factory=Limits)  # those that the duet judges
    base: list[Row] = field(default_factory=list)  # the row in each process of base
    head: list[Row] = field(default_factory=list)
    pairs: Pairs | None = None  # of the time
    decided: dict[str, LimitResult] = field(default_factory=dict)  # by limit
    ended: tuple[Outcome | None, str] | None = None
    """Outcome and reason, where further pairs would decide nothing. None: nothing to compare."""
    oldest: DuetRow | None = None  # with the oldest revision of the reference, if that decides

    @property
    def open(self) -> bool:
        """True if a further pair may decide something."""
        return self.ended is None and any(name not in self.decided for name in self._names())

    def _names(self) -> list[str]:
        return [name for name in JUDGED if getattr(self.limits, name) is not None]

    def end(self, outcome: Outcome | None, reason: str, code: Code | None = None) -> None:
        self.ended, self.decided = (outcome, reason), {}
        if outcome is not None and outcome is not Outcome.NEW:
            self.decided[""] = LimitResult("", outcome, code, reason)

    def add(self, base: Row, head: Row, facts: DeviceFacts) -> None:
        self.base.append(base)
        self.head.append(head)
        was, now = base.measurement, head.measurement
        if was is not None and now is not None:
            other = measured_differently(was, now)
            if other is not None:
                reason = f"measured in another way, which may hide a slow-down: {other}"
                self.end(Outcome.FAIL, reason, Code.MEASURED_DIFFERENTLY)
                return
            if self.limits.max_regression is not None and TIME not in self.decided:
                self._add_time(was, now, self.limits.max_regression)
        if len(self.base) == 1:
            self._judge_counts(base, head, facts)
        if len(self.base) == PEAKS and self.limits.max_peak_regression is not None:
            self.decided[PEAK] = self._peak(self.limits.max_peak_regression)

    def _add_time(self, base: Measurement, head: Measurement, written: str) -> None:
        ratios: tuple[float, ...] = ()
        limit = math.log1p(parse_margin(written).over(base.latency))
        if self.pairs is not None:
            ratios, limit = self.pairs.log_ratios, self.pairs.limit
        # Both are corrected to one launch overhead.
        (was,), (now,) = corrected_logs([base, head])
        self.pairs = judge_pairs((*ratios, now - was), limit)
        if self.pairs.outcome is not None:
            self.decided[TIME] = self._time(self.pairs)

    def _time(self, pairs: Pairs) -> LimitResult:
        text = f"{change(pairs.change)} over {counted(len(pairs.log_ratios), 'pair')} of processes"
        low, high = pairs.bounds
        if math.isfinite(low) and low != high:
            text += f", between {change(low)} and {change(high)}"
        accepted = self.limits.origin.get(TIME) == "accepted"
        limit = f"{'the accepted' if accepted else TIME} {self.limits.max_regression}"
        if pairs.outcome is Outcome.PASS:
            return LimitResult(TIME, Outcome.PASS, None, f"{text}: within {limit}")
        if pairs.outcome is Outcome.FAIL:
            reason = f"{text}: slower than {limit} allows"
            return LimitResult(TIME, Outcome.FAIL, Code.SLOWER, reason)
        text += f": open at {limit}"
        if math.isfinite(high):
            text += f"; at {format_share(max(high, 0.0))} it would pass"
        return LimitResult(TIME, Outcome.UNDECIDED, Code.NOISY, text)

    def _judge_counts(self, base: Row, head: Row, facts: DeviceFacts) -> None:
        names = [name for name in EXACT if getattr(self.limits, name) is not None]
        for name in names:
            reason = f"{name} cannot be judged: it was not counted on both sides"
            self.decided[name] = LimitResult(name, Outcome.UNDECIDED, Code.NOT_READ, reason)
        was, now = base.measurement, head.measurement
        findings: Iterable[LimitResult] = ()
        if was is not None and now is not None:
            findings = absolute(now, self.limits, facts, past=(was,), names=names, of=BASE)
        elif base.footprint is not None and head.footprint is not None:
            past = [base.footprint]
            findings = judge_footprint(head.footprint, self.limits, past, of=BASE)
        for finding in findings:
            if finding.limit in names:
                self.decided[finding.limit] = finding

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

    # The verdict by the pairs so far

    @property
    def results(self) -> list[LimitResult]:
        """The worst first."""
        results = dict(self.decided)
        if self.ended is None:
            for name in self._names():
                reason = f"{name} was not judged: the duet ended before"
                open_result = LimitResult(name, Outcome.UNDECIDED, Code.NOISY, reason)
                if name == TIME and self.pairs is not None:
                    open_result = self._time(self.pairs)
                results.setdefault(name, open_result)
        in_order = [results[name] for name in ("", *JUDGED) if name in results]
        return sorted(in_order, key=lambda result: result.outcome.rank)

    @property
    def outcome(self) -> Outcome | None:
        """None: there is nothing to compare."""
        if self.ended is not None:
            return self.ended[0]
        return worst(self.results)

    @property
    def sentence(self) -> str:
        if self.ended is not None:
            return self.ended[1]
        return "; ".join(result.reason for result in self.results)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What head did differently, if it fails."""
        if self.oldest is not None:
            return self.oldest.differences
        if not self.base or self.outcome is not Outcome.FAIL:
            return ()
        was, now = self.base[-1].measurement, self.head[-1].measurement
        if was is None or now is None:
            return ()
        return differences(was, now)

    @property
    def latencies(self) -> tuple[float | None, float | None]:
        """Seconds of base and head: the medians over their processes."""
        return _median_latency(self.base), _median_latency(self.head)

    @property
    def head_peak(self) -> int:
        """Bytes: the median over the processes of head."""
        peaks = [row.footprint.peak for row in self.head if row.footprint is not None]
        return int(statistics.median(peaks)) if peaks else 0


def measured_differently(base: Measurement, head: Measurement) -> str | None:
    """Return in words how head measures a row in another way, or None."""
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


def _median_latency(rows: Sequence[Row]) -> float | None:
    latencies = [row.measurement.latency for row in rows if row.measurement is not None]
    return statistics.median(latencies) if latencies else None
