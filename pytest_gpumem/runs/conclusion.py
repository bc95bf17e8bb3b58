"""The end of a gate: what became of each row, the exit code, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from msgspec import structs

from pytest_gpumem.judging.expectations import LooserLimit, lost
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.limits import LIMITS
from pytest_gpumem.outcomes import Code, Exit, Outcome
from pytest_gpumem.records.row import (
    ACCEPTED,
    DID_NOT_RUN,
    NOT_RUN,
    ROW,
    TEST,
    UNJUDGED,
    Omission,
    Row,
    did_not_run,
)
from pytest_gpumem.reporting.conclusion import Conclusion, failing_text
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.runs.open_rows import compared_limits
from pytest_gpumem.runs.pairs import PEAK, TIME
from pytest_gpumem.runs.session import SessionResult
from pytest_gpumem.units import format_share, short_bytes


class State(Enum):
    """What became of a row."""

    FAILED = "failed"
    ERROR = "its test failed by an assertion or an error"
    OPEN = "open"
    NEW = "new"
    NOT_SHOWN = "not shown by a simulated device"
    ACCEPTED = "accepted"
    MEASURED = "measured"
    PASSED = "passed"


NO_PASS = (State.OPEN, State.NEW, State.NOT_SHOWN)
"""States of rows that are not green under --strict. OPEN is no verdict without it, too."""
NO_ROWS = {
    Exit.USAGE: "pytest did not accept its arguments, its settings or the device",
    Exit.NO_TESTS: "no tests were collected",
    Exit.NO_VERDICT: "a part of the plugin raised by mistake; its output names it",
}
"""What it means for a gate that its session ends with such a code."""


def conclude(
    session: SessionResult,
    rows: Sequence[Row],
    missing: Sequence[Omission],
    looser: Sequence[LooserLimit],
    new: Collection[str],
    *,
    strict: bool,
    strict_session: bool = False,
    real_devices: Sequence[str] = (),
) -> Conclusion:
    """Return the end of a gate, without advice.

    `rows`, `missing`: of the session, after the duet.
    `looser`: limits that the change loosens and does not accept.
    `new`: keys of the rows that BASE does not have.
    `strict`: green takes a PASS of every row with a limit, on a real GPU.
    `strict_session`: the session failed every row in doubt.
    `real_devices`: GPUs of the baseline, where the device is simulated and the user did not say so.
    """
    states: dict[State, list[Row]] = {state: [] for state in State}
    for row in rows:
        states[state_of(row, new, strict=strict_session)].append(row)
    remarks = [*looser_lines(looser), *missing_lines(missing)]
    remarks += [f"new, base does not have it: {row.key}" for row in states[State.NEW]]
    for row in (*states[State.OPEN], *states[State.ACCEPTED]):
        remarks.append(f"{row.verdict.outcome.word} {row.key}: {row.verdict.reason}")
    lost_omissions = lost(missing)
    code, causes = _early_end(session, rows)
    if causes:
        if lost_omissions and session.code not in (Exit.USAGE, Exit.NO_VERDICT):
            code, causes = Exit.FAILED, [_lost_text(lost_omissions), *causes]
    else:
        code, causes = Exit.FAILED, _failures(session, states, rows, lost_omissions, looser)
    if not causes:
        code, causes = Exit.NO_VERDICT, _no_verdict(states, rows, missing)
    if not causes and real_devices:
        causes = [
            f"the device is simulated, and the baseline is of {', '.join(real_devices)}; "
            "-- --gpumem-device sim chooses the simulated device"
        ]
    if not causes and strict:
        causes = _not_strict(states, rows)
    if not causes:
        code, causes = Exit.FINE, [_green(states, rows, missing)]
        free = 0
        for row in rows:
            free += row.measurement is not None and row.limits.max_regression is None
        if free:
            remarks.append(
                f"no max_regression for {free} of {counted(len(rows), 'row')}, so no slow-down "
                "there is detected; see --max-regression"
            )
    simulated = session.document is not None and session.document.device.simulated
    return Conclusion(
        code,
        tuple(causes),
        tuple(rows),
        tuple(missing),
        tuple(remarks),
        errors=errors_of(session),
        simulated=simulated,
    )


def state_of(row: Row, new: Collection[str], *, strict: bool) -> State:
    """Return what became of a row. Arguments as of `conclude`."""
    verdict = row.verdict
    if row.failed or is_failure(verdict, strict):
        by_figures = row.measured_something and is_failure(verdict, strict)
        return State.FAILED if by_figures and row.test_error is not True else State.ERROR
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


def _early_end(session: SessionResult, rows: Sequence[Row]) -> tuple[int, list[str]]:
    """The exit code and why, where the session came to no rows or not to its end."""
    code = session.code
    if code in NO_ROWS:
        return Exit.USAGE if code == Exit.USAGE else Exit.NO_VERDICT, [NO_ROWS[Exit(code)]]
    if code not in (Exit.FINE, Exit.FAILED):
        return Exit.FAILED, [f"pytest ended with {code} before its tests did"]
    if rows:
        return code, []
    if code == Exit.FAILED:
        return Exit.FAILED, ["tests failed, and nothing was measured"]
    return Exit.NO_VERDICT, ["nothing was measured"]


def errors_of(session: SessionResult) -> dict[str, str]:
    """Return the failures of a session but those of tests that another one kept from running."""
    errors = {}
    for nodeid, message in session.failures.items():
        if DID_NOT_RUN not in message:
            errors[nodeid] = message
    return errors


def _failures(
    session: SessionResult,
    states: Mapping[State, Sequence[Row]],
    rows: Sequence[Row],
    lost_omissions: Sequence[Omission],
    looser: Sequence[LooserLimit],
) -> list[str]:
    """What makes a gate red."""
    causes = []
    if lost_omissions:
        causes.append(_lost_text(lost_omissions))
    failed = states[State.FAILED]
    if failed:
        causes.append(failing_text(failed, rows))
    if looser:
        tests = {change.key for change in looser}
        causes.append(f"looser limits of {counted(len(tests), 'test')}")
    by_error = {row.nodeid for row in states[State.ERROR] if not did_not_run(row)}
    by_error -= {row.nodeid for row in failed}
    if by_error:
        tests_text = counted(len(by_error), "test")
        causes.append(f"{tests_text} failed by an assertion or an error of its own")
    others = set(errors_of(session)) - {row.nodeid for row in rows}
    if others:
        causes.append(f"{counted(len(others), 'test')} failed without a measurement")
    not_run = len(session.failures) - len(errors_of(session))
    if not_run:
        causes.append(f"{counted(not_run, 'test')} did not run")
    if not causes and session.code == Exit.FAILED and not session.failures:
        causes.append("pytest failed the session as a whole; its output says why")
    return causes


def _no_verdict(
    states: Mapping[State, Sequence[Row]], rows: Sequence[Row], missing: Sequence[Omission]
) -> list[str]:
    """Why a gate without a failure gives no verdict; empty if it gives one."""
    if not any(getattr(row.limits, name) is not None for row in rows for name in LIMITS):
        return ["no row has a limit; --max-regression sets one for all"]
    causes = []
    if states[State.OPEN]:
        causes.append(f"{len(states[State.OPEN])} of {counted(len(rows), 'row')} open")
    unjudged = sum(omission.status == UNJUDGED for omission in missing)
    if unjudged:
        causes.append(f"{counted(unjudged, 'limit')} judged by nothing")
    return causes


def _not_strict(states: Mapping[State, Sequence[Row]], rows: Sequence[Row]) -> list[str]:
    """Why a gate without a failure is not green under --strict."""
    doubtful = sum(len(states[state]) for state in NO_PASS)
    if doubtful:
        verb = "is" if doubtful == 1 else "are"
        return [f"under --strict, {doubtful} of {counted(len(rows), 'row')} {verb} no PASS"]
    if any(row.verdict.simulated for row in rows):
        return ["under --strict, the device is simulated"]
    return []


def _green(
    states: Mapping[State, Sequence[Row]], rows: Sequence[Row], missing: Sequence[Omission]
) -> str:
    """What the change accepts, such as "ACCEPTED: test_a.py::test_x +8.41 %", else the rows."""
    accepted = []
    for row in rows:
        for limit in row.verdict.accepted:
            figure = limit
            if limit == TIME and row.verdict.paired is not None:
                figure = format_share(row.verdict.paired.change, sign=True)
            elif limit == PEAK and row.footprint is not None:
                figure = f"a peak of {short_bytes(row.footprint.peak)}"
            accepted.append(f"{row.key} {figure}")
    for omission in missing:
        if omission.status == ACCEPTED:
            accepted.append(f"{omission.key} {omission.reason}")
    if accepted:
        return f"ACCEPTED: {', '.join(accepted)}"
    text = counted(len(rows), "row")
    for state in (State.NEW, State.NOT_SHOWN, State.ACCEPTED, State.MEASURED):
        if states[state]:
            text += f", {len(states[state])} of them {state.value}"
    return text


def _lost_text(omissions: Sequence[Omission]) -> str:
    """Return "1 measurement of the baseline, 2 tests and 1 limit lost"."""
    counts = Counter(
        omission.what if omission.what in (ROW, TEST) else "" for omission in omissions
    )
    parts = []
    if counts[ROW]:
        parts.append(f"{counted(counts[ROW], 'measurement')} of the baseline")
    if counts[TEST]:
        parts.append(counted(counts[TEST], "test"))
    if counts[""]:
        parts.append(counted(counts[""], "limit"))
    return f"{' and '.join(parts)} lost"


def looser_lines(looser: Sequence[LooserLimit]) -> list[str]:
    """Return lines about the limits that a change loosens; tests with the same change share one."""
    tests: dict[tuple[str, str, str | None], list[str]] = {}
    for change in looser:
        tests.setdefault((change.limit, change.was, change.now), []).append(change.key)
    lines = []
    for (limit, was, now), keys in tests.items():
        which = keys[0] if len(keys) == 1 else counted(len(keys), "test")
        lines.append(
            f"limit of {which}: {limit} {was} -> {now or 'none'} in this change ({was} holds)"
        )
    return lines


def may_be_excused(omission: Omission) -> bool:
    """Return whether BASE may skip a test too: what the baseline holds, this GPU measured."""
    return omission.skipped and omission.what != ROW


def excused(
    missing: Sequence[Omission], skipped_in_base: Collection[str], name: str
) -> list[Omission]:
    """Return what was not judged. A test that skips while it runs is no loss if BASE skips it too.

    `skipped_in_base`: node ids.
    """
    after = []
    for omission in missing:
        if may_be_excused(omission) and omission.nodeid in skipped_in_base:
            reason = f"{name} skips it too"
            after.append(structs.replace(omission, status=NOT_RUN, reason=reason, base_too=True))
        else:
            after.append(omission)
    return after
