"""What a test leaves on the device: set-aside of L2, window lines and limits are restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from _pytest.warnings import catch_warnings_for_item

from pytest_gpumem.devices.protocol import ContextLost, DeviceError
from pytest_gpumem.plugin.running import ENDS, NOTHING, Feature
from pytest_gpumem.plugin.session import GpuSession


class LeftoverFeature(Feature):
    """Looks before and after each test once the device is open; it opens nothing itself.
    A change by a fixture of a wider scope than one test stays until that fixture ends.
    """

    name = "leftovers"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._running: pytest.Item | None = None  # the test that has begun, until it is settled

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        self._running = item
        if self._session.watch is not None:
            self._session.watch.begin()
        return NOTHING

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        """Look after every fixture's teardown."""
        try:
            yield
        except ENDS:
            raise  # the session's end looks
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

    def end(self, session: pytest.Session) -> None:
        """Tear down a test that was interrupted, as pytest is about to, and look at it."""
        session._setupstate.teardown_exact(None)
        item = self._running
        if item is None:
            return
        recording = NOTHING
        if session.config.pluginmanager.hasplugin("warnings"):
            recording = catch_warnings_for_item(session.config, item.ihook, "runtest", item)
        # The session ends anyway, also where warnings are errors.
        with recording, suppress(Warning, DeviceError, pytest.fail.Exception):
            self._settle(item)

    def _settle(self, item: pytest.Item) -> None:
        """Restore the state that the test changed, and warn of it, or fail by it under strict."""
        self._running = None
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
