"""The feature that judges a test at its body's end, and again with the memory that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.running import ENDS, Feature, fail
from pytest_gpumem.plugin.session import BY_LIMITS_ATTRIBUTE, GpuSession, Ledger, state_of
from pytest_gpumem.plugin.workers import put_rows, take_rows
from pytest_gpumem.ranges import Names
from pytest_gpumem.records import key_of

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
            tests = [item.nodeid for item in items if uses(item, BENCHMARK_FIXTURE)]
            gpu.ledger = Ledger(total / gpu.settings.processes, tests)

    def logged(self, report: pytest.TestReport) -> None:
        """Take the rows of a report before anyone looks at them."""
        gpu = self._session
        rows = None if gpu.is_part else take_rows(report)
        test = gpu.rows.take(report, rows)
        if test.rows and report.when in ("call", "teardown"):
            from pytest_gpumem.plugin.rows import add_properties

            add_properties(report, test.reported(), gpu.facts)

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
                # No report follows. An unused fixture's warning, made an error, ends the summary.
                gpu_test = state_of(item).test
                if gpu_test is not None and gpu_test.entries is not None:
                    gpu_test.entries.excuse()
                raise
            finally:
                # pytest keeps the item to the end, and the test would keep its streams.
                state_of(item).test = None
                if gpu.ledger is not None:
                    gpu.ledger.ended(item.nodeid)

    def setup(self, item: pytest.Item) -> None:
        """Begin a test, or a rerun, anew; the rows of earlier attempts stay."""
        state = state_of(item)
        state.test, state.rows, earlier = None, [], state.rows
        state.attempts.append(earlier)

    def judge(self, item: pytest.Item, error: BaseException | None) -> None:
        """As `rows.judge_body`, of a test that may have rows."""
        state = state_of(item)
        if state.test is not None or state.watched is not None:
            from pytest_gpumem.plugin.rows import judge_body

            judge_body(item, error, self._session)

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        finally:
            state = state_of(item)
            watched, state.watched = state.watched, None
            if watched is not None and watched.whole is not None:
                from pytest_gpumem.plugin.rows import judge_the_end

                judge_the_end(item, watched)

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
        if ended and (self._session.further or any(state.attempts)):
            from pytest_gpumem.plugin.rows import fail_by_others

            fail_by_others(item, report, self._session)
        if test is not None and test.entries is not None:
            if report.when == "call":
                from pytest_gpumem.reporting.row import figures

                for row in state.rows:
                    test.entries.add(row, figures(row, self._session.facts))
            only_raised = report.when == "call" and test.entries.called and not test.measurements
            if only_raised or not report.passed or hasattr(report, "wasxfail"):
                test.entries.excuse()
        if report.when == "setup" and report.failed and uses(item, BENCHMARK_FIXTURE):
            from pytest_gpumem.plugin.rows import unmeasured

            state.rows = [unmeasured(item, self._session, error)]
        # The body's report takes the rows; the last one again, with all memory.
        has_footprint = any(row.footprint is not None for row in state.rows)
        if not ended and (call.when != "teardown" or not has_footprint):
            return
        put_rows(report, state.rows)
