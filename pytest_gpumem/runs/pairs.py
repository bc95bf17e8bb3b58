"""The rows of a duet, their pairs of processes, and what these decide. Pure.

The looks of `judging.duet` decide the time, three pairs the peak of memory, the first pair counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpumem.judging.differences import differences, measured_differently
from pytest_gpumem.judging.duet import PEAKS, Pairs, judge_pairs, of_pairs, of_peaks
from pytest_gpumem.judging.finding import Check, check_of
from pytest_gpumem.judging.footprint import judge_waits
from pytest_gpumem.judging.limits import EXACT, judge_count
from pytest_gpumem.judging.regression import corrected_logs
from pytest_gpumem.limits import MAX_WAITS
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Difference, LimitResult, Row, selects
from pytest_gpumem.runs.processes import BASE
from pytest_gpumem.units import parse_margin

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

    def selects(self, row: Row) -> bool:
        """True if a duet compares a row; one of memory alone only by `limits`."""
        if self.limits is not None:
            return row.key in self.limits
        return row.measurement is not None or row.footprint is None


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
        return self.ended is None and bool(self._open_checks())

    def _open_checks(self) -> list[Check]:
        checks = []
        for name in JUDGED:
            check = check_of(self.limits, name)
            if check is not None and name not in self.decided:
                checks.append(check)
        return checks

    def end(self, outcome: Outcome | None, reason: str, code: Code | None = None) -> None:
        self.ended, self.decided = (outcome, reason), {}
        if outcome is not None and outcome is not Outcome.NEW:
            self.decided[""] = LimitResult("", outcome, code, reason)

    def add(self, base: Row, head: Row) -> None:
        self.base.append(base)
        self.head.append(head)
        was, now = base.measurement, head.measurement
        if was is not None and now is not None:
            other = measured_differently(was, now)
            if other is not None:
                reason = f"measured in another way, which may hide a slow-down: {other}"
                self.end(Outcome.FAIL, reason, Code.MEASURED_DIFFERENTLY)
                return
        for check in self._open_checks():
            if check.name == TIME:
                if was is not None and now is not None:
                    self._judge_time(check, was, now)
            elif check.name != PEAK:
                self.decided[check.name] = _judge_count(check, base, head)
            elif len(self.base) == PEAKS:
                self.decided[PEAK] = of_peaks(check, _footprints(self.head), _footprints(self.base))

    def _judge_time(self, check: Check, base: Measurement, head: Measurement) -> None:
        ratios: tuple[float, ...] = ()
        limit = math.log1p(parse_margin(check.written).over(base.latency))
        if self.pairs is not None:
            ratios, limit = self.pairs.log_ratios, self.pairs.limit
        # Both are corrected to one launch overhead.
        (was,), (now,) = corrected_logs([base, head])
        self.pairs = judge_pairs((*ratios, now - was), limit)
        if self.pairs.outcome is not None:
            self.decided[TIME] = of_pairs(check, self.pairs)

    # The verdict by the pairs so far

    @property
    def results(self) -> list[LimitResult]:
        """The worst first."""
        results = list(self.decided.values())
        if self.ended is None:
            for check in self._open_checks():
                if check.name == TIME and self.pairs is not None:
                    results.append(of_pairs(check, self.pairs))
                else:
                    results.append(check.not_judged("the duet ended before", Code.NOISY))
        return sorted(results, key=lambda result: result.outcome.rank)

    @property
    def outcome(self) -> Outcome | None:
        """None: there is nothing to compare."""
        if self.ended is not None:
            return self.ended[0]
        results = self.results
        return results[0].outcome if results else Outcome.MEASURED

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
        peaks = [footprint.peak for footprint in _footprints(self.head)]
        return int(statistics.median(peaks)) if peaks else 0


def _judge_count(check: Check, base: Row, head: Row) -> LimitResult:
    if base.measurement is not None and head.measurement is not None:
        return judge_count(check, head.measurement, [base.measurement], BASE)
    was, now = base.footprint, head.footprint
    if check.name == MAX_WAITS and was is not None and now is not None and now.waits is not None:
        return judge_waits(check, now.waits, [was], None, BASE)
    return check.not_judged("it was not counted on both sides", Code.NOT_READ)


def _footprints(rows: Sequence[Row]) -> list[Footprint]:
    return [row.footprint for row in rows if row.footprint is not None]


def _median_latency(rows: Sequence[Row]) -> float | None:
    latencies = [row.measurement.latency for row in rows if row.measurement is not None]
    return statistics.median(latencies) if latencies else None
