"""The end of a test's body: judge its measurements, and hand the rows to pytest-benchmark and to the report."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import NoReturn

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines import verdicts
from pytest_gpumem.baselines.acceptances import NONE
from pytest_gpumem.baselines.saved import times_of
from pytest_gpumem.judging.differences import row_differences
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.judge import is_failure, merged
from pytest_gpumem.judging.limits import relative
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.gpu_test import GpuTest
from pytest_gpumem.plugin.reported import broken_limits, failure_texts, short_texts
from pytest_gpumem.plugin.session import ROWS, TEST, WATCHED, GpuSession
from pytest_gpumem.plugin.tracing import memory_texts, with_lines
from pytest_gpumem.plugin.watched_test import WatchedTest, with_footprints
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import Limits, Measurement
from pytest_gpumem.records.row import LimitResult, Row, key_of
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.exports import figures
from pytest_gpumem.reporting.terminal import columns
from pytest_gpumem.settings import ANNOUNCE, switched_off


def with_differences(row: Row, session: GpuSession) -> Row:
    """The row with its differences from the newest run of its baseline."""
    if row.measurement is None:
        return row
    past = times_of(session.baseline.reference_runs(row))
    return replace(row, differences=row_differences(row, past[-1][1])) if past else row


def why_text(row: Row) -> str:
    """The differences of a row for the text of a failure, as wide as the terminal; empty if there are none."""
    row = printable(row)
    why = why_lines(row)
    if not why:
        return ""
    lines = wrapped(f"why: {row.key}: {why[0]}", columns(), indent="    ")
    for line in why[1:]:
        lines += wrapped(f"  {line}", columns(), indent="    ")
    return "\n".join(lines)


def judge_test(item: pytest.Item, session: GpuSession, error: BaseException | None) -> list[Row]:
    """Judge the measurements of a test.
    `error`: what ended the body early, as pytest will report it; None if it passed.
    Returns the rows that fail the test by their verdict; empty if `error` ended it anyway.
    """
    test: GpuTest | None = item.stash.get(TEST, None)
    skipped = isinstance(error, pytest.skip.Exception)
    if test is None:
        return _of_memory(item, session, error) if not skipped else []
    test.judged = True
    if session.further:
        further = [process.by_key for process in session.further]
        together = []
        for measurement, limits in test.measurements:
            key = key_of(item.nodeid, measurement.label)
            together.append((merged(measurement, key, further), limits))
        test.measurements = together
    rows = _judged(item, test, session, error)
    failed = (
        (error is not None and not skipped)
        or test.subtest_failed
        or any(fails(row, session) for row in rows)
    )
    rows = [replace(row, failed=failed) for row in rows]
    if failed and not test.measurements and test.entries is not None:
        rows = [unmeasured(item.nodeid, test.range_name, session, error)]
    item.stash[ROWS] = rows
    if test.entries is not None:
        _add(rows, test.entries, session)
    return [row for row in rows if fails(row, session)] if error is None else []


def _judged(
    item: pytest.Item, test: GpuTest, session: GpuSession, error: BaseException | None
) -> list[Row]:
    """Return the rows of a test with their verdicts, in doubt if it skipped after it measured."""
    siblings = {measurement.label: measurement for measurement, _ in test.measurements}
    rows = []
    for measured, limits in test.measurements:
        row = Row(
            item.nodeid,
            limits,
            OPEN,
            measured,
            measured.label,
            range_name=test.range_name,
            extra=dict(test.extra.get(measured.label, {})),
        )
        rows.append(row)
    if isinstance(error, pytest.skip.Exception):
        why = f"the test skipped after this measurement: {error}"
        skip = LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, why)
        return [with_verdict(row, [skip], simulated=session.facts.simulated) for row in rows]
    rows = with_footprints(item, rows, test.range_name, session)
    return [judged(row, session, siblings) for row in rows]


def judged(row: Row, session: GpuSession, siblings: Mapping[str, Measurement]) -> Row:
    """Return a row with its verdict at the end of its test's body.
    `siblings`: measurements of the same test, by label.
    """
    return verdicts.judged(
        _with_accepted_counts(row, session),
        session.baseline,
        session.facts,
        siblings=siblings,
        strict=session.settings.strict,
    )


def _with_accepted_counts(row: Row, session: GpuSession) -> Row:
    """The row; a limit "base" on a count that somebody accepted is the accepted count."""
    values: dict[str, str | None] = {}
    for name in relative(row.limits):
        change = session.merged.of(row.key, "limit", name)
        if change is not None:
            values[name] = None if change.value == NONE else change.value
    if not values:
        return row
    origin = {**row.limits.origin, **dict.fromkeys(values, "accepted")}
    return replace(row, limits=replace(row.limits, **values, origin=origin))


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


def _add(rows: Iterable[Row], entries: Entries, session: GpuSession) -> None:
    """Hand the samples of a test's rows to pytest-benchmark."""
    for row in rows:
        if row.measurement is not None:
            entries.add(
                row.label, row.measurement.samples, figures(row, session.facts), failed=row.failed
            )


def fails(row: Row, session: GpuSession) -> bool:
    """True if a row's verdict fails its test."""
    return is_failure(row.verdict, session.settings.strict)


def _of_memory(item: pytest.Item, session: GpuSession, error: BaseException | None) -> list[Row]:
    """Judge the memory of a test without fixtures of ours. Returns as `judge_test`."""
    watched: WatchedTest | None = item.stash.get(WATCHED, None)
    if watched is None or not watched.judged_in_body:
        if watched is not None:
            watched.row_at_end = True
        return []
    rows = with_footprints(item, [], session.names.unique(item.nodeid), session)
    rows = [judged(row, session, {}) for row in rows]
    failed = error is not None or any(fails(row, session) for row in rows)
    rows = [replace(row, failed=failed) for row in rows]
    item.stash[ROWS] = rows
    return [row for row in rows if fails(row, session)] if error is None else []


def unmeasured(
    nodeid: str, range_name: str, session: GpuSession, error: BaseException | None
) -> Row:
    """The row of a test that failed before anything was measured; by a subtest where there is no error."""
    cause = "a subtest failed" if error is None else _first_line(error)
    reason = f"failed before anything was measured: {cause}"
    row = Row(nodeid, Limits(), OPEN, failed=True, range_name=range_name)
    return with_verdict(
        row, [LimitResult("", Outcome.FAIL, None, reason)], simulated=session.facts.simulated
    )


def _first_line(error: BaseException) -> str:
    """An error on one line: "ValueError: no such table". A failure that pytest raised has a message of its own."""
    parts = []
    if not isinstance(error, pytest.fail.Exception):
        parts.append(type(error).__name__)
    parts += [line.strip() for line in str(error).splitlines() if line.strip()][:1]
    return ": ".join(parts) or "no message"


def judge_or_fail(item: pytest.Item, session: GpuSession, error: BaseException | None) -> None:
    """Judge a test whose body has ended. `error`: as of `judge_test`.
    Raises the failure of the test by its verdict, or by a wrong result that it caught.
    """
    if error is None or isinstance(error, pytest.skip.Exception):
        caught = _caught(item)
        if caught is not None:
            judge_test(item, session, caught)
            raise caught
    failing = judge_test(item, session, error)
    if not failing or session.is_further:
        return
    fail_by_limits(item, session, [with_differences(row, session) for row in failing])


def fail_by_limits(item: pytest.Item, session: GpuSession, failing: Iterable[Row]) -> NoReturn:
    """Raise the failure of a test by the verdicts of these rows."""
    by_key = {row.key: with_lines(row, session) for row in failing}
    item.stash[ROWS] = [by_key.get(row.key, row) for row in item.stash[ROWS]]
    failing = list(by_key.values())
    # A gate's screen is not final, and its duet is about to decide.
    if ANNOUNCE in switched_off(os.environ):
        texts = short_texts(failing)
    else:
        texts = failure_texts(failing, session.facts)
        texts += memory_texts(failing, session)
    for row in failing:
        why = why_text(row)
        if why:
            texts.append(why)
    raise broken_limits(failing, texts)


def _caught(item: pytest.Item) -> WrongResult | None:
    """The failure of a test that caught the error of a wrong result; None if no result was wrong, or a subtest has failed by it."""
    test: GpuTest | None = item.stash.get(TEST, None)
    if test is None or test.wrong is None or test.subtest_failed:
        return None
    return WrongResult(f"{test.wrong} (the test caught this error)")
