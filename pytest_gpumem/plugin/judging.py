"""The end of a test's body: judge its measurements, and hand the rows to pytest-benchmark and to the report."""

from __future__ import annotations

import hashlib
import inspect
import os
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines.history import changes
from pytest_gpumem.judging.differences import row_differences
from pytest_gpumem.judging.judge import is_failure, merged
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.measuring.target import WrongResult
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.entries import Entries
from pytest_gpumem.plugin.footprints import WATCHED, with_footprints
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.reported import (
    BY_LIMITS_ATTRIBUTE,
    ROWS_ATTRIBUTE,
    Attempts,
    broken_limits,
    failure_texts,
    short_texts,
)
from pytest_gpumem.plugin.running import ENDS, Feature, fail
from pytest_gpumem.plugin.state import ROWS, TEST, GpuSession, GpuTest
from pytest_gpumem.plugin.tracing import memory_texts, with_lines
from pytest_gpumem.printable import printable
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import LimitResult, Row, key_of
from pytest_gpumem.records.schema import row_to_json
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.differences import why_lines
from pytest_gpumem.reporting.exports import PROPERTY, figures
from pytest_gpumem.settings import ANNOUNCE, switched_off


def in_context(row: Row, source: str | None, session: GpuSession) -> Row:
    """The row with the test's source, and with the changes since the baseline, which its verdict names."""
    measurement = row.measurement
    if measurement is None:
        return replace(row, test_source=source)
    runs = session.baseline.reference_runs(row)
    changed = changes(measurement, session.facts, source, runs)
    return replace(row, test_source=source, changed=changed)


def source_of(item: pytest.Item) -> str | None:
    """SHA-256 of the text of a test's function, decorators included, whatever its indentation; None for an item without one. Functions that
    it calls, its closure and its fixtures do not count."""
    function = getattr(item, "function", None)
    if function is None:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # made by a program
        return None
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def with_differences(row: Row, session: GpuSession) -> Row:
    """The row with its differences from the newest run of its baseline."""
    if row.measurement is None:
        return row
    past = session.baseline.reference_runs(row)
    return replace(row, differences=row_differences(row, past[-1].measurement)) if past else row


def why_text(row: Row) -> str:
    """The differences of a row for the text of a failure, as wide as the terminal; empty if there are none."""
    row = printable(row)
    why = why_lines(row)
    if not why:
        return ""
    width = shutil.get_terminal_size().columns
    lines = wrapped(f"why: {row.key}: {why[0]}", width, indent="    ")
    for line in why[1:]:
        lines += wrapped(f"  {line}", width, indent="    ")
    return "\n".join(lines)


def judge_test(item: pytest.Item, session: GpuSession, error: BaseException | None) -> list[Row]:
    """Judge the measurements of a test.
    `error`: what ended the body early, as pytest will report it; None if it passed.
    Returns the rows that fail the test by their verdict; empty if `error` ended it anyway.
    """
    test = item.stash.get(TEST, None)
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
        rows = [
            replace(
                unmeasured(item.nodeid, test.range_name, session, error),
                test_source=source_of(item),
            )
        ]
    item.stash[ROWS] = rows
    if test.entries is not None:
        _add(rows, test.entries, session)
    return [row for row in rows if fails(row, session)] if error is None else []


def _judged(
    item: pytest.Item, test: GpuTest, session: GpuSession, error: BaseException | None
) -> list[Row]:
    """Return the rows of a test with their verdicts, in doubt if it skipped after it measured."""
    siblings = {measurement.label: measurement for measurement, _ in test.measurements}
    source = source_of(item)
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
        rows.append(in_context(row, source, session))
    if isinstance(error, pytest.skip.Exception):
        why = f"the test skipped after this measurement: {error}"
        skip = LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, why)
        return [with_verdict(row, [skip], simulated=session.facts.simulated) for row in rows]
    rows = with_footprints(item, rows, test.range_name, session)
    return [session.judged(row, siblings) for row in rows]


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
    watched = item.stash.get(WATCHED, None)
    if watched is None or not watched.judged_in_body:
        if watched is not None:
            watched.row_at_end = True
        return []
    rows = with_footprints(item, [], session.names.unique(item.nodeid), session)
    rows = [session.judged(row, {}) for row in rows]
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


ATTEMPTS: pytest.StashKey[Attempts] = pytest.StashKey()  # on `item.stash`


class VerdictFeature(Feature):
    """Judges each test, and gives its rows to its report."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        try:
            yield
        except ENDS:
            test = item.stash.get(TEST, None)
            if (
                test is not None and test.entries is not None
            ):  # no report follows; a warning that is an error would cost the summary
                test.entries.excuse()
            raise
        finally:
            item.stash[TEST] = (
                None  # pytest keeps the item to the end, and the test would keep its streams
            )

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        # A rerun of the test starts anew, but for what has failed.
        item.stash.setdefault(ATTEMPTS, Attempts()).begin(item.stash.setdefault(ROWS, []))
        item.user_properties[:] = [p for p in item.user_properties if not p[0].startswith(PROPERTY)]
        item.stash[ROWS] = []
        yield

    def judge(self, item: pytest.Item, error: BaseException | None) -> None:
        if error is None or isinstance(error, pytest.skip.Exception):
            caught = _caught(item)
            if caught is not None:
                judge_test(item, self._session, caught)
                raise caught
        failing = judge_test(item, self._session, error)
        if failing and not self._session.is_further:
            failing = [with_differences(row, self._session) for row in failing]
            by_key = {row.key: with_lines(row, self._session) for row in failing}
            item.stash[ROWS] = [by_key.get(row.key, row) for row in item.stash[ROWS]]
            # A gate's screen is not final, and its duet is about to decide.
            if ANNOUNCE in switched_off(os.environ):
                texts = short_texts(failing)
            else:
                texts = failure_texts(failing, self._session.facts)
                texts += memory_texts(failing, self._session)
            whys = [why_text(row) for row in failing]
            raise broken_limits(failing, [*texts, *(why for why in whys if why)])

    def report(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        if call.excinfo is not None and hasattr(call.excinfo.value, BY_LIMITS_ATTRIBUTE):
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:  # pytest's message begins with "Failed: "
                crash.message = getattr(call.excinfo.value, BY_LIMITS_ATTRIBUTE)
            setattr(report, BY_LIMITS_ATTRIBUTE, True)
        test = item.stash.get(TEST, None)
        ours = uses(item, TEST_FIXTURE) or test is not None
        error = call.excinfo.value if call.excinfo is not None else None
        if (
            ours
            and report.skipped
            and not hasattr(report, "wasxfail")
            and self._session.settings.strict
        ):
            fail(report, f"gpumem: --gpumem-strict fails a skip: {error or ''}")
        if report.when == "call" and test is not None and not test.judged:
            # The report of a subtest: the body goes on.
            test.subtest_failed = test.subtest_failed or report.failed
            return
        ended = report.when == "call" or (report.when == "setup" and not report.passed)
        if ended:
            self._end(item, report)
        if test is not None and test.entries is not None:
            raised = report.when == "call" and test.entries.called and not test.measurements
            if raised or not report.passed or hasattr(report, "wasxfail"):
                test.entries.excuse()
        if report.when == "setup" and report.failed and uses(item, BENCHMARK_FIXTURE):
            item.stash[ROWS] = [
                unmeasured(
                    item.nodeid, self._session.names.unique(item.nodeid), self._session, error
                )
            ]
        rows = item.stash.get(ROWS, [])
        if ended or (call.when == "teardown" and any(row.footprint is not None for row in rows)):
            self._give(rows, report)

    def _end(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Complete the report that ends a test: it fails by what another process saw of it, and by the rows of its attempts."""
        if not report.failed and (why := self._session.failure_elsewhere(item.nodeid)) is not None:
            fail(report, why)
        item.stash[ROWS], failing = item.stash.setdefault(ATTEMPTS, Attempts()).judged(
            item.stash.setdefault(ROWS, [])
        )
        if failing and not report.failed:
            fail(report, "\n\n".join(failure_texts(failing, self._session.facts)))
            setattr(report, BY_LIMITS_ATTRIBUTE, True)

    def _give(self, rows: list[Row], report: pytest.TestReport) -> None:
        """Give the rows to the session, or to the process that has them."""
        if self._session.reports_elsewhere:
            setattr(report, ROWS_ATTRIBUTE, [row_to_json(row) for row in rows])
        else:
            self._session.rows.add(report.nodeid, rows)


def _caught(item: pytest.Item) -> WrongResult | None:
    """The failure of a test that caught the error of a wrong result; None if no result was wrong, or a subtest has failed by it."""
    test = item.stash.get(TEST, None)
    if test is None or test.wrong is None or test.subtest_failed:
        return None
    return WrongResult(f"{test.wrong} (the test caught this error)")
