"""The waits of each test's body: `--gpumem-waits`, and the limit `max_waits`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.plugin.forks import FORKED
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.session import WATCHED, GpuSession
from pytest_gpumem.records.waits import Waits

if TYPE_CHECKING:
    from pytest_gpumem.plugin.watched_test import WatchedTest

SIMULATED = "not read: the simulated device has no calls"


class WaitFeature(Feature):
    """Reads waits, closest to the body: where other features wait, the test does not."""

    name = "waits"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._said = False
        if session.settings.waits and session.facts.simulated:
            self._say(SIMULATED)

    def _say(self, why: str) -> None:
        """Say at the session's end why waits are not read: the first reason."""
        if not self._said:
            self._session.remark(f"waits: {why}")
            self._said = True

    def call(self, item: pytest.Item) -> AbstractContextManager[None]:
        watched: WatchedTest | None = item.stash.get(WATCHED, None)
        if watched is None or not watched.reads_waits:
            return NOTHING
        return self._reading(watched)

    @contextmanager
    def _reading(self, watched: WatchedTest) -> Iterator[None]:
        counter, forks = self._session.chosen.waits(), self._session.forks.count
        if counter is None:
            watched.waits = Waits(not_read=SIMULATED)
            yield
            return
        try:
            counter.start()
        except NotCounted as why:
            watched.waits = Waits(not_read=str(why))
            self._say(f"{why}, from {watched.item.nodeid} on")
            yield
            return
        watched.counter = counter
        try:
            yield
        finally:
            counter.stop()
            watched.counter = None
            watched.waits = counter.read(watched.item.config.rootpath, watched.settings.allow_waits)
            if self._session.forks.count != forks:
                watched.waits = Waits(not_read=FORKED)
