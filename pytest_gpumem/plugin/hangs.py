"""Tests that hang or crash: what the watchdog is told, and what it does in place of the session.

It fails the test, and ends the session as pytest does: every plugin is given the reports so far, and writes its files.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.plugin.judging import unmeasured
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.reported import ROWS_ATTRIBUTE
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.watchdog import Cause, End, Watchdog
from pytest_gpumem.printable import printable
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import row_to_json
from pytest_gpumem.settings import switched_off

Report = dict[str, Any]  # a report as `pytest_report_to_serializable` gives it
Leave = Callable[[str, Report], None]  # hands a test's last report to the process that reports for this one; arguments: node id, report


class WatchdogHooks:
    """Starts the watchdog before the first test, and tells it of tests and reports; registered only with `--gpumem`."""

    def __init__(self, session: GpuSession, *, leave: Leave | None = None, gone: int | None = None) -> None:
        """In a worker of xdist, `leave` takes the report of a test that hung, and `gone` is as for `Watchdog`."""
        self._session = session
        self._leave = leave
        self._gone = gone
        self._items: dict[str, pytest.Item] = {}
        self._told: tuple[Row, ...] = ()  # the rows of the last report

    @pytest.hookimpl(wrapper=True, trylast=True)  # after the further processes that come first
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        gpu = self._session
        self._items = {item.nodeid: item for item in session.items}
        if session.config.option.collectonly or not session.items or gpu.ranges.tool_attached():  # profilers follow a fork
            return (yield)
        part = "processes" in switched_off(os.environ)
        finish = partial(self._finish, session) if self._leave is None and not part else self._say
        gpu.watchdog = Watchdog(finish, gone=self._gone)
        gpu.ranges.entered = gpu.watchdog.enter
        if part or self._leave is not None:
            gpu.watchdog.outlived()  # the process that started this one sees its death
        try:
            return (yield)
        finally:
            if gpu.watchdog is not None:  # no debugger ended it
                gpu.watchdog.outlived()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        if self._session.watchdog is not None:
            self._session.watchdog.hear_interrupts()
        self._tell("start", nodeid, location)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._tell("phase", "setup", time.time())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        self._tell("phase", "call", time.time())

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        self._tell("phase", "teardown", time.time())

    @pytest.hookimpl(trylast=True)  # once others have changed the report
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        gpu = self._session
        if gpu.watchdog is None or self._leave is not None:
            return
        data = gpu.config.hook.pytest_report_to_serializable(config=gpu.config, report=report)
        data["user_properties"] = [(str(name), _plain(value)) for name, value in data["user_properties"]]
        rows = gpu.rows.of(report.nodeid)
        self._tell("report", data, () if rows is self._told else rows)
        self._told = rows

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._tell("finish", nodeid, location)

    @pytest.hookimpl(tryfirst=True)
    def pytest_enter_pdb(self) -> None:
        self._end()

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if self._session.watchdog is not None and excinfo.type is KeyboardInterrupt:  # and not that pytest stops by itself
            self._session.watchdog.reacted()

    @pytest.hookimpl(trylast=True)  # after the teardown of an interrupted test
    def pytest_sessionfinish(self) -> None:
        if self._session.watchdog is not None:
            self._session.watchdog.rest()

    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        self._end()

    def _tell(self, kind: str, *values: object) -> None:
        if self._session.watchdog is not None:
            self._session.watchdog.tell((kind, *values))

    def _end(self) -> None:
        watchdog, self._session.watchdog = self._session.watchdog, None
        if watchdog is not None:
            watchdog.close()

    # In the watchdog

    def _finish(self, session: pytest.Session, end: End, told: list[Any]) -> int:
        """End the session in place of its process; the exit code."""
        gpu, config = self._session, session.config
        gpu.settings = gpu.settings._replace(save=False)
        running = _Running()
        with _silent(config):
            for one in told:
                self._replay(one, running)
        left = [nodeid for nodeid in self._items if nodeid not in running.begun]
        rest = f"; {counted(len(left), 'test')} not run: --gpumem-isolate runs them all the same" if left else ""
        if end.cause is Cause.INTERRUPT:
            code = pytest.ExitCode.INTERRUPTED
            where = "" if running.nodeid is None else f" in {printable(running.nodeid)}"
            try:
                raise KeyboardInterrupt(f"gpumem: the process did not react{where}, and was ended")
            except KeyboardInterrupt:
                config.hook.pytest_keyboard_interrupt(excinfo=pytest.ExceptionInfo.from_current())
        else:
            code = pytest.ExitCode.TESTS_FAILED
            if running.nodeid is None:
                session.shouldfail = f"gpumem: the process ended between two tests{rest}"
            else:
                report, rows = self._failed(running, end)
                gpu.rows.add(running.nodeid, [*gpu.rows.of(running.nodeid), *rows])
                config.hook.pytest_runtest_logreport(report=report)
                session.shouldfail = f"gpumem: the session ended in {printable(running.nodeid)}{rest}"
        session.exitstatus = code
        config.hook.pytest_sessionfinish(session=session, exitstatus=code)
        return int(session.exitstatus)

    def _replay(self, one: tuple[Any, ...], running: _Running) -> None:
        hook = self._session.config.hook
        kind, *values = one
        running.note(kind, values)
        if kind == "start":
            hook.pytest_runtest_logstart(nodeid=values[0], location=values[1])
        elif kind == "finish":
            hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
        elif kind == "report":
            data, rows = values
            report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
            if rows:
                self._session.rows.add(report.nodeid, rows)
            hook.pytest_runtest_logreport(report=report)

    def _say(self, end: End, told: list[Any]) -> int:
        """Name the test to the process that started this one; the exit code."""
        running = _Running()
        for kind, *values in told:
            running.note(kind, values)
        if running.nodeid is None or end.cause is not Cause.TIMEOUT:
            return int(pytest.ExitCode.INTERRUPTED)
        report, rows = self._failed(running, end)
        if self._leave is None:
            os.write(2, f"{printable(running.nodeid)}: {report.longreprtext}\n{_of_tests(end.stacks)}".encode(errors="replace"))
        else:
            setattr(report, ROWS_ATTRIBUTE, [row_to_json(row) for row in rows])
            config = self._session.config
            self._leave(running.nodeid, config.hook.pytest_report_to_serializable(config=config, report=report))
        return int(pytest.ExitCode.TESTS_FAILED)

    def _failed(self, running: _Running, end: End) -> tuple[pytest.TestReport, list[Row]]:
        """The report of the test that did not end, and its row if it measures."""
        assert running.nodeid is not None
        item, text = self._items[running.nodeid], why(end)
        now = time.time()
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            dict.fromkeys(item.keywords, 1),
            "failed",
            text,
            running.when,
            [("gpumem: where it hung", stacks)] if (stacks := _of_tests(end.stacks)) else [],
            now - running.since,
            running.since,
            now,
        )
        measures = BENCHMARK_FIXTURE in getattr(item, "fixturenames", ()) and running.when != "teardown"
        return report, [unmeasured(item, self._session, pytest.fail.Exception(text))] if measures else []


class _Running:
    """The test that runs, from what the watchdog was told."""

    def __init__(self) -> None:
        self.begun: set[str] = set()
        self.nodeid: str | None = None
        self.when: Any = "setup"
        self.since = time.time()

    def note(self, kind: str, values: list[Any]) -> None:
        if kind == "start":
            self.nodeid, self.when, self.since = values[0], "setup", time.time()
            self.begun.add(values[0])
        elif kind == "phase":
            self.when, self.since = values
        elif kind == "finish":
            self.nodeid = None


def why(end: End) -> str:
    """One line on a test that did not end."""
    within = f"; last NVTX range: {end.entered}" if end.entered else ""
    if end.cause is Cause.DEATH:
        return f"gpumem: the process ended in this test, by a crash, a signal or os._exit{within}"
    limit = "" if math.isinf(end.seconds) else f" within {end.seconds:g} s (--gpumem-timeout)"
    return f"gpumem: hung: {end.what} did not end{limit}, and the process was ended{within}"


def _of_tests(stacks: str) -> str:
    """The stacks of threads without those frames that every test has, and without the thread of the watchdog."""
    kept = []
    for thread in stacks.strip().split("\n\n"):
        lines = thread.splitlines()
        outer = next((at for at, line in enumerate(lines) if f"{os.sep}_pytest{os.sep}" in line), len(lines))
        if not any(line.endswith(f" in {Watchdog._obey.__name__}") for line in lines):
            kept.append("\n".join(lines[:outer]))
    return "\n\n".join(kept)


def _plain(value: object) -> object:
    """A value of `record_property` that can be sent."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@contextmanager
def _silent(config: pytest.Config) -> Iterator[None]:
    """Keep the terminal reporter from writing again what the process has written."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is None:
        yield
        return
    file, reporter._tw._file = reporter._tw._file, io.StringIO()
    try:
        yield
    finally:
        with suppress(OSError):
            reporter._tw._file.close()
        reporter._tw._file = file
