"""Verdicts of tests: each is judged at its body's end, and again with what it keeps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines import verdicts
from pytest_gpumem.baselines.acceptances import NONE
from pytest_gpumem.baselines.saved import times_of
from pytest_gpumem.judging.differences import row_differences
from pytest_gpumem.judging.finding import counted, known, with_verdict
from pytest_gpumem.judging.footprint import AT_THE_END
from pytest_gpumem.judging.judge import is_failure, merged
from pytest_gpumem.judging.limits import relative
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.plugin.gpu_memory import WatchedTest, attached, limited
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.running import ENDS, NOTHING, Feature, fail
from pytest_gpumem.plugin.session import BY_LIMITS_ATTRIBUTE, ROWS_ATTRIBUTE, GpuSession, state_of
from pytest_gpumem.printable import printable
from pytest_gpumem.ranges import Names
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Difference, LimitResult, Row, key_of
from pytest_gpumem.records.schema import from_plain, row_to_json
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.details import failure_text
from pytest_gpumem.reporting.exports import figures, properties
from pytest_gpumem.reporting.row import why_lines
from pytest_gpumem.reporting.terminal import columns

if TYPE_CHECKING:
    from pytest_gpumem.plugin.gpu_benchmark import GpuTest


class VerdictFeature(Feature):
    """Judges each test, and gives its rows to its report."""

    name = "verdicts"

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    # The session

    def selected(self, session: pytest.Session) -> None:
        gpu, items = self._session, session.items
        gpu.names = Names(item.nodeid for item in items)
        gpu.tests = frozenset(key_of(item.nodeid, "") for item in items)
        total = gpu.settings.total_budget
        if total is not None:
            from pytest_gpumem.measuring.stopping import Ledger

            tests = [item.nodeid for item in items if uses(item, BENCHMARK_FIXTURE)]
            gpu.ledger = Ledger(total / gpu.settings.processes, tests)

    def logged(self, report: pytest.TestReport) -> None:
        """Take the rows of a report before anyone looks at them."""
        gpu, rows = self._session, None
        if hasattr(report, ROWS_ATTRIBUTE) and not gpu.is_part:
            rows = [from_plain(row, Row) for row in getattr(report, ROWS_ATTRIBUTE)]
            delattr(report, ROWS_ATTRIBUTE)
        test = gpu.rows.take(report, rows)
        if report.when not in ("call", "teardown") or not test.rows:
            return
        # JUnit's file takes the properties of the last report.
        of_rows: dict[str, object] = {}
        for row in test.reported():
            of_rows.update(properties(row, gpu.facts))
        others = [entry for entry in report.user_properties if entry[0] not in of_rows]
        report.user_properties = [*others, *of_rows.items()]

    def end(self) -> bool:
        """Judge the rows that wait for the session's end; return whether the session fails."""
        gpu, strict = self._session, self._session.settings.strict
        failed = False
        if gpu.further:
            from pytest_gpumem.plugin.repeating import failed_elsewhere

            failed = failed_elsewhere(gpu)
        rows = list(gpu.rows)
        waiting = {row.key for row in rows if verdicts.waits(row)}
        gpu.rows.replace(verdicts.screened(rows, gpu.baseline, strict=strict, in_gate=gpu.in_gate))
        undecided = 0
        for row in gpu.rows:
            if row.key in waiting and row.verdict.outcome is Outcome.UNDECIDED:
                undecided += 1
        if undecided and strict and gpu.announces:
            gpu.remark(f"--gpumem-strict: {counted(undecided, 'row')} undecided: this fails")
            return True
        return failed

    # A test

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        gpu = self._session
        with ExitStack() as stack:
            if gpu.evidence and uses(item, TEST_FIXTURE):
                stack.enter_context(gpu.chosen.follow())
            try:
                yield
            except ENDS:
                # No report follows; a warning that is an error would cost the summary.
                gpu_test = state_of(item).test
                if gpu_test is not None and gpu_test.entries is not None:
                    gpu_test.entries.excuse()
                raise
            finally:
                # pytest keeps the item to the end, and the test would keep its streams.
                state_of(item).test = None
                if gpu.ledger is not None:
                    gpu.ledger.ended(item.nodeid)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        """Begin a test, or a rerun of it, anew but for what has failed."""
        state = state_of(item)
        state.test, state.rows, earlier = None, [], state.rows
        state.attempts.append(earlier)
        return NOTHING

    def judge(self, item: pytest.Item, error: BaseException | None) -> None:
        """Judge a test whose body has ended, early by `error`. Raises its failure by its rows."""
        session, state = self._session, state_of(item)
        test: GpuTest | None = state.test
        if test is None and state.watched is None:
            return
        skip = error if isinstance(error, pytest.skip.Exception) else None
        caught = None
        if test is not None:
            test.judged = True
            if test.wrong is not None and not test.subtest_failed and (error is None or skip):
                from pytest_gpumem.measuring.target import WrongResult

                caught = error = WrongResult(f"{test.wrong} (the test caught this error)")
                skip = None
        rows = _rows(item, test, session, skip)
        strict = session.settings.strict
        failed = (error is not None and skip is None) or (test is not None and test.subtest_failed)
        failed = failed or any(is_failure(row.verdict, strict) for row in rows)
        rows = [replace(row, failed=failed) for row in rows]
        if test is not None and test.entries is not None:
            if failed and not test.measurements:
                rows = [_unmeasured(item, session, error)]
            for row in rows:
                if row.measurement is not None:
                    shown = figures(row, session.facts)
                    test.entries.add(row.label, row.measurement.samples, shown, failed=row.failed)
        state.rows = rows
        if caught is not None:
            raise caught
        failing = [row for row in rows if is_failure(row.verdict, strict)]
        if failing and error is None:
            _fail(item, failing, session)

    def report(
        self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
    ) -> None:
        error = call.excinfo.value if call.excinfo is not None else None
        if hasattr(error, BY_LIMITS_ATTRIBUTE):
            crash = getattr(report.longrepr, "reprcrash", None)
            if crash is not None:  # pytest's message begins with "Failed: "
                crash.message = getattr(error, BY_LIMITS_ATTRIBUTE)
            setattr(report, BY_LIMITS_ATTRIBUTE, True)
        state = state_of(item)
        test: GpuTest | None = state.test
        skipped = report.skipped and not hasattr(report, "wasxfail")
        if skipped and self._session.settings.strict and (test or uses(item, TEST_FIXTURE)):
            fail(report, f"gpumem: --gpumem-strict fails a skip: {error or ''}")
        if report.when == "call" and test is not None and not test.judged:
            # The report of a subtest: the body goes on.
            test.subtest_failed = test.subtest_failed or report.failed
            return
        ended = report.when == "call" or (report.when == "setup" and not report.passed)
        if ended:
            self._fail_by_others(item, report)
        if test is not None and test.entries is not None:
            raised = report.when == "call" and test.entries.called and not test.measurements
            if raised or not report.passed or hasattr(report, "wasxfail"):
                test.entries.excuse()
        if report.when == "setup" and report.failed and uses(item, BENCHMARK_FIXTURE):
            state.rows = [_unmeasured(item, self._session, error)]
        has_footprint = any(row.footprint is not None for row in state.rows)
        if not ended and (call.when != "teardown" or not has_footprint):
            return
        setattr(report, ROWS_ATTRIBUTE, [row_to_json(row) for row in state.rows])

    def _fail_by_others(self, item: pytest.Item, report: pytest.TestReport) -> None:
        for process in self._session.further:
            why = process.failure_of(item.nodeid)
            if why is not None and not report.failed:
                fail(report, why)
        state = state_of(item)
        rows = {row.key: row for row in state.rows}
        failing = []
        for number, attempt in enumerate(state.attempts):
            for before in attempt:
                row = rows.get(before.key)
                cleared = row is None or row.verdict.outcome is not Outcome.FAIL
                failed = before.verdict.outcome is Outcome.FAIL and before.measured_something
                if failed and cleared:
                    first, *findings = known(before)
                    first = replace(first, reason=f"FAIL in attempt {number}: {first.reason}")
                    verdict = with_verdict(before, [first, *findings]).verdict
                    row = replace(row or before, verdict=verdict, differences=before.differences)
                    rows[row.key] = row
                    failing.append(row)
        if not failing:
            return
        state.rows = [replace(row, failed=True) for row in rows.values()]
        if not report.failed:
            fail(report, _text_of(failing, self._session))
            setattr(report, BY_LIMITS_ATTRIBUTE, True)


def judge_the_end(item: pytest.Item, watched: WatchedTest, footprint: Footprint) -> None:
    """Judge a test again with its whole footprint. Raises its failure, if none is reported yet."""
    session = watched.session
    state = state_of(item)
    rows = state.rows
    if watched.row_at_end:
        rows = attached(rows, footprint, watched)
    judged, failing = [], []
    for row in rows:
        whole = _whole(row, watched, footprint)
        if whole is not row and not row.failed:  # what a failure keeps is no finding of its own
            whole = _judged(whole, session, rows)
            if is_failure(whole.verdict, session.settings.strict):
                whole = replace(whole, failed=True)
                failing.append(whole)
        judged.append(whole)
    state.rows = judged
    if failing:
        _fail(item, failing, session)


def _whole(row: Row, watched: WatchedTest, footprint: Footprint) -> Row:
    """A row with the whole footprint of its test; the same row if it is not about that."""
    if row.footprint is None or row.label:
        return row
    if watched.trouble is None:
        peaks, kept = row.footprint.further_peaks, row.footprint.further_kept
        return replace(row, footprint=replace(footprint, further_peaks=peaks, further_kept=kept))
    if not limited(row.limits, AT_THE_END):
        return row
    unread = footprint.not_watched  # what was read before stays
    whole = replace(row.footprint, watched=(), not_watched=unread, ended=True)
    return replace(row, footprint=whole)


def _rows(
    item: pytest.Item, test: GpuTest | None, session: GpuSession, skip: BaseException | None
) -> list[Row]:
    """The rows of a test at its body's end with their verdicts."""
    rows = []
    if test is not None:
        further = [process.rows for process in session.further]
        for label, (measured, limits, extra) in test.measurements.items():
            row = session.new_row(item.nodeid, limits, label)
            measurement = merged(measured, row.key, further) if further else measured
            rows.append(replace(row, measurement=measurement, extra=dict(extra)))
    if skip is not None:
        why = f"the test skipped after this measurement: {skip}"
        doubt = LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, why)
        return [with_verdict(row, [doubt]) for row in rows]
    watched: WatchedTest | None = state_of(item).watched
    if watched is not None:
        if test is None and not watched.limited_in_body:
            watched.row_at_end = True
        elif session.lost_in is None:
            rows = attached(rows, watched.footprint(ended=False), watched)
    return [_judged(row, session, rows) for row in rows]


def _judged(row: Row, session: GpuSession, rows: Sequence[Row]) -> Row:
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
    siblings = {other.label: other.measurement for other in rows if other.measurement is not None}
    strict = session.settings.strict
    return verdicts.judged(row, session.baseline, session.facts, siblings=siblings, strict=strict)


def _unmeasured(item: pytest.Item, session: GpuSession, error: BaseException | None) -> Row:
    """The row of a test that failed before anything was measured; by a subtest without `error`."""
    cause = "a subtest failed"
    if error is not None:
        # A failure that pytest raised has a message of its own.
        parts = [] if isinstance(error, pytest.fail.Exception) else [type(error).__name__]
        parts += [line.strip() for line in str(error).splitlines() if line.strip()][:1]
        cause = ": ".join(parts) or "no message"
    reason = f"failed before anything was measured: {cause}"
    code = Code.DID_NOT_RUN if item.nodeid in session.unrun else None
    row = replace(session.new_row(item.nodeid, Limits()), failed=True)
    return with_verdict(row, [LimitResult("", Outcome.FAIL, code, reason)])


# The failure of a test


def _fail(item: pytest.Item, failing: Sequence[Row], session: GpuSession) -> None:
    """Raise the failure of a test by its rows; the main process judges a further one."""
    if session.is_further:
        return
    explained = {row.key: _explained(row, session) for row in failing}
    state = state_of(item)
    state.rows = [explained.get(row.key, row) for row in state.rows]
    failure = pytest.fail.Exception(_text_of(list(explained.values()), session), pytrace=False)
    setattr(failure, BY_LIMITS_ATTRIBUTE, printable(failing[0].verdict.reason))
    raise failure


def _explained(row: Row, session: GpuSession) -> Row:
    differences: tuple[Difference, ...] = ()
    if row.measurement is not None:
        runs = times_of(session.baseline.reference_runs(row))
        if runs:
            differences = row_differences(row, runs[-1][1])
    return replace(row, differences=differences)


def _text_of(rows: Sequence[Row], session: GpuSession) -> str:
    width, texts = columns(), []
    for row in rows:
        if session.announces:
            texts.append(failure_text(row, session.facts, width))
        else:
            verdict = printable(f"{row.verdict.reason} ({row.key})")
            texts.append("\n".join(wrapped(verdict, width, indent="")))
    for row in printable(list(rows)):
        lines: list[str] = []
        for line in why_lines(row):
            sentence = f"  {line}" if lines else f"why: {row.key}: {line}"
            lines += wrapped(sentence, width, indent="    ")
        if lines:
            texts.append("\n".join(lines))
    return "\n\n".join(texts)
