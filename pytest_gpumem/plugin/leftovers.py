"""The leftovers of a test on the device: work that runs, a lost context, memory that is kept for the next one, a changed L2 cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
from _pytest.warnings import catch_warnings_for_item

from pytest_gpumem.devices.protocol import PLENTY, ContextLost, DeviceError
from pytest_gpumem.memory.l2 import LeftoverWarning
from pytest_gpumem.plugin.marks import KERNELS_FIXTURE, TEST_FIXTURE, uses
from pytest_gpumem.plugin.running import ENDS, Feature
from pytest_gpumem.plugin.state import TEST, GpuSession
from pytest_gpumem.ranges import phase


class WorkFeature(Feature):
    """Names the phases of a test for profilers, and waits for the work of its body."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @contextmanager
    def test(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        session = self._session
        with session.ranges.test(session.names.unique(item.nodeid), item.nodeid):
            try:
                yield
            finally:
                # Also of a test that was skipped, whose fixtures were never set up.
                if session.ledger is not None:
                    session.ledger.ended(item.nodeid)
                if nextitem is None or not uses(nextitem, TEST_FIXTURE):
                    session.make_room()
                elif not uses(nextitem, KERNELS_FIXTURE):
                    session.make_room(unless_free=PLENTY)

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._session.ranges.range(phase(self._session.names.unique(item.nodeid), "setup"))

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
                if isinstance(
                    error, pytest.skip.Exception
                ):  # any other failure is the test's already
                    raise
            raise
        self._wait(item)

    def _wait(self, item: pytest.Item) -> None:
        """Wait for the work of a test. Of one without our fixtures, only the loss of the context is its failure."""
        try:
            self._session.wait(item)
        except ContextLost:
            raise
        except DeviceError:  # such as a capture that is still open
            if item.stash.get(TEST, None) is not None:
                raise

    def teardown(self, item: pytest.Item) -> AbstractContextManager[None]:
        return self._session.ranges.range(
            phase(self._session.names.unique(item.nodeid), "teardown")
        )


class LeftoverFeature(Feature):
    """Looks before and after each test once the device is open; it opens nothing itself.
    A change by a fixture of a wider scope than one test stays until that fixture ends.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        # the test that has begun and was not looked at since
        self._running: pytest.Item | None = None

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        self._running = item
        if self._session.watch is not None:
            self._session.watch.begin()
        yield

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        """Look after every fixture's own teardown."""
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
        if watch is not None and fixturedef.scope == "function":
            yield
            return
        before = None if watch is None else watch.look()
        # Finalizers run in reverse order: this one after the fixture's own teardown, the other one ahead of it.
        fixturedef.addfinalizer(partial(self._ended, fixturedef))
        yield
        if watch is not None and before is not None:
            watch.keep(fixturedef, before)
        fixturedef.addfinalizer(partial(self._ending, fixturedef))

    def end(self, session: pytest.Session) -> None:
        """Tear down a test that was interrupted, as pytest is about to, and look at it."""
        session._setupstate.teardown_exact(None)
        if (item := self._running) is None:
            return
        recorded = session.config.pluginmanager.hasplugin("warnings")
        recording = (
            catch_warnings_for_item(session.config, item.ihook, "runtest", item)
            if recorded
            else nullcontext()
        )
        with (
            recording,
            suppress(LeftoverWarning, DeviceError, pytest.fail.Exception),
        ):  # where warnings are errors: the session ends anyway
            self._settle(item)

    def _ending(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ending(fixturedef)

    def _ended(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ended(fixturedef)

    def _settle(self, item: pytest.Item) -> None:
        """Restore the state that the test changed, and warn of it.
        Raises `ContextLost`: the test lost the context since its body ended.
        Raises `pytest.fail.Exception`: the state cannot be put back, under `--gpumem-strict`.
        Raises `LeftoverWarning`: warnings of this class are errors.
        """
        self._running = None
        try:
            self._session.wait(item)
        except ContextLost:
            raise
        except DeviceError:  # such as a capture that is still open
            pass
        if self._session.lost_in is not None:
            return
        left = None if self._session.watch is None else self._session.watch.settle()
        if left is None:
            return
        text = f"{item.nodeid} left {left.text}"
        if not left.repaired and self._session.settings.strict:
            raise pytest.fail.Exception(f"gpumem: --gpumem-strict: {text}", pytrace=False)
        item.warn(LeftoverWarning(text))
