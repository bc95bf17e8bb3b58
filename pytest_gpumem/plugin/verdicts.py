"""The verdicts of tests: each is judged at its body's end, and its report gets its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.finding import known, with_verdict
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.running import ENDS, NOTHING, Feature, fail
from pytest_gpumem.plugin.session import BY_LIMITS_ATTRIBUTE, ROWS_ATTRIBUTE, GpuSession, state_of
from pytest_gpumem.ranges import Names
from pytest_gpumem.records.row import key_of
from pytest_gpumem.records.schema import row_from_json, row_to_json

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
        gpu = self._session
        rows = getattr(report, ROWS_ATTRIBUTE, None)
        if rows is not None and not gpu.is_part:
            gpu.rows.add(report.nodeid, [row_from_json(row) for row in rows])
            delattr(report, ROWS_ATTRIBUTE)
        gpu.rows.report(report)
        if report.when in ("call", "teardown") and gpu.rows.of(report.nodeid):
            self._set_properties(report)

    def _set_properties(self, report: pytest.TestReport) -> None:
        """Give JUnit's file the figures; it takes those of the last report."""
        from pytest_gpumem.reporting.exports import properties

        figures: dict[str, object] = {}
        for row in self._session.rows.reported(report.nodeid):
            figures.update(properties(row, self._session.facts))
        others = [entry for entry in report.user_properties if entry[0] not in figures]
        report.user_properties = [*others, *figures.items()]

    def end(self) -> bool:
        """Judge what waits for the session's end; return whether the session fails by it."""
        gpu = self._session
        failed = False
        if gpu.further:
            from pytest_gpumem.plugin.repeating import failed_elsewhere

            failed = failed_elsewhere(gpu)
        if not len(gpu.rows):
            return failed
        from pytest_gpumem.plugin.judging import undecided_fails

        return undecided_fails(gpu) or failed

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
        state = state_of(item)
        if state.test is None and state.watched is None:
            return
        from pytest_gpumem.plugin.judging import judge

        judge(item, self._session, error)

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
            from pytest_gpumem.plugin.judging import unmeasured

            state.rows = [unmeasured(item, self._session, error)]
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
            from pytest_gpumem.plugin.judging import text_of

            fail(report, text_of(failing, self._session))
            setattr(report, BY_LIMITS_ATTRIBUTE, True)
