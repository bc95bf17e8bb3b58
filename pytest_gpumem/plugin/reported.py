"""The session's rows, each with the outcome of its test in pytest's reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.verdict import known, with_verdict
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import LimitResult, Row
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.details import failure_text
from pytest_gpumem.reporting.terminal import columns

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
"""How a test ends. The rows of a passed test alone may enter a baseline."""
BY_LIMITS_ATTRIBUTE = "_gpumem_by_limits"
"""Attribute of a failed report, and of the exception that it is of: the verdicts of the test's rows fail it, not an assertion or an error.

Of an exception it is the line of pytest's short summary, which begins with the figure.
"""

COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""How a session ends that collected all it was asked for, and ran it."""
ROWS_ATTRIBUTE = "gpumem_rows"
"""Attribute of a report that carries the rows, samples included, to the process that has them: from a worker or a forked child."""


def failure_texts(rows: Iterable[Row], device: DeviceFacts) -> list[str]:
    """The texts of failing rows, as wide as the terminal."""
    return [failure_text(row, device, columns()) for row in rows]


def short_texts(rows: Iterable[Row]) -> list[str]:
    """Their verdicts alone."""
    return [
        "\n".join(wrapped(printable(f"{row.verdict.reason} ({row.key})"), columns(), indent=""))
        for row in rows
    ]


def broken_limits(rows: Sequence[Row], texts: Iterable[str]) -> BaseException:
    """The failure of a test by the verdicts of these rows."""
    failure = pytest.fail.Exception("\n\n".join(texts), pytrace=False)
    setattr(failure, BY_LIMITS_ATTRIBUTE, printable(rows[0].verdict.reason))
    return failure


def exit_code(code: int, *, failed: bool) -> int:
    """The exit code of a session that ends with `code`: that of failed tests if it failed, unless it ends with another error."""
    fine = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return int(pytest.ExitCode.TESTS_FAILED) if failed and fine else code


class Attempts:
    """The attempts of a test that another plugin runs again when it fails. A FAIL by a limit is no flaw of one attempt that the next one
    may clear: its error rate is that of one verdict."""

    def __init__(self) -> None:
        self._count = 0
        self._failed: dict[
            str, tuple[int, Row]
        ] = {}  # by `Row.key`: the first attempt whose verdict is FAIL, and its row

    def begin(self, rows: list[Row]) -> None:
        """Begin an attempt. `rows`: of the one before."""
        for row in rows:
            if row.verdict.outcome is Outcome.FAIL and row.measured_something:
                self._failed.setdefault(row.key, (self._count, row))
        self._count += 1

    def judged(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """The rows of this attempt, and those of them that fail by an earlier one alone."""
        if not self._failed:
            return rows, []
        found, by_earlier = {row.key: row for row in rows}, list[Row]()
        for key, (attempt, before) in self._failed.items():
            now = found.get(key, before)
            if now is not before and now.verdict.outcome is Outcome.FAIL:
                continue
            which = f"FAIL in attempt {attempt} of {self._count}"
            first, *further = known(before)
            findings = [replace(first, reason=f"{which}: {first.reason}"), *further]
            row = with_verdict(now, findings, comparison=before.verdict.comparison)
            found[key] = replace(row, failed=True, differences=before.differences)
            by_earlier.append(found[key])
        failed = bool(by_earlier)
        return [replace(row, failed=row.failed or failed) for row in found.values()], by_earlier


class Rows:
    """The rows in the order in which their tests ended. The rows of a test's last run replace those of its earlier runs.

    The reports decide whether a test passed. An exception at the end of its body does not: a failed `unittest.TestCase` raises none,
    nor does a failed subtest.
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
        rows = [_reported(row, self._ends.get(nodeid)) for row in self.of(nodeid)]
        return [replace(row, test_error=True) for row in rows] if nodeid in self._errors else rows

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
        elif (end := _end(report)) is not None and self._ends.get(test) != FAILED:
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
        return sum(map(len, self._rows.values()))


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
        judged = f" (FAIL: {row.verdict.reason})" if row.verdict.outcome is Outcome.FAIL else ""
        why = LimitResult(
            "", Outcome.UNDECIDED, Code.CONDITIONS, f"the test {end} after this measurement{judged}"
        )
        row = with_verdict(row, [why])
    return replace(row, failed=False)
