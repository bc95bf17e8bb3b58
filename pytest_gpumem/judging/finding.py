"""The way from a limit to the verdict on a row, and to the failure of its test. Pure.

A `Check` is a limit that is judged. A finding about it is a `LimitResult`, whose sentence no
program reads; `judging.limits` has those about a measurement. All findings about a row make
its verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pytest_gpumem.limits import BASE, LIMITS, OF_FOOTPRINT, count_of
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, Window
from pytest_gpumem.records.row import Comparison, LimitResult, Row, Verdict
from pytest_gpumem.units import counted, format_share, short_bytes

L2_MULTIPLES = 4  # footprint over L2 from which on bytes must come from DRAM


@dataclass(frozen=True)
class Check:
    name: str
    written: str  # its value
    origin: str  # where it was written, such as "marker"

    @property
    def limit(self) -> str:
        """The limit in words: "max_waits 0 (marker)"."""
        return f"{self.name} {self.written} ({self.origin})"

    def finding(self, outcome: Outcome, reason: str, code: Code | None = None) -> LimitResult:
        return LimitResult(self.name, outcome, code, reason)

    def new(self, why: str) -> LimitResult:
        return self.finding(Outcome.NEW, f"nothing to compare with: {why}", Code.NO_BASELINE)

    def not_judged(
        self, why: str, code: Code | None = None, outcome: Outcome = Outcome.UNDECIDED
    ) -> LimitResult:
        return self.finding(outcome, f"{self.limit} cannot be judged: {why}", code)

    def never(self, why: str) -> LimitResult:
        """Return the FAIL of a limit that the measurement can never meet."""
        return self.not_judged(why, outcome=Outcome.FAIL)

    def at_most(self, count: int, most: int, figure: str, code: Code | None = None) -> LimitResult:
        """Return the finding about an exact count; `figure` has it in words. `code`: of a FAIL."""
        if count <= most:
            return self.finding(Outcome.PASS, f"{figure}, not above {self.limit}")
        more = str(count - most)
        if LIMITS[self.name].metavar != "NUMBER":
            more = short_bytes(count - most)
        return self.finding(Outcome.FAIL, f"{figure}, above {self.limit} by {more}", code)

    def of_count(self, count: int, figure: str, past: Sequence[int], why_new: str) -> LimitResult:
        """Return the finding about an exact count; a number or the saved counts `past` limit it."""
        if self.written != BASE:
            return self.at_most(count, count_of(self.written), figure)
        if not past:
            return self.new(why_new)
        return self.at_most(count, max(past), figure)


def check_of(limits: Limits, name: str) -> Check | None:
    written = getattr(limits, name)
    return None if written is None else Check(name, written, limits.origin.get(name, "limit"))


def no_share_of_peak(measurement: Measurement, facts: DeviceFacts) -> str | None:
    """Return why a share of the device's DRAM peak means nothing; None if it means something."""
    if measurement.moved_bytes is None:
        return "its traffic is unknown (give `moved=`)"
    if measurement.moved_bytes.link:
        return "its bytes cross the host link, not the memory bus"
    if measurement.mode == "hot":
        return "in hot mode L2 serves what it can"
    if measurement.footprint is None:
        return "its footprint is unknown"
    if measurement.footprint < L2_MULTIPLES * facts.l2_bytes:
        least = short_bytes(L2_MULTIPLES * facts.l2_bytes)
        return f"its footprint is below {least}, {L2_MULTIPLES} x L2"
    if not facts.dram_peak:
        return "the peak is unknown (the driver reports no memory clock or no bus width)"
    return None


def share_of_peak(measurement: Measurement, facts: DeviceFacts) -> float | None:
    """Return bandwidth over the DRAM peak, or None where `no_share_of_peak` has a reason."""
    if measurement.bandwidth is None or no_share_of_peak(measurement, facts) is not None:
        return None
    return measurement.bandwidth / facts.dram_peak


def basis(measurement: Measurement) -> str:
    """The data of a figure: "1600 samples on 8 placements"."""
    samples, placements = len(measurement.samples), len(measurement.placements)
    return f"{counted(samples, 'sample')} on {counted(placements, 'placement')}"


def mark(simulated: bool) -> str:
    """What follows everything that says nothing about a GPU."""
    return " (simulated)" if simulated else ""


def window_text(window: Window | None) -> str:
    """Such as "8 MiB at hit ratio 1 and a set-aside of 9 MiB", or "none"."""
    if window is None:
        return "none"
    parts = [short_bytes(window.nbytes)]
    if window.offset:
        parts.append(f"from {short_bytes(window.offset)} on")
    if window.hit != "persisting":
        parts.append(f"with the hit property {window.hit}")
    if window.miss != "streaming":
        parts.append(f"with the miss property {window.miss}")
    set_aside = short_bytes(window.set_aside)
    parts.append(f"at hit ratio {window.hit_ratio:.3g} and a set-aside of {set_aside}")
    return " ".join(parts)


def change(share: float) -> str:
    """Return "+1.20 %": a change of a latency; slower is positive."""
    # A share below a millionth is the rounding error of equal figures.
    return format_share(share if abs(share) > 1e-6 else 0.0, sign=True)


def against(comparison: Comparison) -> str:
    processes = counted(comparison.processes, "saved process")
    days = counted(comparison.days, "day")
    return f"{change(comparison.change)} against {processes} of {days}"


# The verdict on a row: no other module makes or changes a verdict


def unjudged(*, simulated: bool) -> Verdict:
    """Return the verdict of a row before any finding, which stays that of a row without limits."""
    return Verdict(Outcome.MEASURED, "no limit set", simulated=simulated)


def with_verdict(row: Row, findings: Iterable[LimitResult], *, strict: bool = False) -> Row:
    """Return the row with the verdict that follows from all findings about it.

    `findings`: with `known(row)`, if the row has a verdict already.
    `strict`: the reason of a doubt says that it fails.
    """
    comparison = row.verdict.comparison
    by_outcome: dict[Outcome, list[LimitResult]] = {outcome: [] for outcome in Outcome}
    for result in findings:
        by_outcome[result.outcome].append(result)
    accepted, passed = by_outcome[Outcome.ACCEPTED], by_outcome[Outcome.PASS]
    doubts = by_outcome[Outcome.FAIL] + by_outcome[Outcome.UNDECIDED] + by_outcome[Outcome.NEW]
    doubts.sort(key=_order)
    # The reason leaves out what passed, unless there is nothing else to say.
    reported = [*accepted, *doubts] or passed or by_outcome[Outcome.MEASURED]
    reported = reported or [_measured(comparison, row.limits)]
    # The worst doubt goes before ACCEPTED, which says that all other limits hold.
    decisive = doubts[0] if doubts else reported[0]
    outcome, code = decisive.outcome, decisive.code
    reasons = dict.fromkeys(result.reason for result in reported if result.reason)
    reason = "; ".join(reasons) or row.verdict.reason
    if strict and outcome in (Outcome.UNDECIDED, Outcome.NEW):
        reason += " (strict: this fails)"
    verdict = Verdict(
        outcome,
        reason,
        comparison,
        row.verdict.simulated,
        code,
        tuple(doubts),
        tuple(dict.fromkeys(result.limit for result in accepted)),
        row.verdict.paired,
    )
    return replace(row, verdict=verdict)


def in_doubt(row: Row, why: str) -> Row:
    return with_verdict(row, [LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, why)])


def without_verdict(row: Row, end: str) -> Row:
    """Return the row of a test that ended in another way than it was judged: "skipped"."""
    if row.verdict.code is Code.CONDITIONS:
        return row
    reason = f"the test {end} after this measurement"
    if row.verdict.outcome is Outcome.FAIL:
        reason += f" (FAIL: {row.verdict.reason})"
    return in_doubt(row, reason)


def known(row: Row) -> tuple[LimitResult, ...]:
    """Return the findings of a row's verdict: a verdict does not keep those that passed."""
    verdict = row.verdict
    accepted = []
    for name in verdict.accepted:
        accepted.append(LimitResult(name, Outcome.ACCEPTED, None, f"{name} accepted"))
    if verdict.limits:
        return (*accepted, *verdict.limits)
    # No doubt: the verdict's reason stands for all, and `with_verdict` writes it once.
    results = []
    for name in verdict.accepted or ("",):
        results.append(LimitResult(name, verdict.outcome, verdict.code, verdict.reason))
    return tuple(results)


def _order(result: LimitResult) -> tuple[int, bool]:
    # A FAIL by memory sorts first (False is below True), so that the verdict has its code: a duet
    # may clear a slow-down.
    of_memory = result.outcome is Outcome.FAIL and result.limit in OF_FOOTPRINT
    return result.outcome.rank, not of_memory


def _measured(comparison: Comparison | None, limits: Limits) -> LimitResult:
    reason = "no limit set"
    if comparison is not None and limits.max_regression is None:
        reason = f"{against(comparison)}, no limit set"
    elif comparison is not None:
        limit = f"max_regression {limits.max_regression}"
        reason = f"{against(comparison)}: {limit} is judged at the session's end"
    return LimitResult("", Outcome.MEASURED, None, reason)


# Whether a test fails


def is_failure(judged: Verdict | LimitResult, strict: bool) -> bool:
    """True if a test with this verdict fails: on FAIL, and under `strict` on every doubt."""
    if judged.outcome is Outcome.FAIL:
        return True
    return strict and not judged.outcome.quiet and judged.outcome is not Outcome.ACCEPTED


def failing_in_themselves(rows: Sequence[Row]) -> set[str]:
    """Return the node ids of tests that fail by an assertion or an error, and not by a verdict."""
    # A strict session fails doubts too.
    by_verdict = {row.nodeid for row in rows if is_failure(row.verdict, strict=True)}
    failing = set()
    for row in rows:
        if row.test_error or (row.failed and row.nodeid not in by_verdict):
            failing.add(row.nodeid)
    return failing


def failed_before(rows: Sequence[Row], attempts: Sequence[Sequence[Row]]) -> dict[str, Row]:
    """Return by key the rows whose FAIL of an earlier attempt is kept: a rerun clears none."""
    now, kept = {row.key: row for row in rows}, dict[str, Row]()
    for number, attempt in enumerate(attempts):
        for before in attempt:
            row = kept.get(before.key) or now.get(before.key)
            failed = before.verdict.outcome is Outcome.FAIL and before.measured_something
            if failed and (row is None or row.verdict.outcome is not Outcome.FAIL):
                first, *findings = known(before)
                first = replace(first, reason=f"FAIL in attempt {number}: {first.reason}")
                verdict = with_verdict(before, [first, *findings]).verdict
                differences = before.differences
                kept[before.key] = replace(row or before, verdict=verdict, differences=differences)
    return kept
