"""The features that watch the memory and the waits of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpumem.devices.errors import NotCounted
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.plugin.marks import MARKER, TEST_FIXTURE, uses
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import NO_FIXTURE_SIMULATED, GpuSession, state_of
from pytest_gpumem.records.footprint import Waits
from pytest_gpumem.settings import SettingsError

if TYPE_CHECKING:
    from pytest_gpumem.plugin.gpu_memory import WatchedTest

SIMULATED = "not read: a simulated device calls no driver"  # of waits


class FootprintFeature(Feature):
    """Watches tests whose memory or waits somebody asks for, and tests with our fixtures."""

    name = "footprint"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._watching = False  # the sources report
        settings, written = session.settings, []
        limited = any(settings.limits.values()) or session.in_gate
        self._of_any = limited or settings.footprint == "on" or settings.waits
        """Tests that say nothing may be watched too."""
        for name in OF_FOOTPRINT:
            if settings.limits[name] is not None:
                written.append(f"{settings.origins[name]}: {name} {settings.limits[name]}")
        if written and session.facts.simulated:
            verb = "limits" if len(written) == 1 else "limit"
            session.remark(
                f"{', '.join(written)} {verb} only tests with fixtures of this plugin: "
                f"{NO_FIXTURE_SIMULATED}"
            )

    def setup(self, item: pytest.Item) -> None:
        state = state_of(item)
        state.watched = None
        says_so = uses(item, TEST_FIXTURE) or item.get_closest_marker(MARKER) is not None
        if self._session.lost_in is None and (says_so or self._of_any):
            from pytest_gpumem.plugin.gpu_memory import WatchedTest

            with suppress(SettingsError):  # reported where the marker is read
                watched = WatchedTest(item, self._session)
                if watched.watches:
                    self._watching = True
                    watched.begin()
                if watched.watches or watched.reads_waits:
                    state.watched = watched

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = state_of(item).watched
        if watched is None:
            yield
            return
        watched.look()
        with watched.warmed_up():
            yield

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = state_of(item).watched
        try:
            yield
        finally:
            if watched is not None:
                self._end(item, watched)

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Memory of a fixture of a wider scope than one test belongs to no test."""
        session = self._session
        if not self._watching or fixturedef.scope == "function" or session.lost_in is not None:
            yield
            return
        footprints = session.footprints
        with footprints.ours() as growth:
            yield
        if growth:
            fixturedef.addfinalizer(lambda: footprints.released(growth))

    def _end(self, item: pytest.Item, watched: WatchedTest) -> None:
        """Complete the rows of a test with what it keeps. Raises its failure by that."""
        from pytest_gpumem.plugin.rows import judge_the_end

        state_of(item).watched = None
        footprint = None
        try:
            if self._session.lost_in is None:
                footprint = watched.footprint(ended=True)
        finally:
            self._watching = False
            watched.end()
        if footprint is None:
            return
        if watched.shown and not footprint.driver_watched:
            unseen = "; ".join(footprint.not_watched)
            why = f"not all is watched from {item.nodeid} on: {unseen}"
            self._session.remark_first("footprint", why)
        judge_the_end(item, watched, footprint)


class WaitFeature(Feature):
    """Reads waits, closest to the body: where other features wait, the test does not."""

    name = "waits"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        if session.settings.waits and session.facts.simulated:
            session.remark(f"waits: {SIMULATED}")

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = state_of(item).watched
        if watched is None or not watched.reads_waits:
            yield
            return
        session, counter = self._session, self._session.chosen.waits()
        try:
            if counter is None:
                raise NotCounted(SIMULATED)
            counter.start()
        except NotCounted as why:
            watched.waits = Waits(not_read=str(why))
            if counter is not None:
                session.remark_first("waits", f"{why}, from {item.nodeid} on")
            yield
            return
        watched.count_waits = counter.start
        try:
            yield
        finally:
            counter.stop()
            watched.waits = counter.read(item.config.rootpath, watched.settings.allow_waits)
