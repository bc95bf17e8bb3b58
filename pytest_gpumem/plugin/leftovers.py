"""What a test leaves of persisting L2 is put back before the next one, and named."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.memory.l2 import LeftBehind

if TYPE_CHECKING:
    from pytest_gpumem.plugin.session import GpuSession

_ENDS = (KeyboardInterrupt, SystemExit, pytest.exit.Exception)
"""What ends the session, and is not to be replaced by anything else."""


class LeftoverHooks:
    """Looks before and after each test once the device is open; registered only with `--gpumem`, and opens nothing itself.

    What a fixture of a wider scope than one test changes is its own until it ends. So is, on its way out, what a fixture of any scope
    puts back that was set up before the device was opened: what it had changed was not seen.
    """

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._running: pytest.Item | None = None
        """The test that has begun and was not looked at since."""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        self._running = item
        if self._session.watch is not None:
            self._session.watch.begin()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after every fixture's own teardown
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        try:
            result = yield
        except _ENDS:
            raise  # the session's end looks
        except BaseException:
            try:
                self._settle(item)
            except pytest.fail.Exception as also:  # beside the error that is there already
                item.add_report_section("teardown", "gpumem", str(also))
            raise
        self._settle(item)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        watch = self._session.watch
        if watch is not None and fixturedef.scope == "function":
            return (yield)
        before = None if watch is None else watch.look()
        # Finalizers run in reverse order: this one after the fixture's own teardown, the other one ahead of it.
        fixturedef.addfinalizer(partial(self._ended, fixturedef))
        result = yield
        if watch is not None and before is not None:
            watch.keep(fixturedef, before)
        fixturedef.addfinalizer(partial(self._ending, fixturedef))
        return result

    @pytest.hookimpl(trylast=True)  # after the teardown of what an interrupted test had set up
    def pytest_sessionfinish(self) -> None:
        if self._running is not None:
            with suppress(LeftBehind, pytest.fail.Exception):  # where warnings are errors: the session ends anyway
                self._settle(self._running)

    def _ending(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ending(fixturedef)

    def _ended(self, fixturedef: pytest.FixtureDef[Any]) -> None:
        if self._session.watch is not None:
            self._session.watch.ended(fixturedef)

    def _settle(self, item: pytest.Item) -> None:
        """Put back what the test left, and warn of it.

        Raises:
            pytest.fail.Exception: it cannot be put back, under `--gpumem-strict`; or warnings of the class are errors.
        """
        self._running = None
        left = None if self._session.watch is None else self._session.watch.settle()
        if left is None:
            return
        text = f"{item.nodeid} left {left.text}"
        if not left.repaired and self._session.settings.strict:
            raise pytest.fail.Exception(f"gpumem: --gpumem-strict: {text}", pytrace=False)
        try:
            item.warn(LeftBehind(text))
        except LeftBehind:
            raise pytest.fail.Exception(f"LeftBehind: {text}", pytrace=False) from None
