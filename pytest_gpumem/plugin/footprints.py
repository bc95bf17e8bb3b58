"""The features that watch the memory and the waits of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest

from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.plugin.gpu_memory import NO_FIXTURE_SIMULATED, WatchedTest
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.session import FORKED, GpuSession, state_of
from pytest_gpumem.records.footprint import Waits
from pytest_gpumem.settings import SettingsError, merge_limits

SIMULATED = "not read: a simulated device calls no driver"  # of waits


class FootprintFeature(Feature):
    """Watches tests whose memory or waits somebody asks for, and tests with our fixtures."""

    name = "footprint"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._watching = False  # the sources report
        self._said = False  # why memory is not watched
        limits = merge_limits(None, None, session.settings, OF_FOOTPRINT)
        written = []
        for name, origin in limits.origin.items():
            written.append(f"{origin}: {name} {getattr(limits, name)}")
        if written and session.facts.simulated:
            verb = "limits" if len(written) == 1 else "limit"
            session.remark(
                f"{', '.join(written)} {verb} only tests with fixtures of this plugin: "
                f"{NO_FIXTURE_SIMULATED}"
            )

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        state = state_of(item)
        state.watched = None
        if self._session.lost_in is None:
            with suppress(SettingsError):  # reported where the marker is read
                watched = WatchedTest(item, self._session)
                if watched.watches:
                    self._watching = True
                    watched.begin()
                if watched.watches or watched.reads_waits:
                    state.watched = watched
                if watched.trouble is not None:
                    self._say_once(f"not watched from {item.nodeid} on: {watched.trouble}")
        return NOTHING

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
        if watched is None:
            yield
            return
        try:
            watched.look()
            yield
        finally:
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

    def _say_once(self, why: str) -> None:
        """Say at the session's end why memory is not watched: the first reason."""
        if not self._said:
            self._session.remark(f"footprint: {why}")
            self._said = True

    def _end(self, item: pytest.Item, watched: WatchedTest) -> None:
        """Complete the rows of a test with what it keeps. Raises its failure by that."""
        from pytest_gpumem.plugin.judging import judge_the_end

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
        if watched.trouble is not None:
            item.add_report_section("teardown", "gpumem", f"footprint: {watched.trouble}")
        elif watched.shown and not footprint.driver_watched:
            unseen = "; ".join(footprint.not_watched)
            self._say_once(f"not all is watched from {item.nodeid} on: {unseen}")
        judge_the_end(item, watched, footprint)


class WaitFeature(Feature):
    """Reads waits, closest to the body: where other features wait, the test does not."""

    name = "waits"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._said = session.facts.simulated
        if session.settings.waits and session.facts.simulated:
            session.remark(f"waits: {SIMULATED}")

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = state_of(item).watched
        if watched is None or not watched.reads_waits:
            yield
            return
        session, counter = self._session, self._session.chosen.waits()
        forks = session.forks
        try:
            if counter is None:
                raise NotCounted(SIMULATED)
            counter.start()
        except NotCounted as why:
            watched.waits = Waits(not_read=str(why))
            if not self._said:
                session.remark(f"waits: {why}, from {item.nodeid} on")
                self._said = True
            yield
            return
        watched.counter = counter
        try:
            yield
        finally:
            counter.stop()
            watched.counter = None
            watched.waits = counter.read(item.config.rootpath, watched.settings.allow_waits)
            if session.forks != forks:
                watched.waits = Waits(not_read=FORKED)
