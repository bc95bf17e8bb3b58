"""The session's rows, each with the outcome of its test in pytest's reports."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Row
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.row_facts import failure_text

PASSED, FAILED, SKIPPED, XFAILED, XPASSED = "passed", "failed", "skipped", "xfailed", "xpassed"
"""How a test ends. The rows of a passed test alone may enter a baseline."""
BY_LIMITS_ATTRIBUTE = "_gpumem_by_limits"
"""Attribute of a failed report, and of the exception that it is of: the verdicts of the test's rows fail it, not an assertion or an error.

Of an exception it is the line of pytest's short summary, which begins with the figure.
"""


ROWS_ATTRIBUTE = "gpumem_rows"
"""Attribute of a report that carries the rows, samples included, to the process that has them: from an xdist worker or a forked child."""


CARD_ATTRIBUTE = "gpumem_card"
"""Attribute of a report of a worker of xdist whose GPU is of another model than the session's: the key of its baseline."""


def card_of(row: Row) -> str | None:
    """The key of the GPU of another model that measured a row; None if it is of the session's."""
    return None if row.device is UNSET else row.device.key


def failure_texts(rows: Iterable[Row], device: DeviceFacts) -> list[str]:
    """The texts of failing rows, as wide as the terminal; 80 columns in a worker of xdist."""
    width = shutil.get_terminal_size().columns
    return [failure_text(row, device, width) for row in rows]


def short_texts(rows: Iterable[Row]) -> list[str]:
    """Their verdicts alone."""
    width = shutil.get_terminal_size().columns
    return ["\n".join(wrapped(printable(f"{row.verdict.reason} ({row.key})"), width, indent="")) for row in rows]


def broken_limits(rows: Sequence[Row], texts: Iterable[str]) -> BaseException:
    """The failure of a test by the verdicts of these rows."""
    failure = pytest.fail.Exception("\n\n".join(texts), pytrace=False)
    setattr(failure, BY_LIMITS_ATTRIBUTE, printable(rows[0].verdict.reason))
    return failure


_Test = tuple[str, str | None]


class Rows:
    """The rows in the order in which their tests ended. The rows of a test's last run replace those of its earlier runs.

    The reports decide whether a test passed. An exception at the end of its body does not: a failed `unittest.TestCase` raises none,
    nor does a failed subtest. GPUs of several models may each run a test: a test counts once for each.
    """

    def __init__(self) -> None:
        # By node id, and by the key of the GPU if that is of another model than the session's.
        self._rows: dict[_Test, tuple[Row, ...]] = {}
        self._ends: dict[_Test, str] = {}
        self._calls: dict[str, pytest.TestReport] = {}
        self._skips: dict[_Test, str] = {}
        self._errors: set[_Test] = set()
        self._cards: set[str] = set()  # keys of other models

    def add(self, nodeid: str, rows: Iterable[Row], card: str | None = None) -> None:
        """Take the rows of a test that is about to be reported; `card` as `card_of`."""
        self._rows.pop((nodeid, card), None)
        self._rows[nodeid, card] = tuple(rows)

    def of(self, nodeid: str) -> tuple[Row, ...]:
        """The rows of a test on the session's GPU, as they were judged."""
        return self._rows.get((nodeid, None), ())

    def reported(self, report: pytest.TestReport) -> list[Row]:
        """The rows of the test of a report, as all its reports so far make them."""
        return self._reported((report.nodeid, getattr(report, CARD_ATTRIBUTE, None)))

    def update(self, row: Row) -> None:
        """Take a row that was judged again."""
        test = row.nodeid, card_of(row)
        self._rows[test] = tuple(row if row.key == old.key else old for old in self._rows[test])

    def call(self, nodeid: str) -> pytest.TestReport | None:
        """The report of a test's body on the session's GPU; None while there is none."""
        return self._calls.get(nodeid)

    def own(self) -> Iterator[Row]:
        """The rows of the session's GPU, and of others of its model."""
        return (row for row in self if row.device is UNSET)

    def report(self, report: pytest.TestReport) -> None:
        """Take a report of a test: of a phase, a subtest, or a worker's crash."""
        card: str | None = getattr(report, CARD_ATTRIBUTE, None)
        test = report.nodeid, card
        self._cards |= {card} if card is not None else set()
        if report.when == "setup":
            # The first report of a run of the test, which may be a rerun.
            self._ends.pop(test, None)
            self._errors.discard(test)
        if report.when == "call" and card is None:
            self._calls[report.nodeid] = report
        if report.failed:
            self._ends[test] = FAILED
            if not getattr(report, BY_LIMITS_ATTRIBUTE, False):
                self._errors.add(test)
        elif (end := _end(report)) is not None and self._ends.get(test) != FAILED:
            self._ends[test] = end
            if end == SKIPPED and isinstance(report.longrepr, tuple):
                self._skips[test] = report.longrepr[2]

    def end(self, nodeid: str) -> str | None:
        """How a test ended, on the session's GPU if that ran it; None while it was not reported."""
        return next((self._ends[test] for test in self._runs(nodeid)), None)

    def end_of(self, row: Row) -> str | None:
        """How the test of a row ended, on the GPU that measured it."""
        return self._ends.get((row.nodeid, card_of(row)))

    def _runs(self, nodeid: str) -> list[_Test]:
        """The runs of a test that have ended, that of the session's GPU first."""
        return [test for card in (None, *sorted(self._cards)) if (test := (nodeid, card)) in self._ends]

    def explain(self, nodeid: str) -> str:
        """How a test ended, with the reason of a skip: "skipped (no torch)"."""
        test = self._runs(nodeid)[0]
        end, reason = self._ends[test], self._skips.get(test, "").removeprefix("Skipped: ")
        return f"{end} ({reason})" if end == SKIPPED and reason else end

    def __iter__(self) -> Iterator[Row]:
        for test in tuple(self._rows):
            yield from self._reported(test)

    def _reported(self, test: _Test) -> list[Row]:
        rows = [_reported(row, self._ends.get(test)) for row in self._rows.get(test, ())]
        return [replace(row, test_error=True) for row in rows] if test in self._errors else rows

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
    verdict = row.verdict
    if verdict.code is not Code.CONDITIONS:
        judged = f" (FAIL: {verdict.reason})" if verdict.outcome is Outcome.FAIL else ""
        reason = f"the test {end} after this measurement{judged}"
        verdict = replace(verdict, outcome=Outcome.UNDECIDED, reason=reason, code=Code.CONDITIONS)
    return replace(row, verdict=verdict, failed=False)
