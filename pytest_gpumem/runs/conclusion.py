"""The end of a gate: what became of each row, the exit code, and why. Pure."""

from __future__ import annotations

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
    ended = _ended_early(session, rows)
    lost_ones = lost(missing)
    if ended is not None:
        code, causes = ended[0], [ended[1]]
        if lost_ones and session.code not in (Exit.USAGE, Exit.NO_VERDICT):
            code, causes = Exit.FAILED, [f"{_counted_lost(lost_ones)} lost", *causes]
        return _conclusion(session, code, causes, rows, missing, missing_lines(missing))
    states: dict[State, list[Row]] = {state: [] for state in State}
    for row in rows:
        states[state_of(row, new, strict=strict_session)].append(row)
    remarks = [*looser_lines(looser), *missing_lines(missing)]
    remarks += [f"new, base does not have it: {row.key}" for row in states[State.NEW]]
    for row in (*states[State.OPEN], *states[State.ACCEPTED]):
        remarks.append(f"{row.verdict.outcome.word} {row.key}: {row.verdict.reason}")

    causes = _failures(session, states, rows, lost_ones, looser)
    code = Exit.FAILED
    if not causes:
        code, causes = Exit.NO_VERDICT, _no_verdict(states, rows, missing, real_devices)
    if not causes and strict:
        causes = _not_strict(states, rows)
    if not causes:
        code, causes = Exit.FINE, [_green(states, rows)]
        accepted = _accepted_in_words(rows, missing)
        if accepted:
            causes = [f"ACCEPTED: {', '.join(accepted)}"]
        remarks += _without_limit(rows)
    return _conclusion(session, code, causes, rows, missing, remarks)


def _conclusion(
    session: SessionResult,
    code: int,
    causes: Sequence[str],
    rows: Sequence[Row],
    missing: Sequence[Omission],
    remarks: Sequence[str],
) -> Conclusion:
    errors = {}
    for failure in session.failures:
        if not failure.not_run:
            errors[failure.nodeid] = failure.message
    return Conclusion(
        code,
        tuple(causes),
        tuple(rows),
        tuple(missing),
        tuple(remarks),
        errors=errors,
        simulated=session.document is not None and session.document.device.simulated,
    )


def state_of(row: Row, new: Collection[str], *, strict: bool) -> State:
    """Return what became of a row. Arguments as of `conclude`."""
    verdict = row.verdict
    if row.failed or is_failure(verdict, strict):
        by_figures = row.measured_something and is_failure(verdict, strict)
        return State.FAILED if by_figures and row.test_error is not True else State.ERROR
    doubts = {result.limit for result in verdict.limits}
    only_compared = doubts <= set(compared_limits(row))
    doubtful = verdict.outcome in (Outcome.NEW, Outcome.UNDECIDED)
    if doubtful and only_compared and row.key in new:
        return State.NEW  # there is nothing to compare with
    if verdict.outcome is Outcome.NEW:
        return State.OPEN
    if verdict.outcome is Outcome.UNDECIDED:
        codes = {result.code for result in verdict.limits} or {verdict.code}
        not_shown = verdict.simulated and codes == {Code.NOT_READ}
        return State.NOT_SHOWN if not_shown else State.OPEN
    if verdict.outcome is Outcome.ACCEPTED:
        return State.ACCEPTED
    return State.PASSED if verdict.outcome is Outcome.PASS else State.MEASURED


def _ended_early(session: SessionResult, rows: Sequence[Row]) -> tuple[Exit, str] | None:
    """The exit code and the cause where the session came to no rows or not to its end."""
    code = session.code
    if code == Exit.USAGE:
        return Exit.USAGE, "pytest did not accept its arguments, its settings or the device"
    if code == Exit.NO_TESTS:
        return Exit.NO_VERDICT, "no tests were collected"
    if code == Exit.NO_VERDICT:
        return Exit.NO_VERDICT, "a part of the plugin raised by mistake; its output names it"
    if code not in (Exit.FINE, Exit.FAILED):
        return Exit.FAILED, f"pytest ended with {code} before its tests did"
    if rows:
        return None
    if code == Exit.FAILED:
        return Exit.FAILED, "tests failed, and nothing was measured"
    return Exit.NO_VERDICT, "nothing was measured"


def _failures(
    session: SessionResult,
    states: Mapping[State, Sequence[Row]],
    rows: Sequence[Row],
    lost_ones: Sequence[Omission],
    looser: Sequence[LooserLimit],
) -> list[str]:
    """What makes a gate red."""
    causes = []
    if lost_ones:
        causes.append(f"{_counted_lost(lost_ones)} lost")
    failed = states[State.FAILED]
    if failed:
        causes.append(failing_text(failed, rows))
    if looser:
        tests = {change.key for change in looser}
        causes.append(f"looser limits of {counted(len(tests), 'test')}")
    by_figures = {row.nodeid for row in failed}
    by_error = {row.nodeid for row in states[State.ERROR] if not did_not_run(row)} - by_figures
    if by_error:
        tests_text = counted(len(by_error), "test")
        causes.append(f"{tests_text} failed by an assertion or an error of its own")
    with_rows = {row.nodeid for row in rows}
    not_run = sum(failure.not_run for failure in session.failures)
    others = {failure.nodeid for failure in session.failures if not failure.not_run} - with_rows
    if others:
        causes.append(f"{counted(len(others), 'test')} failed without a measurement")
    if not_run:
        causes.append(f"{counted(not_run, 'test')} did not run")
    if not causes and session.code == Exit.FAILED and not session.failures:
        causes.append("pytest failed the session as a whole; its output says why")
    return causes


def _no_verdict(
    states: Mapping[State, Sequence[Row]],
    rows: Sequence[Row],
    missing: Sequence[Omission],
    real_devices: Sequence[str],
) -> list[str]:
    """Why a gate without a failure gives no verdict; empty if it gives one."""
    if real_devices:
        return [
            f"the device is simulated, and the baseline is of {', '.join(real_devices)}; "
            "-- --gpumem-device sim chooses the simulated device"
        ]
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
    doubtful = 0
    for state in NO_PASS:
        doubtful += len(states[state])
    if doubtful:
        verb = "is" if doubtful == 1 else "are"
        return [f"under --strict, {doubtful} of {counted(len(rows), 'row')} {verb} no PASS"]
    if any(row.verdict.simulated for row in rows):
        return ["under --strict, the device is simulated"]
    return []


def _green(states: Mapping[State, Sequence[Row]], rows: Sequence[Row]) -> str:
    text = counted(len(rows), "row")
    for state in (State.NEW, State.NOT_SHOWN, State.ACCEPTED, State.MEASURED):
        if states[state]:
            text += f", {len(states[state])} of them {state.value}"
    return text


def _without_limit(rows: Sequence[Row]) -> list[str]:
    """A line about the rows of a green gate whose slow-downs nothing detects."""
    free = 0
    for row in rows:
        if row.measurement is not None and row.limits.max_regression is None:
            free += 1
    if not free:
        return []
    return [
        f"no max_regression for {free} of {counted(len(rows), 'row')}, so no slow-down there is "
        "detected; see --max-regression"
    ]


def _counted_lost(lost_ones: Sequence[Omission]) -> str:
    """ "1 measurement of the baseline, 2 tests and 1 limit"."""
    rows = sum(omission.what == ROW for omission in lost_ones)
    tests = sum(omission.what == TEST for omission in lost_ones)
    limits = len(lost_ones) - rows - tests
    parts = []
    if rows:
        parts.append(f"{counted(rows, 'measurement')} of the baseline")
    if tests:
        parts.append(counted(tests, "test"))
    if limits:
        parts.append(counted(limits, "limit"))
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


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


def _accepted_in_words(rows: Sequence[Row], missing: Sequence[Omission]) -> list[str]:
    """What the change accepts, such as "test_a.py::test_x +8.41 %"."""
    texts = []
    for row in rows:
        for limit in row.verdict.accepted:
            texts.append(f"{row.key} {_accepted_figure(row, limit)}")
    for omission in missing:
        if omission.status == ACCEPTED:
            texts.append(f"{omission.key} {omission.reason}")
    return texts


def _accepted_figure(row: Row, limit: str) -> str:
    if limit == TIME and row.verdict.paired is not None:
        return format_share(row.verdict.paired.change, sign=True)
    if limit == PEAK and row.footprint is not None:
        return f"a peak of {short_bytes(row.footprint.peak)}"
    return limit


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


def may_be_excused(omission: Omission) -> bool:
    """Return whether BASE may skip a test too: what the baseline holds, this GPU measured."""
    return omission.skipped and omission.what != ROW
