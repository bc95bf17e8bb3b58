"""Isolation: a test has its GPUs for itself, and changes nothing for the tests after it.

The set-aside of L2, windows and limits that a test leaves on the device are restored.

A test that crashes, hangs or loses the context costs no other test, in a worker of pytest-xdist
that is replaced. The controller reports the worker's last words from a file.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem.devices.errors import ContextLost, DeviceError, Unsupported
from pytest_gpumem.devices.memory_kinds import PLENTY
from pytest_gpumem.files import write_whole
from pytest_gpumem.plugin.marks import (
    KERNELS_FIXTURE,
    PEER_FIXTURE,
    TEST_FIXTURE,
    keywords_of,
    uses,
)
from pytest_gpumem.plugin.running import ENDS, Feature
from pytest_gpumem.plugin.session import GpuSession, state_of
from pytest_gpumem.plugin.workers import Workers, given
from pytest_gpumem.settings import of_marker

_HUNG = "gpumem: a measurement did not end in time (--gpumem-timeout), and its process was ended"
REPEAT = 60.0  # seconds between messages
LIMIT = 600.0  # seconds of waiting for the same test


# Exclusive use of GPUs


class ExclusiveFeature(Feature):
    """Gives a test with our fixtures its GPUs for itself."""

    name = "exclusive use"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._limit = LIMIT  # 0 after a wait that reached it: others fail at once
        self._last_line = -REPEAT  # when it was printed, on the monotonic clock

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Afterwards, give back the memory that is kept, unless the next test measures with it."""
        try:
            yield
        finally:
            session = self._session
            unless_free = 1.0
            if nextitem is not None and uses(nextitem, TEST_FIXTURE):
                unless_free = 0.0 if uses(nextitem, KERNELS_FIXTURE) else PLENTY
            if unless_free and session.is_open and session.lost_in is None:
                with suppress(DeviceError):  # a capture is open; the next measurement tries again
                    session.device.memory.make_room(unless_free=unless_free)

    @contextmanager
    def use(self, item: pytest.Item) -> Iterator[None]:
        """Wait for the GPUs of a test: one, two with `peer_buffer`, or as many as its marker says.
        Raises `DeviceError`; `Unsupported`: the test needs more GPUs than there are.
        """
        session = self._session
        gpus, name = session.chosen.gpus, session.facts.name
        count = of_marker(keywords_of(item), "gpus")
        there = max(1, len(gpus))
        if count is not None and count > there:
            raise Unsupported(
                f"the test needs {count} GPUs (gpus={count}); this process sees {there}"
            )
        from pytest_gpumem.devices.locks import exclusive

        count = count or (2 if uses(item, PEER_FIXTURE) else 1)
        test = f"{item.nodeid} in {session.config.rootpath}"
        with ExitStack() as stack:
            # In one order, or two tests wait for each other's GPU for ever.
            for uuid in sorted(gpus[:count]):
                lock = exclusive(uuid, name, self._tell, test=test, limit=self._limit)
                try:
                    stack.enter_context(lock)
                except DeviceError:
                    self._limit = 0.0
                    raise
            yield

    def _tell(self, line: str) -> None:
        """Print a line past pytest's capture; one a minute, however many tests wait."""
        now = time.monotonic()
        if now - self._last_line >= REPEAT:
            self._last_line = now
            capture = self._session.config.pluginmanager.getplugin("capturemanager")
            with nullcontext() if capture is None else capture.global_and_fixture_disabled():
                print(f"\n{line}", file=sys.stderr, flush=True)


# Lost contexts, crashes and hangs


def last_words(folder: str, nodeid: str) -> Path:
    """The file that a worker leaves if a test ends it: stacks, or the last report as JSON."""
    return Path(folder, hashlib.sha256(nodeid.encode("utf-8", "surrogatepass")).hexdigest())


class IsolationFeature(Feature):
    """Waits for the work of each test, so that the test that lost the context fails. A worker ends
    then; in another process, later tests that use the device do not run.
    """

    name = "isolation"

    def __init__(self, session: GpuSession, workers: Workers) -> None:
        self._session, self._folder = session, workers.folder
        self._has_controller = bool((given(session.config) or {}).get("folder"))
        """True in a worker of a controller on this machine."""
        self._stderr = os.dup(2)  # pytest does not capture the copy
        self._hint: threading.Timer | None = None
        session.config.add_cleanup(partial(os.close, self._stderr))

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        """Wait for the work of a test. One without our fixtures fails by a lost context alone."""
        error: BaseException | None = None
        try:
            yield
        except ENDS:
            raise
        except BaseException as raised:  # pytest's outcomes are no Exceptions
            error = raised
        try:
            self._session.wait(item)
        except DeviceError as trouble:  # such as a capture that is still open
            ours = isinstance(trouble, ContextLost) or state_of(item).test is not None
            # Any other failure is the test's already.
            if ours and (error is None or isinstance(error, pytest.skip.Exception)):
                raise
        if error is not None:
            raise error

    # Hangs

    @contextmanager
    def limit(self, item: pytest.Item, seconds: float) -> Iterator[None]:
        """End this process if a block takes too long, unless pytest-timeout limits the test."""
        if hasattr(item, "cancel_timeout"):  # pytest-timeout's timer runs
            yield
        elif self._has_controller:
            file = last_words(self._folder, item.nodeid)
            with file.open("wb") as stacks:
                faulthandler.dump_traceback_later(seconds, exit=True, file=stacks)
                try:
                    yield
                finally:
                    faulthandler.cancel_dump_traceback_later()
                    file.unlink(missing_ok=True)
        else:
            self._hint = threading.Timer(seconds, self._end, [item.nodeid, seconds])
            self._hint.daemon = True
            self._hint.start()
            latest = seconds + 1  # for Python to write the hint; it cannot where C keeps its lock
            faulthandler.dump_traceback_later(latest, exit=True, file=self._stderr)
            try:
                yield
            finally:
                self.pytest_enter_pdb()

    def pytest_enter_pdb(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._hint is not None:
            self._hint.cancel()

    def _end(self, nodeid: str, seconds: float) -> None:
        hint = (
            f"\ngpumem: {nodeid}: a measurement did not end within {seconds:g} s "
            "(--gpumem-timeout), and the process ends. Rows that were not saved are lost; "
            "with --gpumem-isolate only this test fails.\n"
        )
        os.write(self._stderr, hint.encode(errors="backslashreplace"))
        faulthandler.dump_traceback(self._stderr)
        os._exit(pytest.ExitCode.TESTS_FAILED)

    # In a worker

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        # Some schedulers of xdist give the test that ended a worker to the next one.
        repeats = self._session.is_part and last_words(self._folder, item.nodeid).exists()
        return True if repeats else None

    @property
    def _leaves(self) -> bool:
        return self._session.is_part and self._session.lost_in is not None

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        finally:
            if self._leaves:
                with suppress(Exception):  # of what the lost context held
                    item.session._setupstate.teardown_exact(None)

    def logged(self, report: pytest.TestReport) -> None:
        """End the worker before xdist sends the last report of its test, and leave that."""
        if self._leaves and report.when == "teardown":
            config = self._session.config
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            words = json.dumps(data, default=str)
            write_whole(last_words(self._folder, report.nodeid), words)
            os._exit(pytest.ExitCode.TESTS_FAILED)

    # In the controller

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        report.location = *report.location[:2], crashitem.partition("::")[2]
        file = last_words(self._folder, crashitem)
        words = file.read_text(errors="replace") if file.exists() else ""
        if words.startswith("{"):
            config, data = self._session.config, json.loads(words)
            restored = config.hook.pytest_report_from_serializable(config=config, data=data)
            vars(report).update(vars(restored))
        elif words:
            report.longrepr = f"{_HUNG}\n\n{_without_pytest(words)}"


class LeftoverFeature(Feature):
    """Looks before and after each test once the device is open. What a fixture of a wider scope
    changes stays until that fixture ends.
    """

    name = "leftovers"

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    def setup(self, item: pytest.Item) -> None:
        if self._session.watch is not None:
            self._session.watch.begin()

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        try:
            yield
        except ENDS:
            raise  # with the session, the process's context ends
        except BaseException:
            self._settle(item)
            raise
        self._settle(item)

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        watch = self._session.watch
        if watch is None or fixturedef.scope == "function":
            yield
            return
        before = watch.look()
        # Finalizers run in reverse order: after the fixture's teardown.
        fixturedef.addfinalizer(partial(watch.ended, fixturedef))
        yield
        watch.keep(fixturedef, before)

    def _settle(self, item: pytest.Item) -> None:
        """Restore the state that the test changed, and warn of it, or fail by it under strict."""
        try:
            self._session.wait(item)
        except ContextLost:
            raise
        except DeviceError:  # such as a capture that is still open
            pass
        watch = self._session.watch
        left = None if watch is None or self._session.lost_in is not None else watch.settle()
        if left is None:
            return
        from pytest_gpumem.memory.l2 import LeftoverWarning

        what, repaired = left
        text = f"{item.nodeid} left {what}"
        if not repaired and self._session.settings.strict:
            raise pytest.fail.Exception(f"gpumem: --gpumem-strict: {text}", pytrace=False)
        item.warn(LeftoverWarning(text))


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
