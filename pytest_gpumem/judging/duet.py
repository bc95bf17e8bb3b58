"""The duet's verdict: base against head by pairs of processes (docs/explanation/judging.md). Pure.

Five looks at the mean of log(head / base), each by Student's t at 99.9 % a side. At the last look
99.5 % is enough for a PASS. It decides slow-downs alone; what it leaves open has no verdict. Three
pairs decide the peak of memory, one a count, five page faults.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, median_low, stdev

from pytest_gpumem.judging.differences import differences, measured_differently
from pytest_gpumem.judging.finding import Check, change, check_of
from pytest_gpumem.judging.footprint import judge_bytes, judge_waits
from pytest_gpumem.judging.limits import judge_count
from pytest_gpumem.judging.slowdown import PASSES, corrected_logs
from pytest_gpumem.limits import COMPARED, MAX_WAITS, PEAK, STEPS, TIME
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, quantile
from pytest_gpumem.records.row import Difference, LimitResult, Row
from pytest_gpumem.units import counted, format_share, parse_growth, parse_margin, sizes

LOOKS = (5, 8, 12, 20, 32)
"""Numbers of pairs after which a row is judged."""
LOOK = 0.999
"""Confidence of a look; five looks add up to 0.4 % a side."""
PEAKS = 3
"""Processes of each side whose peaks a duet compares."""


# The pairs of a time


@dataclass(frozen=True)
class Pairs:
    """The pairs of a row so far. Shares: +0.01 is 1 % slower."""

    log_ratios: tuple[float, ...]  # log(head / base) of each pair, in the order of measurement
    limit: float  # log(1 + `max_regression`)
    outcome: Outcome | None  # PASS or FAIL; UNDECIDED after the last look; None: more pairs

    @property
    def change(self) -> float:
        """Head over base less 1, by the mean of the pairs."""
        return math.expm1(fmean(self.log_ratios))

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval that the verdict rests on; infinite for fewer than two pairs."""
        if len(self.log_ratios) < 2:
            return -math.inf, math.inf
        low, high = _interval(self.log_ratios)
        return math.expm1(low), math.expm1(high)


def judge_pairs(log_ratios: Sequence[float], limit: float) -> Pairs:
    """Judge a row at each look that its pairs have reached. Arguments as of `Pairs`."""
    for look in LOOKS:
        if look > len(log_ratios):
            return Pairs(tuple(log_ratios), limit, None)
        seen = tuple(log_ratios[:look])
        low, high = _interval(seen)
        if low > limit:
            return Pairs(seen, limit, Outcome.FAIL)
        if high < limit:
            return Pairs(seen, limit, Outcome.PASS)
    return Pairs(tuple(log_ratios), limit, Outcome.UNDECIDED)


def _interval(log_ratios: Sequence[float]) -> tuple[float, float]:
    pairs = len(log_ratios)
    mean, deviation = fmean(log_ratios), stdev(log_ratios)
    passes = PASSES if pairs >= LOOKS[-1] else LOOK
    low = mean - quantile(LOOK, pairs - 1) * deviation / math.sqrt(pairs)
    return low, mean + quantile(passes, pairs - 1) * deviation / math.sqrt(pairs)


def of_pairs(check: Check, pairs: Pairs) -> LimitResult:
    """Return the finding about the pairs so far; UNDECIDED where they decide nothing."""
    text = f"{change(pairs.change)} over {counted(len(pairs.log_ratios), 'pair')} of processes"
    low, high = pairs.bounds
    if math.isfinite(low) and low != high:
        text += f", between {change(low)} and {change(high)}"
    limit = f"{check.name} {check.written}"
    if check.origin == "accepted":
        limit = f"the accepted {check.written}"
    if pairs.outcome is Outcome.PASS:
        return check.finding(Outcome.PASS, f"{text}: within {limit}")
    if pairs.outcome is Outcome.FAIL:
        return check.finding(Outcome.FAIL, f"{text}: slower than {limit} allows", Code.SLOWER)
    text += f": open at {limit}"
    if math.isfinite(high):
        text += f"; at {format_share(max(high, 0))} it would pass"
    return check.finding(Outcome.UNDECIDED, text, Code.NOISY)


def of_peaks(check: Check, head: Sequence[Footprint], base: Sequence[Footprint]) -> LimitResult:
    """Return the finding about the footprints of `PEAKS` processes a side, if all were watched."""
    watches = {footprint.driver_watched for footprint in (*base, *head)}
    if not (len(base) == len(head) == PEAKS and len(watches) == 1):
        return check.not_judged("memory was not watched alike on both sides", Code.NOT_READ)
    greatest = max(footprint.peak for footprint in base)
    middle = median_low(footprint.peak for footprint in head)
    middle_text, greatest_text = sizes(middle, greatest)
    figure = f"a peak of {middle_text} against {greatest_text} of base"
    if greatest:
        figure += f" ({change(middle / greatest - 1)})"
    most = parse_growth(check.written).most(greatest)
    finding = check.at_most(middle, most, figure, Code.TOO_MUCH_MEMORY)
    for footprint in head:
        result = judge_bytes(check, footprint, base)
        if finding.outcome is Outcome.PASS and result.code in (Code.CONDITIONS, Code.NOT_READ):
            return result
    return finding


# The rows of a duet


@dataclass
class DuetRow:
    """A row of a duet: its pairs of processes so far, and what they decide."""

    key: str
    nodeid: str = ""
    limits: Limits = field(default_factory=Limits)  # those that the duet judges
    may_differ: bool = False  # another way of measuring is accepted
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
        for name in COMPARED:
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
        if was and now:
            other = measured_differently(was, now)
            if other:
                reason = f"measured in another way, which may hide a slow-down: {other}"
                outcome = Outcome.ACCEPTED if self.may_differ else Outcome.FAIL
                self.end(outcome, reason, Code.MEASURED_DIFFERENTLY)
                return
        for check in self._open_checks():
            if check.name == TIME:
                if was and now:
                    self._judge_time(check, was, now)
                elif not was and not self.pairs:
                    self.decided[TIME] = check.new("base does not measure it")
            elif check.name != PEAK:
                result = _judge_count(check, base, head)
                # Page faults differ between processes.
                last = check.name in STEPS or len(self.base) == LOOKS[0]
                if last or result.outcome is not Outcome.FAIL:
                    self.decided[check.name] = result
            elif len(self.base) == PEAKS:
                self.decided[PEAK] = of_peaks(check, _footprints(self.head), _footprints(self.base))

    def _judge_time(self, check: Check, base: Measurement, head: Measurement) -> None:
        ratios: tuple[float, ...] = ()
        limit = math.log1p(parse_margin(check.written).over(base.latency))
        if self.pairs:
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
        if not self.ended:
            for check in self._open_checks():
                if check.name == TIME and self.pairs:
                    results.append(of_pairs(check, self.pairs))
                else:
                    results.append(check.not_judged("the duet ended before", Code.NOISY))
        return sorted(results, key=lambda result: result.outcome.rank)

    @property
    def outcome(self) -> Outcome | None:
        """None: there is nothing to compare."""
        if self.ended:
            return self.ended[0]
        results = self.results
        return results[0].outcome if results else Outcome.MEASURED

    @property
    def sentence(self) -> str:
        if self.ended:
            return self.ended[1]
        return "; ".join(result.reason for result in self.results)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What head did differently, if it fails."""
        if self.oldest:
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
        return int(median(peaks)) if peaks else 0


def _judge_count(check: Check, base: Row, head: Row) -> LimitResult:
    if base.measurement and head.measurement:
        return judge_count(check, head.measurement, [base.measurement], "base")
    was, now = base.footprint, head.footprint
    if check.name == MAX_WAITS and was and now and now.waits:
        return judge_waits(check, now.waits, [was], None, "base")
    return check.not_judged("it was not counted on both sides", Code.NOT_READ)


def _footprints(rows: Sequence[Row]) -> list[Footprint]:
    return [row.footprint for row in rows if row.footprint]


def _median_latency(rows: Sequence[Row]) -> float | None:
    latencies = [row.measurement.latency for row in rows if row.measurement]
    return median(latencies) if latencies else None
