"""The judgement of a test: its measurements and its memory at its body's end, and what it keeps at
its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines import verdicts
from pytest_gpumem.baselines.acceptances import NONE
from pytest_gpumem.baselines.saved import times_of
from pytest_gpumem.judging.differences import row_differences
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.footprint import AT_THE_END
from pytest_gpumem.judging.judge import is_failure, merged
from pytest_gpumem.judging.limits import relative
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.gpu_benchmark import GpuTest
from pytest_gpumem.plugin.gpu_memory import WatchedTest, attached, limited
from pytest_gpumem.plugin.session import BY_LIMITS_ATTRIBUTE, ROWS, TEST, WATCHED, GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import Difference, LimitResult, Row, key_of
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.details import failure_text
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.exports import figures
from pytest_gpumem.reporting.terminal import columns
from pytest_gpumem.settings import ANNOUNCE, switched_off


def judge(item: pytest.Item, session: GpuSession, error: BaseException | None) -> None:
    """Judge a test whose body has ended.
    `error`: what ended it early, as pytest will report it; None if it passed.
    Raises the failure of the test by its verdict, or by a wrong result that it caught.
    """
    test: GpuTest | None = item.stash.get(TEST, None)
    skipped = isinstance(error, pytest.skip.Exception)
    if test is None:
        rows = [] if skipped else _of_memory(item, session)
        failed = error is not None
    else:
        caught = test.wrong is not None and not test.subtest_failed and (error is None or skipped)
        if caught:
            error = WrongResult(f"{test.wrong} (the test caught this error)")
            skipped = False
        test.judged = True
        rows = _of_measurements(item, test, session, error)
        failed = test.subtest_failed or (error is not None and not skipped)
    strict = session.settings.strict
    failed = failed or any(is_failure(row.verdict, strict) for row in rows)
    rows = [replace(row, failed=failed) for row in rows]
    if test is not None and test.entries is not None:
        if failed and not test.measurements:
            rows = [unmeasured(item.nodeid, test.range_name, session, error)]
        for row in rows:
            if row.measurement is not None:
                shown = figures(row, session.facts)
                test.entries.add(row.label, row.measurement.samples, shown, failed=row.failed)
    item.stash[ROWS] = rows
    if isinstance(error, WrongResult) and caught:
        raise error
    failing = [row for row in rows if is_failure(row.verdict, strict)]
    if failing and error is None:
        fail_by(item, failing, session)


def judge_the_end(item: pytest.Item, watched: WatchedTest, footprint: Footprint) -> None:
    """Judge a test again with its whole footprint. Raises its failure by what it keeps.
    A failure that is reported already is not reported again.
    """
    session = watched.session
    rows = item.stash.get(ROWS, [])
    if watched.row_at_end:
        rows = attached(rows, footprint, watched, session.names.unique(item.nodeid))
    siblings = {row.label: row.measurement for row in rows if row.measurement is not None}
    judged, failing = [], []
    for row in rows:
        read = watched.trouble is None or limited(row.limits, AT_THE_END)
        if row.footprint is None or row.label or not read:
            judged.append(row)
            continue
        whole = replace(footprint, further=row.footprint.further)
        if watched.trouble is not None:  # what was read before stays
            unread = footprint.not_watched
            whole = replace(row.footprint, watched=(), not_watched=unread, ended=True)
        again = replace(row, footprint=whole)
        if not row.failed:  # what a failure keeps is no finding of its own
            again = _judged(again, session, siblings)
            if is_failure(again.verdict, session.settings.strict):
                again = replace(again, failed=True)
                failing.append(again)
        judged.append(again)
    item.stash[ROWS] = judged
    if failing:
        fail_by(item, failing, session)


def _of_measurements(
    item: pytest.Item, test: GpuTest, session: GpuSession, error: BaseException | None
) -> list[Row]:
    """Return the rows of a test with their verdicts, in doubt if it skipped after it measured."""
    further = [process.by_key for process in session.further]
    rows = []
    for measured, limits in test.measurements:
        label, measurement = measured.label, measured
        if further:
            measurement = merged(measured, key_of(item.nodeid, label), further)
        row = Row(
            item.nodeid,
            limits,
            OPEN,
            measurement,
            label,
            range_name=test.range_name,
            extra=dict(test.extra.get(label, {})),
        )
        rows.append(row)
    if isinstance(error, pytest.skip.Exception):
        why = f"the test skipped after this measurement: {error}"
        skip = LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, why)
        return [with_verdict(row, [skip], simulated=session.facts.simulated) for row in rows]
    siblings = {row.label: row.measurement for row in rows if row.measurement is not None}
    rows = _with_footprints(item, rows, test.range_name, session)
    return [_judged(row, session, siblings) for row in rows]


def _of_memory(item: pytest.Item, session: GpuSession) -> list[Row]:
    """Return the rows of a test without fixtures of ours, if a limit holds for its body."""
    watched: WatchedTest | None = item.stash.get(WATCHED, None)
    if watched is None:
        return []
    if not watched.limited_in_body:
        watched.row_at_end = True
        return []
    rows = _with_footprints(item, [], session.names.unique(item.nodeid), session)
    return [_judged(row, session, {}) for row in rows]


def _with_footprints(
    item: pytest.Item, rows: Sequence[Row], range_name: str, session: GpuSession
) -> list[Row]:
    """The rows of a test at the end of its body, with its footprint so far and those of its
    parts."""
    watched: WatchedTest | None = item.stash.get(WATCHED, None)
    if watched is None or session.lost_in is not None:
        return list(rows)
    return attached(rows, watched.footprint(ended=False), watched, range_name)


def _judged(row: Row, session: GpuSession, siblings: Mapping[str, Measurement]) -> Row:
    """Return a row with its verdict. `siblings`: measurements of the same test, by label."""
    values: dict[str, str | None] = {}
    for name in relative(row.limits):
        # A limit "base" on a count that somebody accepted is the accepted count.
        newest = session.merged.of(row.key, "limit", name)
        if newest is not None:
            change = newest[1]
            values[name] = None if change.value == NONE else change.value
    if values:
        origin = {**row.limits.origin, **dict.fromkeys(values, "accepted")}
        row = replace(row, limits=replace(row.limits, **values, origin=origin))
    strict = session.settings.strict
    return verdicts.judged(row, session.baseline, session.facts, siblings=siblings, strict=strict)


def unmeasured(
    nodeid: str, range_name: str, session: GpuSession, error: BaseException | None
) -> Row:
    """The row of a test that failed before anything was measured; by a subtest where there is no
    error."""
    cause = "a subtest failed"
    if error is not None:
        # A failure that pytest raised has a message of its own.
        parts = [] if isinstance(error, pytest.fail.Exception) else [type(error).__name__]
        parts += [line.strip() for line in str(error).splitlines() if line.strip()][:1]
        cause = ": ".join(parts) or "no message"
    reason = f"failed before anything was measured: {cause}"
    row = Row(nodeid, Limits(), OPEN, failed=True, range_name=range_name)
    return with_verdict(
        row, [LimitResult("", Outcome.FAIL, None, reason)], simulated=session.facts.simulated
    )


# The session's end


def undecided_fails(session: GpuSession) -> bool:
    """Judge the rows that wait for the session's end.
    Return whether rows that stay undecided fail the session: under strict, where no duet follows.
    """
    waiting = {row.key for row in session.rows if verdicts.waits(row)}
    strict = session.settings.strict
    rows = verdicts.screened(
        list(session.rows), session.baseline, strict=strict, in_gate=session.in_gate
    )
    session.rows.replace(rows)
    undecided = 0
    for row in session.rows:
        if row.key in waiting and row.verdict.outcome is Outcome.UNDECIDED:
            undecided += 1
    if not undecided or not strict or ANNOUNCE in switched_off(os.environ):
        return False
    session.remark(f"--gpumem-strict: {counted(undecided, 'row')} undecided: this fails")
    return True


# The failure of a test


def fail_by(item: pytest.Item, failing: Sequence[Row], session: GpuSession) -> None:
    """Raise the failure of a test by the verdicts of its rows; a further process leaves that to
    the main one.
    """
    if session.is_further:
        return
    by_key = {row.key: _explained(row, session) for row in failing}
    item.stash[ROWS] = [by_key.get(row.key, row) for row in item.stash[ROWS]]
    failure = pytest.fail.Exception(text_of(list(by_key.values()), session), pytrace=False)
    setattr(failure, BY_LIMITS_ATTRIBUTE, printable(failing[0].verdict.reason))
    raise failure


def _explained(row: Row, session: GpuSession) -> Row:
    """A row with its differences from the newest run of its reference."""
    differences: tuple[Difference, ...] = ()
    if row.measurement is not None:
        runs = times_of(session.baseline.reference_runs(row))
        if runs:
            differences = row_differences(row, runs[-1][1])
    return replace(row, differences=differences)


def text_of(rows: Sequence[Row], session: GpuSession) -> str:
    """The text of a failure by the verdicts of these rows, as wide as the terminal."""
    width = columns()
    texts = []
    for row in rows:
        # A gate's screen is not final, and its duet is about to decide.
        if ANNOUNCE in switched_off(os.environ):
            verdict = printable(f"{row.verdict.reason} ({row.key})")
            texts.append("\n".join(wrapped(verdict, width, indent="")))
        else:
            texts.append(failure_text(row, session.facts, width))
    for row in printable(list(rows)):
        lines: list[str] = []
        for line in why_lines(row):
            sentence = f"  {line}" if lines else f"why: {row.key}: {line}"
            lines += wrapped(sentence, width, indent="    ")
        if lines:
            texts.append("\n".join(lines))
    return "\n\n".join(texts)
