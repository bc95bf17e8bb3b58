"""The pytest that writes the results of a session that ended: it collects and runs nothing, and takes the reports from the journal.

Every plugin is given what it would have been given, and writes its files.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_gpumem.devices.opening import DeviceChoice
from pytest_gpumem.devices.protocol import Device, DeviceError
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.plugin.expecting import ExpectationFeature
from pytest_gpumem.plugin.guardian import TERMINATED, records
from pytest_gpumem.plugin.hangs import failed
from pytest_gpumem.plugin.marks import BENCHMARK_FIXTURE
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.printable import printable
from pytest_gpumem.records.schema import device_from_json


class SessionRemains:
    """What a session left."""

    def __init__(self, journal: int) -> None:
        os.set_inheritable(journal, False)
        _, (_, facts, self.tests, self.deselected, more), *self.records, (_, end) = records(journal)
        self.end: dict[str, Any] = end  # see `guardian.Watch`
        self.begun, self.reports, base, self.collected = pickle.loads(more)
        self.base: dict[str, Any] | None = base
        self.chosen = DeviceChoice(device_from_json(facts), _closed)


def _closed() -> Device:
    raise DeviceError("the session has ended")


class _Test(pytest.Item):
    """A test of that session."""

    fixturenames: Sequence[str] = ()

    def runtest(self) -> None:
        """It ran."""

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


class ResumeFeature(Feature):
    """Takes tests and reports from the journal; registered in that pytest alone."""

    def __init__(
        self, session: GpuSession, resumed: SessionRemains, expectations: ExpectationFeature
    ) -> None:
        self._session = session
        self._resumed = resumed
        self._expectations = expectations
        self._screen: Any = None  # the file of the terminal reporter

    @property
    def _reporter(self) -> Any:
        return self._session.config.pluginmanager.getplugin("terminalreporter")

    def started(self, session: pytest.Session) -> None:
        if self._reporter is not None:  # the session has written all that comes before its summary
            self._screen, self._reporter._tw._file = self._reporter._tw._file, io.StringIO()

    def pytest_collection(self, session: pytest.Session) -> bool:
        hook, resumed = session.config.hook, self._resumed
        for plugin in session.config.pluginmanager.get_plugins():
            for (kind, name), value in resumed.begun.items():
                if type(plugin).__name__ == kind and name in vars(plugin):
                    setattr(plugin, name, value)
        for data in resumed.reports:
            hook.pytest_collectreport(
                report=hook.pytest_report_from_serializable(config=session.config, data=data)
            )
        session.items = [
            self._test(session, nodeid, measures) for nodeid, measures in resumed.tests
        ]
        session.testscollected = len(session.items)
        if resumed.deselected:
            hook.pytest_deselected(
                items=[self._test(session, nodeid, False) for nodeid in resumed.deselected]
            )
        self._expectations.take(resumed.collected)
        hook.pytest_collection_finish(session=session)
        return True

    def tests(self, session: pytest.Session) -> NoReturn:
        config, end, begun = session.config, self._resumed.end, set[str]()
        for kind, *values in self._resumed.records:
            if kind == "start":
                begun.add(values[0]["nodeid"])
                config.hook.pytest_runtest_logstart(
                    nodeid=values[0]["nodeid"], location=values[0]["location"]
                )
            elif kind == "finish":
                config.hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
            elif kind == "report":
                report = config.hook.pytest_report_from_serializable(
                    config=config, data=pickle.loads(values[0])
                )
                config.hook.pytest_runtest_logreport(report=report)
        test = None if end["test"] is None else end["test"]["nodeid"]
        if end["cause"] == "signal":
            self._show()
            where = "" if test is None else f" in {printable(test)}"
            why = f"gpumem: the process did not react{where}, and was ended"
            raise (
                pytest.exit.Exception(why, TERMINATED)
                if end["terminated"]
                else KeyboardInterrupt(why)
            )
        left = len(session.items) - len(begun)
        rest = (
            f"; {counted(left, 'test')} not run: --gpumem-isolate runs them all the same"
            if left > 0
            else ""
        )
        if test is None:
            session.shouldfail = f"gpumem: the process ended between two tests{rest}"
        else:
            config.hook.pytest_runtest_logreport(report=failed(end, self._session))
            session.shouldfail = f"gpumem: the session ended in {printable(test)}{rest}"
        self._show()
        raise session.Failed(session.shouldfail)

    def broke(self) -> None:
        self._show()

    def _test(self, session: pytest.Session, nodeid: str, measures: bool) -> pytest.Item:
        test: _Test = _Test.from_parent(session, name=nodeid.rpartition("::")[2], nodeid=nodeid)
        test.fixturenames = (BENCHMARK_FIXTURE,) if measures else ()
        return test

    def _show(self) -> None:
        if self._screen is not None:
            self._reporter._tw._file = self._screen
