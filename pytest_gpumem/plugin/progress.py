"""How far a run has come: a line below pytest's own on a terminal, elsewhere now and then a line of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.plugin.fixtures import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.running import uses
from pytest_gpumem.reporting.progress import Progress

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession

EVERY = 60.0
"""Seconds between two lines where the output is no terminal."""

# Index goes down one line, scrolls at the last one, and keeps the column: so there is a line below, and the cursor is where pytest left it.
_ROOM = "\x1bD\x1b[A"
_SAVE, _BELOW, _RESTORE = "\x1b7", "\x1b[B\r\x1b[2K", "\x1b8"


class ProgressHooks:
    """Registered in the process that owns the terminal, unless that is to be quiet."""

    def __init__(self, session: GpuSession, reporter: pytest.TerminalReporter) -> None:
        self._session, self._reporter = session, reporter
        self._progress = Progress(time.monotonic)
        self._live = on_a_terminal(session.config, reporter)
        self._drawn = False
        self._last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._progress.expect(item.nodeid for item in session.items if uses(item, BENCHMARK_FIXTURE))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: Iterable[str]) -> None:
        # The controller collects nothing itself, and ids do not say which tests measure.
        self._progress.expect(ids)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logstart(self, nodeid: str) -> Generator[None, object, object]:
        self._clear()
        shown = yield
        self._progress.begin(nodeid)
        self._draw()
        return shown

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, object, object]:
        self._clear()
        shown = yield
        if report.when == "teardown":
            rows = [row for row in self._session.rows if row.nodeid == report.nodeid]
            self._progress.took(report.nodeid, sum(len(row.measurement.samples) for row in rows if row.measurement is not None))
            self._progress.end(report.nodeid)
        self._draw()
        return shown

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_logfinish(self) -> Generator[None, object, object]:
        self._clear()
        shown = yield
        self._draw()
        return shown

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._clear()
        self._live = False  # whatever is reported later is of no test that runs
        self._progress.expect(())

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self) -> None:
        self._clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self) -> None:
        self._clear()

    def _draw(self) -> None:
        if not self._progress:
            return
        if self._live:
            # One column stays free: a line that is full wraps on some terminals.
            line = self._progress.line(self._reporter._tw.fullwidth - 1)
            self._write(f"{_ROOM}{_SAVE}{_BELOW}{line}{_RESTORE}")
            self._drawn = True
        elif time.monotonic() - self._last >= EVERY:
            self._last = time.monotonic()
            self._reporter.ensure_newline()
            self._reporter.write_line(self._progress.line(self._reporter._tw.fullwidth))

    def _clear(self) -> None:
        if self._drawn:
            self._write(f"{_SAVE}{_BELOW}{_RESTORE}")
            self._drawn = False

    def _write(self, text: str) -> None:
        # Past pytest's writer, which counts the columns of its own line.
        file = self._reporter._tw._file
        file.write(text)
        file.flush()


def on_a_terminal(config: pytest.Config, reporter: pytest.TerminalReporter) -> bool:
    """Whether a line below pytest's own can be kept: nobody but pytest writes to the terminal while tests run."""
    option = config.option
    shared = option.capture == "no" or option.usepdb or config.getini("log_cli") or getattr(option, "log_cli_level", None) is not None
    return reporter._tw._file.isatty() and os.environ.get("TERM") not in (None, "", "dumb") and not shared
