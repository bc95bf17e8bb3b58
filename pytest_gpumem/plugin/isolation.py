"""Tests in workers of pytest-xdist: a worker that hangs, or whose context is lost, ends, and xdist replaces it.
The worker leaves the last report of its test in a folder of the controller's, which gives it where xdist would report a crash.
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_gpumem.plugin.guardian import left
from pytest_gpumem.plugin.hangs import failed, interrupts
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.workers import Channel, is_part
from pytest_gpumem.settings import Settings

FOLDER = "last_reports"  # what a worker is given: the controller's folder
_ALIVE = "alive"  # a named pipe in that folder: the controller holds it open until it needs no worker any longer


def isolate(config: pytest.Config, settings: Settings, *, asked: bool) -> None:
    """Have xdist run the tests in one worker, replaced however often, unless the user asked for workers.
    `asked`: by an option. A gate isolates without being asked, where it can: not what workers would refuse.
    Raises `pytest.UsageError`: asked for, and pytest-xdist is not installed, or is switched off.
    """
    if is_part(config):
        return
    if not config.pluginmanager.hasplugin("xdist"):
        if asked:
            raise pytest.UsageError(
                "gpumem: --gpumem-isolate needs pytest-xdist: pip install pytest-xdist"
            )
        return
    option = config.option
    refused = (settings.processes or 1) > 1 or option.collectonly
    if (
        option.numprocesses is None
        and not option.tx
        and not config.getoption("usepdb", False)
        and (asked or not refused)
    ):
        option.tx = ["popen"]
        option.dist = "load" if option.dist == "no" else option.dist


class IsolationFeature(Feature):
    """In a worker: leaves after a test that lost the context; skips a test whose last report was left."""

    def __init__(self, session: GpuSession, folder: Path) -> None:
        self._session = session
        self.folder = folder
        """For the last words of tests, see `guardian.left`."""
        self.alive: int | None = None
        """A descriptor that becomes readable when the controller has gone, or waits for no test any longer."""
        with suppress(OSError):
            self.alive = os.open(folder / _ALIVE, os.O_RDONLY | os.O_NONBLOCK)

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        # Some schedulers of xdist give the test that ended a worker to the next one.
        return True if os.path.exists(left(self.folder, item.nodeid)) else None

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        finally:
            if self._session.lost_in is not None:
                with suppress(Exception):  # of what the lost context held
                    item.session._setupstate.teardown_exact(None)

    @contextmanager
    def logged(self, report: pytest.TestReport) -> Iterator[None]:
        if report.when == "teardown" and self._session.lost_in is not None:
            self._leave(report)  # before xdist sends it
        yield

    def _leave(self, report: pytest.TestReport) -> NoReturn:
        """End the worker, and leave the last report of its test."""
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        file = Path(left(self.folder, report.nodeid))
        part = file.with_suffix(".part")
        part.write_bytes(pickle.dumps(data))
        part.replace(file)
        if self._session.guardian is not None:
            self._session.guardian.close()
        os._exit(pytest.ExitCode.TESTS_FAILED)


class ReplacementFeature(Feature):
    """In the controller: gives the reports that workers left, and ends workers that hang when the session is interrupted."""

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        self._session = session
        # A worker on another machine has a folder of its own, which nobody reads.
        channel.give(FOLDER, lambda here: self._folder.name if here else None)
        self._folder = tempfile.TemporaryDirectory(prefix="gpumem-")
        session.config.add_cleanup(self._folder.cleanup)
        session.config.add_cleanup(self._close)
        alive = Path(self._folder.name, _ALIVE)
        os.mkfifo(alive, 0o600)
        self._alive: int | None = os.open(alive, os.O_RDWR | os.O_NONBLOCK)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        file = Path(left(self._folder.name, crashitem))
        if not file.exists():
            report.longrepr = "the process crashed while it ran this test"
            return
        config, words = self._session.config, file.read_bytes()
        if words.startswith(b"{"):
            last = failed(json.loads(words), self._session)
        else:
            last = config.hook.pytest_report_from_serializable(
                config=config, data=pickle.loads(words)
            )
        vars(report).update(vars(last))

    def interrupted(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if interrupts(excinfo):
            self._close()

    def _close(self) -> None:
        alive, self._alive = self._alive, None
        if alive is not None:
            os.close(alive)
