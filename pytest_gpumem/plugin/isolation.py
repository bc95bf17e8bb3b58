"""Tests in workers of pytest-xdist, which replaces a worker that hangs, or whose context is lost.
The worker leaves its last words in a folder of the controller, which reports them as xdist would
report a crash.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.deadline import FOLDER, last_words
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.plugin.workers import Channel, is_part
from pytest_gpumem.settings import Settings

_HUNG = "gpumem: a measurement did not end in time (--gpumem-timeout), and its process was ended"


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
    refused = settings.processes > 1 or option.collectonly
    if (
        option.numprocesses is None
        and not option.tx
        and not config.getoption("usepdb", False)
        and (asked or not refused)
    ):
        option.tx = ["popen"]
        option.dist = "load" if option.dist == "no" else option.dist


class IsolationFeature(Feature):
    """In a worker: leaves after a test that lost the context; skips one that ended a worker."""

    def __init__(self, session: GpuSession, folder: Path) -> None:
        """`folder`: of the files of `last_words`."""
        self._session = session
        self._folder = folder

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        # Some schedulers of xdist give the test that ended a worker to the next one.
        return True if last_words(self._folder, item.nodeid).exists() else None

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
        write_whole(last_words(self._folder, report.nodeid), json.dumps(data, default=str))
        os._exit(pytest.ExitCode.TESTS_FAILED)


class ReplacementFeature(Feature):
    """In the controller: reports the last words of workers."""

    def __init__(self, config: pytest.Config, channel: Channel) -> None:
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="gpumem-")
        config.add_cleanup(self._folder.cleanup)
        # A worker on another machine has a folder of its own, which nobody reads.
        channel.give(FOLDER, lambda here: self._folder.name if here else None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        file = last_words(self._folder.name, crashitem)
        words = file.read_text(errors="replace") if file.exists() else ""
        if words.startswith("{"):
            restore, data = self._config.hook.pytest_report_from_serializable, json.loads(words)
            vars(report).update(vars(restore(config=self._config, data=data)))
        elif words:
            report.longrepr = f"{_HUNG}\n\n{_without_pytest(words)}"
        else:
            report.longrepr = "the process crashed while it ran this test"


def _without_pytest(stacks: str) -> str:
    """Stacks, the most recent call first, without the frames of pytest that every test has."""
    lines = []
    outside = False
    for line in stacks.splitlines():
        if not line:
            outside = False
        elif f"{os.sep}_pytest{os.sep}" in line:
            outside = True
        if not outside:
            lines.append(line)
    return "\n".join(lines)
