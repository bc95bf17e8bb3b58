"""Isolation: a test that crashes, hangs or loses the context costs no other test, in a worker of
pytest-xdist that is replaced. The worker leaves its last words in a folder of the controller, which
reports them as xdist would report a crash.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

from pytest_gpumem.devices.protocol import ContextLost, DeviceError
from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.deadline import FOLDER, last_words
from pytest_gpumem.plugin.running import ENDS, NOTHING, Feature
from pytest_gpumem.plugin.session import TEST, GpuSession
from pytest_gpumem.plugin.workers import Channel, given, in_parts, is_part

_HUNG = "gpumem: a measurement did not end in time (--gpumem-timeout), and its process was ended"


class IsolationFeature(Feature):
    """Waits for the work of each test, so that the test that lost the context fails. A worker
    leaves after it. In another process, later tests that use the device do not run.
    """

    name = "isolation"

    def __init__(self, session: GpuSession, channel: Channel) -> None:
        self._session = session
        config = session.config
        self._in_worker = is_part(config)
        self._folder: str | None = given(config, FOLDER)  # of the files of `last_words`
        if self._folder is None and in_parts(config):  # the controller, or on another machine
            folder = tempfile.TemporaryDirectory(prefix="gpumem-")
            config.add_cleanup(folder.cleanup)
            self._folder = folder.name
        channel.give(FOLDER, lambda is_here: self._folder if is_here else None)

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        except ENDS:
            raise
        except BaseException as error:  # pytest's own outcomes are no Exceptions
            try:
                self._wait(item)
            except DeviceError:
                # Any other failure is the test's already.
                if isinstance(error, pytest.skip.Exception):
                    raise
            raise
        self._wait(item)

    def _wait(self, item: pytest.Item) -> None:
        """Wait for the work of a test. One without our fixtures fails by a lost context alone."""
        try:
            self._session.wait(item)
        except ContextLost:
            raise
        except DeviceError:  # such as a capture that is still open
            if item.stash.get(TEST, None) is not None:
                raise

    # In a worker

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        # Some schedulers of xdist give the test that ended a worker to the next one.
        if self._in_worker and self._last_words(item.nodeid).exists():
            return True
        return None

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        finally:
            if self._in_worker and self._session.lost_in is not None:
                with suppress(Exception):  # of what the lost context held
                    item.session._setupstate.teardown_exact(None)

    def logged(self, report: pytest.TestReport) -> AbstractContextManager[None]:
        lost = self._session.lost_in is not None
        if self._in_worker and lost and report.when == "teardown":
            self._leave(report)  # before xdist sends it
        return NOTHING

    def _leave(self, report: pytest.TestReport) -> NoReturn:
        """End the worker, and leave the last report of its test."""
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        write_whole(self._last_words(report.nodeid), json.dumps(data, default=str))
        os._exit(pytest.ExitCode.TESTS_FAILED)

    def _last_words(self, nodeid: str) -> Path:
        assert self._folder is not None
        return last_words(self._folder, nodeid)

    # In the controller

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        file = self._last_words(crashitem)
        words = file.read_text(errors="replace") if file.exists() else ""
        if words.startswith("{"):
            config, data = self._session.config, json.loads(words)
            restored = config.hook.pytest_report_from_serializable(config=config, data=data)
            vars(report).update(vars(restored))
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
