"""What a duet judges of a gate's rows, what its verdicts change, and how the gate ends. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from statistics import fmean

from msgspec import structs

from pytest_gpumem.baselines.acceptances import NONE, Acceptances
from pytest_gpumem.baselines.references import Baseline, PastRow, memory_of, times_of
from pytest_gpumem.judging.duet import DuetRow
from pytest_gpumem.judging.expectations import LooserLimit, Selection, lost
from pytest_gpumem.judging.finding import failing_in_themselves, with_verdict
from pytest_gpumem.judging.footprint import peaks_of
from pytest_gpumem.judging.slowdown import against_reference
from pytest_gpumem.limits import EXACT, LIMITS, OF_MEASUREMENT, PEAK, TIME, relative
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import ACCEPTED, UNDECIDED, LimitResult, Omission, PairedChange, Row
from pytest_gpumem.reporting.conclusion import (
    THINGS,
    Conclusion,
    failing_text,
    grouped,
    missing_lines,
)
from pytest_gpumem.units import counted, parse_bytes, parse_growth

BY_NUMBER = tuple(name for name in OF_MEASUREMENT if name not in (TIME, *EXACT))
"""Limits on a time by a number, which no duet judges."""


# Before the duet


def limits_for_duet(
    rows: Sequence[Row], base: Selection, accepted: Acceptances
) -> dict[str, Limits]:
    """Return the limits that a duet decides, by row key: in doubt, "base", or accepted."""
    failing = failing_in_themselves(rows)
    limits = {}
    for row in rows:
        if row.nodeid in failing or base.lacks(row.nodeid) or not row.measured_something:
            continue
        compared, results = compared_limits(row), row.verdict.limits
        failed = {result.limit for result in results if result.outcome is Outcome.FAIL}
        if not failed.issubset(compared):
            continue  # no duet clears the others
        doubted = {result.limit for result in results if result.code is not Code.NOT_READ}
        doubted.update(relative(row.limits))
        if "" in doubted:  # about the whole measurement
            doubted.update(compared)
        values, origin = {}, dict(row.limits.origin)
        for name in compared:
            forgiving = accepted.forgiving(row.key, name)
            if name in doubted or forgiving is not None:
                values[name] = getattr(row.limits, name)
            # Memory is judged by its limit first, and a count without a limit needs none.
            if forgiving is not None and name != PEAK and forgiving[1].value != NONE:
                change = forgiving[1]
                values[name] = change.up_to if name == TIME else change.value
                origin[name] = "accepted"
        if values:
            limits[row.key] = Limits(**values, origin=origin)
    return limits


def compared_limits(row: Row) -> list[str]:
    names = []
    if row.measurement is not None and row.limits.max_regression is not None:
        names.append(TIME)
    if row.footprint is not None and row.limits.max_peak_regression is not None:
        names.append(PEAK)
    return names + relative(row.limits)


# After it


def with_duets(
    rows: Sequence[Row], duet: Mapping[str, DuetRow], accepted: Acceptances
) -> tuple[Row, ...]:
    """Return the rows with the verdicts of the duet, by row key."""
    failing = failing_in_themselves(rows)
    judged = []
    for row in rows:
        duet_row = duet.get(row.key)
        if duet_row is None or duet_row.outcome is Outcome.NEW or row.nodeid in failing:
            judged.append(row)
        else:
            judged.append(_with_duet(row, duet_row, accepted))
    # All rows of a test fail with one of them, and no longer once none does.
    failing.update(row.nodeid for row in judged if row.verdict.outcome is Outcome.FAIL)
    return tuple(structs.replace(row, failed=row.nodeid in failing) for row in judged)


def _with_duet(row: Row, duet_row: DuetRow, accepted: Acceptances) -> Row:
    results = [_up_to_accepted(row.key, result, duet_row, accepted) for result in duet_row.results]
    if not results:
        results.append(LimitResult("", Outcome.UNDECIDED, None, duet_row.sentence))
    judged = {result.limit for result in results}
    if "" in judged:
        judged.update(compared_limits(row))
    # A doubt about the session's conditions stays for limits by a number alone.
    if all(getattr(row.limits, name) is None for name in BY_NUMBER):
        judged.add("")
    results += [result for result in row.verdict.limits if result.limit not in judged]
    differing = duet_row.differences or row.differences
    row = structs.replace(with_verdict(row, results), differences=differing)
    pairs = duet_row.pairs
    if pairs is None or len(pairs.log_ratios) < 2:
        return row
    count = len(pairs.log_ratios)
    paired = PairedChange(pairs.change, *pairs.bounds, count, *duet_row.latencies)
    return structs.replace(row, verdict=structs.replace(row.verdict, paired=paired))


def _up_to_accepted(
    key: str, result: LimitResult, duet_row: DuetRow, accepted: Acceptances
) -> LimitResult:
    """Return the finding of a duet, or ACCEPTED where the change goes as far as is accepted."""
    limit, forgiving = result.limit, accepted.forgiving(key, result.limit)
    if result.code is Code.MEASURED_DIFFERENTLY:
        limit, forgiving = TIME, accepted.of(key, "measured")
    if forgiving is None:
        return result
    file, change = forgiving
    # The duet judged time and counts up to what is accepted.
    within = result.outcome is Outcome.PASS
    if change.figure == "memory" and result.outcome is Outcome.FAIL:
        within = duet_row.head_peak <= parse_bytes(change.up_to or "")
    elif change.figure == "measured" or change.value == NONE:
        within = True
    if not within:
        return result
    reason = f"{limit} accepted {file.why}; {result.reason}"
    return LimitResult(limit, Outcome.ACCEPTED, result.code, reason)


# Against the oldest revision of the reference


def crept_limits(
    row: Row, duet_row: DuetRow, accepted: Acceptances, baseline: Baseline
) -> dict[str, Limits]:
    """Return the limits that a row exceeds over its reference, by the reference's oldest revision.

    Those that fail against BASE are left out.
    """
    oldest: dict[str, PastRow] = {}  # by limit, the first run of the reference
    pairs = duet_row.pairs
    if pairs is not None and pairs.outcome in (Outcome.PASS, Outcome.UNDECIDED):
        runs = baseline.reference_runs(row)
        changes, times = [], times_of(runs)
        for head in duet_row.head:
            if times and head.measurement is not None:
                changes.append(against_reference(head.measurement, times).log_ratio)
        if changes and fmean(changes) > pairs.limit:
            oldest[TIME] = runs[0]
    growth, peak = row.limits.max_peak_regression, duet_row.decided.get(PEAK)
    if growth is not None and peak is not None and peak.outcome is Outcome.PASS:
        runs = baseline.reference_runs(row, "memory")
        peaks = [max(peaks_of(footprint)) for footprint in memory_of(runs)]
        if peaks and duet_row.head_peak > parse_growth(growth).most(max(peaks)):
            oldest[PEAK] = runs[0]
    limits: dict[str, Limits] = {}
    for name, run in oldest.items():
        if accepted.forgiving(row.key, name) is None:
            revision = str(run.file.revision)
            of_row = limits.get(revision, Limits(origin=row.limits.origin))
            limits[revision] = structs.replace(of_row, **{name: getattr(row.limits, name)})
    return limits


def with_creep(row: DuetRow, limits: Limits, oldest: DuetRow) -> DuetRow:
    """Return a row of a duet with BASE, after one with the oldest revision, about `limits`."""
    decided = dict(row.decided)
    for result in oldest.results:
        reason = f"against the oldest revision of the reference: {result.reason}"
        code = Code.CREPT if result.outcome is Outcome.FAIL else result.code
        decided[result.limit] = LimitResult(result.limit, result.outcome, code, reason)
    if not oldest.results:
        reason = f"beyond its limit over the reference, whose oldest revision: {oldest.sentence}"
        for name, looks in ((TIME, Code.LOOKS_SLOWER), (PEAK, None)):
            if getattr(limits, name) is not None:
                decided[name] = LimitResult(name, Outcome.UNDECIDED, looks, reason)
    return replace(oldest if oldest.pairs else row, decided=decided, oldest=oldest)


# The end of a gate


class State(Enum):
    """What became of a row."""

    FAILED = "failed"
    ERROR = "error"  # of its test
    OPEN = "open"
    NEW = "new"
    NOT_SHOWN = "not shown by a simulated device"
    ACCEPTED = "accepted"
    MEASURED = "measured"
    PASSED = "passed"


NO_PASS = (State.OPEN, State.NEW, State.NOT_SHOWN)
"""States of rows that are not green under --strict. OPEN is no verdict without it, too."""
NOTHING = (
    "nothing was measured: no test uses gpu_benchmark or works on a GPU; see "
    "docs/how-to/write-a-test.md"
)


def conclude(
    session_code: int,
    head: Selection,
    rows: Sequence[Row] = (),
    missing: Sequence[Omission] = (),
    looser: Sequence[LooserLimit] = (),
    new: Collection[str] = (),
    *,
    accepted: Sequence[tuple[LooserLimit, str]] = (),
    strict: bool = False,
    real_devices: Sequence[str] = (),
    simulated: bool = False,
) -> Conclusion:
    """Return the end of a gate, without advice.

    `session_code`: pytest's exit code. `head`: what the session says of its tests.
    `new`: keys of the rows that BASE does not have.
    `accepted`: looser limits that are accepted, each with "(who: reason)".
    `strict`: green takes a PASS of every row with a limit, on a real GPU.
    `real_devices`: GPUs of the baseline, where the device is simulated and the user did not say so.
    """
    states: dict[State, list[Row]] = {state: [] for state in State}
    for row in rows:
        states[state_of(row, new)].append(row)
    failures, unrun = head.failures, head.unrun
    errors = {nodeid: why for nodeid, why in failures.items() if nodeid not in unrun}
    reasons = []
    for key, limit, was, now in looser:
        words = f"{limit} {was} → {now or 'none'} in this change ({was} holds)"
        reasons.append(("limit of", "test", key, words))
    for (key, limit, was, now), why in accepted:
        reasons.append(("accepted:", "test", key, f"{limit} {was} → {now or 'none'} {why}"))
    for row in states[State.NEW]:
        reasons.append(("NEW", "row", row.key, "base does not have it"))
    for row in (*states[State.OPEN], *states[State.ACCEPTED]):
        reasons.append((row.verdict.outcome.word, "row", row.key, row.verdict.reason))
    remarks = missing_lines(missing) + grouped(reasons)
    all_rows = counted(len(rows), "row")

    def end(code: int, *causes: str) -> Conclusion:
        return Conclusion(
            code, causes, rows, missing, tuple(remarks), errors=errors, simulated=simulated
        )

    # The session came to no rows, or not to its end
    causes = _lost(missing)
    if session_code == Exit.NO_VERDICT:
        return end(session_code, "a part of the plugin raised by mistake; its output names it")
    if session_code not in (Exit.FINE, Exit.FAILED, Exit.NO_TESTS):
        return end(Exit.FAILED, *causes, f"pytest ended with {session_code} before its tests did")
    if session_code == Exit.FAILED and not rows:
        return end(Exit.FAILED, *causes, "tests failed, and nothing was measured")
    if session_code == Exit.NO_TESTS or not rows:
        causes.append("no tests were collected" if session_code == Exit.NO_TESTS else NOTHING)
        return end(Exit.FAILED if len(causes) > 1 else Exit.NO_VERDICT, *causes)

    # Red
    failed = states[State.FAILED]
    if failed:
        causes.append(failing_text(failed, rows))
    if looser:
        tests = {change.key for change in looser}
        causes.append(f"looser limits of {counted(len(tests), 'test')}")
    by_error = {row.nodeid for row in states[State.ERROR] if row.measured_something}
    by_error -= {row.nodeid for row in failed}
    others = set(errors) - {row.nodeid for row in rows if row.measured_something}
    for count, what in (
        (len(by_error), "failed by an assertion or an error"),
        (len(others), "failed without a measurement"),
        (len(failures) - len(errors), "did not run"),
    ):
        if count:
            causes.append(f"{counted(count, 'test')} {what}")
    if not causes and session_code == Exit.FAILED and not failures:
        causes.append("pytest failed the session as a whole; its output says why")
    if causes:
        return end(Exit.FAILED, *causes)

    # No verdict
    if not any(getattr(row.limits, name) is not None for row in rows for name in LIMITS):
        return end(Exit.NO_VERDICT, "no row has a limit; --max-regression sets one for all")
    if states[State.OPEN]:
        causes.append(f"{len(states[State.OPEN])} of {all_rows} open")
    unjudged = sum(omission.status == UNDECIDED for omission in missing)
    if unjudged:
        causes.append(f"{unjudged} not judged")
    if real_devices:
        causes.append(
            f"the device is simulated, and the baseline is of {', '.join(real_devices)}; "
            "-- --gpumem-device sim chooses the simulated device"
        )
    if strict and not causes:
        no_pass = sum(len(states[state]) for state in NO_PASS)
        if no_pass:
            causes.append(f"under --strict, {no_pass} of {all_rows} without a PASS")
        elif simulated:
            causes.append("under --strict, the device is simulated")
    if causes:
        return end(Exit.NO_VERDICT, *causes)

    # Green
    free = sum(row.measurement is not None and row.limits.max_regression is None for row in rows)
    if free:
        remarks.append(
            f"no max_regression for {free} of {all_rows}, so no slow-down there is detected; "
            "see --max-regression"
        )
    text = all_rows
    for state in (State.NEW, State.NOT_SHOWN, State.ACCEPTED, State.MEASURED):
        if states[state]:
            text += f", {len(states[state])} of them {state.value}"
    gone = sum(omission.status == ACCEPTED for omission in missing)
    for count, what in ((gone, "lost row"), (len(accepted), "looser limit")):
        if count:
            text += f"; {counted(count, what)} accepted"
    return end(Exit.FINE, text)


def _lost(missing: Sequence[Omission]) -> list[str]:
    counts = Counter(THINGS.get(omission.what, "limit") for omission in lost(missing))
    parts = [counted(count, thing) for thing, count in counts.items()]
    return [f"{' and '.join(parts)} lost"] if parts else []


def state_of(row: Row, new: Collection[str]) -> State:
    verdict = row.verdict
    fails = verdict.outcome is Outcome.FAIL
    if fails and row.measured_something and not row.test_error:
        return State.FAILED
    if row.failed or fails:
        return State.ERROR
    if verdict.outcome in (Outcome.NEW, Outcome.UNDECIDED):
        doubts = {result.limit for result in verdict.limits}
        if doubts <= set(compared_limits(row)) and row.key in new:
            return State.NEW  # there is nothing to compare with
        codes = {result.code for result in verdict.limits} or {verdict.code}
        not_shown = verdict.simulated and codes == {Code.NOT_READ}
        return State.NOT_SHOWN if not_shown else State.OPEN
    if verdict.outcome is Outcome.ACCEPTED:
        return State.ACCEPTED
    return State.PASSED if verdict.outcome is Outcome.PASS else State.MEASURED
