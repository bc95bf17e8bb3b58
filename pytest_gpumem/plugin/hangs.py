"""Tests that hang, crash or leave: what goes into the journal of the guardian, and how SIGTERM and `pytest.exit` end a session."""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.guardian import TERMINATED, of_tests, why
from pytest_gpumem.plugin.guarding import Guardian, Termination, terminate
from pytest_gpumem.plugin.judging import unmeasured
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE, uses
from pytest_gpumem.plugin.reported import ROWS_ATTRIBUTE
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import device_to_json, row_to_json, to_plain

Report = dict[str, Any]  # a report as `pytest_report_to_serializable` gives it
CLOCKS = ("_session_start", "_sessionstarttime", "suite_start", "suite_start_time")
"""Attributes in which pytest's own plugins keep when the session began."""


class GuardianFeature(Feature):
    """Starts the guardian before the first test, and tells it of tests and reports."""

    def __init__(
        self,
        session: GpuSession,
        expectations: ExpectationFeature,
        *,
        part: bool,
        leave: Path | None = None,
        gone: int | None = None,
    ) -> None:
        """`part`: another process has the results of this one, and sees its death. `leave`, `gone`: as for `Guardian`."""
        self._session = session
        self._expectations = expectations
        self._part = part
        self._leave = leave
        self._gone = gone
        self._collected: list[Report] = []  # reports of what was not collected
        self._deselected: list[str] = []
        self._rows: tuple[Row, ...] = ()  # of the last report

    def collected(self, report: pytest.CollectReport) -> None:
        if not report.passed and not self._part:
            self._collected.append(self._plain(report))

    def deselected(self, items: Sequence[pytest.Item]) -> None:
        self._deselected += [item.nodeid for item in items]

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        gpu, config = self._session, session.config
        if (
            config.option.collectonly or not session.items or gpu.ranges.tool_attached()
        ):  # profilers follow other processes
            yield
            return
        arguments = None if self._part else [str(one) for one in config.invocation_params.args]
        gpu.guard(
            Guardian(
                config.invocation_params.dir,
                arguments,
                leave=self._leave,
                gone=self._gone,
                writing=gpu.writing,
            )
        )
        if not self._part:
            tests = [(item.nodeid, uses(item, BENCHMARK_FIXTURE)) for item in session.items]
            clocks = [
                (type(one).__name__, vars(one))
                for one in config.pluginmanager.get_plugins()
                if hasattr(one, "__dict__")
            ]
            begun = {
                (kind, name): found[name]
                for kind, found in clocks
                for name in CLOCKS
                if name in found
            }
            base = None if gpu.base is None else to_plain(gpu.base)
            more = pickle.dumps((begun, self._collected, base, self._expectations.seen))
            self._tell("session", device_to_json(gpu.facts), tests, self._deselected, more)
        try:
            yield
        finally:
            if gpu.guardian is not None:  # no debugger ended it
                gpu.guardian.outlived()

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._session.guardian is not None:
            self._session.guardian.renew()
            measures = BENCHMARK_FIXTURE in getattr(item, "fixturenames", ())
            test = {"nodeid": item.nodeid, "location": item.location, "keywords": [*item.keywords]}
            self._tell(
                "start",
                test | {"range": self._session.names.unique(item.nodeid) if measures else None},
            )
        yield
        self._tell("finish", item.nodeid, item.location)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        self._tell("phase", "setup", time.time())
        return NOTHING

    def call(self, item: pytest.Item) -> AbstractContextManager[None]:
        self._tell("phase", "call", time.time())
        return NOTHING

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        self._tell("phase", "teardown", time.time())
        return NOTHING

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        yield  # others change the report
        if self._session.guardian is None or self._part:
            return
        rows = self._session.rows.of(report.nodeid)
        data = self._plain(report)
        if rows and rows is not self._rows:
            data[ROWS_ATTRIBUTE] = [row_to_json(row) for row in rows]
        self._rows = rows
        self._tell("report", pickle.dumps(data))

    def pytest_enter_pdb(self) -> None:
        self._session.unguard()

    def interrupted(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if self._session.guardian is not None and interrupts(excinfo):
            self._session.guardian.handled(signal.SIGINT)

    def _tell(self, kind: str, *values: object) -> None:
        if self._session.guardian is not None:
            self._session.guardian.tell(kind, *values)

    def _plain(self, report: pytest.CollectReport | pytest.TestReport) -> Report:
        config = self._session.config
        data: Report = config.hook.pytest_report_to_serializable(config=config, report=report)
        if "user_properties" in data:
            data["user_properties"] = [
                (str(name), _plain(value)) for name, value in data["user_properties"]
            ]
        return data


def _plain(value: object) -> object:
    """A value of `record_property` that can be sent."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def interrupts(excinfo: pytest.ExceptionInfo[BaseException]) -> bool:
    """True for Ctrl-C and SIGTERM, and not where pytest stops by itself."""
    return (
        excinfo.type is KeyboardInterrupt
        or getattr(excinfo.value, "returncode", None) == TERMINATED
    )


def failed(end: dict[str, Any], session: GpuSession) -> pytest.TestReport:
    """The report of a test that did not end, with its row if it measures. `end`: as the guardian wrote it."""
    test, text, now = end["test"], why(end), time.time()
    sections = (
        [(f"gpumem: where it {'left' if end['cause'] == 'left' else 'hung'}", stacks)]
        if (stacks := of_tests(end["stacks"]))
        else []
    )
    report = pytest.TestReport(
        test["nodeid"],
        tuple(test["location"]),
        dict.fromkeys(test["keywords"], 1),
        "failed",
        text,
        end["when"],
        sections,
        now - end["since"],
        end["since"],
        now,
    )
    if test["range"] is not None and end["when"] != "teardown":
        row = unmeasured(test["nodeid"], test["range"], session, pytest.fail.Exception(text))
        setattr(report, ROWS_ATTRIBUTE, [row_to_json(row)])
    return report


class EndFeature(Feature):
    """Ends a session after SIGTERM and `pytest.exit`; not registered in a process whose end another one looks after."""

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        with suppress(ValueError):  # not in the main thread
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, terminate)
                session.config.add_cleanup(_terminate_as_before)
        try:
            yield
        except Termination as error:
            raise pytest.exit.Exception("gpumem: SIGTERM", TERMINATED).with_traceback(
                error.__traceback__
            ) from None
        except pytest.exit.Exception as error:
            error.returncode = error.returncode or pytest.ExitCode.INTERRUPTED  # tests have not run
            raise


def ignore_termination() -> None:
    """From here on the results are written, and nothing else follows: SIGTERM changes nothing."""
    if signal.getsignal(signal.SIGTERM) is terminate:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _terminate_as_before() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
