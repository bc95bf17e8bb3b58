"""The session's rows, each with the outcome of its test in pytest's reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import LimitResult, Row

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
"""How a test ends. The rows of a passed test alone may enter a baseline."""
BY_LIMITS_ATTRIBUTE = "_gpumem_by_limits"
"""Attribute of a failed report, and of the exception that it is of: the verdicts of the test's rows
fail it, not an assertion or an error.

Of an exception it is the line of pytest's short summary, which begins with the figure.
"""

COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that collected all it was to collect, and ran it."""
ROWS_ATTRIBUTE = "gpumem_rows"
"""Attribute of a report that carries the rows, samples included, to the process that has them: from
a worker or a forked child."""


def exit_code(code: int, *, failed: bool) -> int:
    """The exit code of a session that ends with `code`: that of failed tests if it failed, unless
    it ends with another error."""
    fine = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return int(pytest.ExitCode.TESTS_FAILED) if failed and fine else code


class Rows:
    """The rows in the order in which their tests ended. The rows of a test's last run replace those
    of its earlier runs.

    The reports decide whether a test passed. An exception at the end of its body does not: a failed
    `unittest.TestCase` raises none, nor does a failed subtest.
    """

    def __init__(self) -> None:
        # By node id.
        self._rows: dict[str, tuple[Row, ...]] = {}
        self._ends: dict[str, str] = {}
        self._skips: dict[str, str] = {}
        self._errors: set[str] = set()

    def add(self, nodeid: str, rows: Iterable[Row]) -> None:
        """Take the rows of a test that is about to be reported."""
        self._rows.pop(nodeid, None)
        self._rows[nodeid] = tuple(rows)

    def replace(self, rows: Iterable[Row]) -> None:
        """Take the same rows, judged again."""
        again = {row.key: row.verdict for row in rows}
        for nodeid, before in self._rows.items():
            self._rows[nodeid] = tuple(replace(row, verdict=again[row.key]) for row in before)

    def of(self, nodeid: str) -> tuple[Row, ...]:
        """The rows of a test, as they were judged."""
        return self._rows.get(nodeid, ())

    def reported(self, nodeid: str) -> list[Row]:
        """The rows of a test, as all its reports so far make them."""
        rows = []
        for row in self.of(nodeid):
            rows.append(_reported(row, self._ends.get(nodeid)))
        if nodeid in self._errors:
            rows = [replace(row, test_error=True) for row in rows]
        return rows

    def report(self, report: pytest.TestReport) -> None:
        """Take a report of a test: of a phase, a subtest, or a worker's crash."""
        test = report.nodeid
        if report.when == "setup":
            # The first report of a run of the test, which may be a rerun.
            self._ends.pop(test, None)
            self._errors.discard(test)
        if report.failed:
            self._ends[test] = FAILED
            if not getattr(report, BY_LIMITS_ATTRIBUTE, False):
                self._errors.add(test)
            return
        end = _end(report)
        if end is not None and self._ends.get(test) != FAILED:
            self._ends[test] = end
            if end == SKIPPED and isinstance(report.longrepr, tuple):
                self._skips[test] = report.longrepr[2]

    def end(self, nodeid: str) -> str | None:
        """How a test ended; None while it was not reported."""
        return self._ends.get(nodeid)

    def explain(self, nodeid: str) -> str:
        """How a test ended, with the reason of a skip: "skipped (no torch)"."""
        end, reason = self._ends[nodeid], self._skips.get(nodeid, "").removeprefix("Skipped: ")
        return f"{end} ({reason})" if end == SKIPPED and reason else end

    def __iter__(self) -> Iterator[Row]:
        for nodeid in tuple(self._rows):
            yield from self.reported(nodeid)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self._rows.values())


def _end(report: pytest.TestReport) -> str | None:
    """The outcome of a test by a report that is no failure; None if its phase decides nothing."""
    if report.skipped:
        return XFAILED if hasattr(report, "wasxfail") else SKIPPED
    if report.when != "call" or not report.passed:
        return None
    return XPASSED if hasattr(report, "wasxfail") else PASSED


def _reported(row: Row, end: str | None) -> Row:
    if end == PASSED:
        return row
    if end in (None, FAILED):
        return replace(row, failed=True)
    if row.verdict.code is not Code.CONDITIONS:
        reason = f"the test {end} after this measurement"
        if row.verdict.outcome is Outcome.FAIL:
            reason += f" (FAIL: {row.verdict.reason})"
        row = with_verdict(row, [LimitResult("", Outcome.UNDECIDED, Code.CONDITIONS, reason)])
    return replace(row, failed=False)
