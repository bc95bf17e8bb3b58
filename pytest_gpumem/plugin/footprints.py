"""The memory of each test: watched, judged, and shown with its rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.limits import MAX_WAITS, OF_FOOTPRINT
from pytest_gpumem.plugin.marks import (
    BENCHMARK_FIXTURE,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    uses,
    uses_benchmark,
)
from pytest_gpumem.plugin.running import NOTHING, Feature
from pytest_gpumem.plugin.session import ROWS, WATCHED, GpuSession
from pytest_gpumem.records.row import Row
from pytest_gpumem.settings import Settings, SettingsError, by_marker, merge_limits

if TYPE_CHECKING:
    from pytest_gpumem.plugin.watched_test import WatchedTest


class FootprintFeature(Feature):
    """Watches tests whose memory or waits somebody asks for, and tests with our fixtures."""

    name = "footprint"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._watching = False  # the sources report
        self._refused = False
        if session.facts.simulated:
            self._say_what_is_not_counted()

    def _say_what_is_not_counted(self) -> None:
        """Say that limits of the session hold for few tests."""
        limits = merge_limits(None, None, self._session.settings, OF_FOOTPRINT)
        written = []
        for name in OF_FOOTPRINT:
            if getattr(limits, name) is not None:
                written.append(f"{limits.origin[name]}: {name} {getattr(limits, name)}")
        if written:
            verb = "limits" if len(written) == 1 else "limit"
            self._session.remark(
                f"{', '.join(written)} {verb} only tests with fixtures of this plugin: "
                "a simulated device counts only the buffers of fixtures"
            )

    def setup(self, item: pytest.Item) -> AbstractContextManager[None]:
        watched = item.stash[WATCHED] = self._begin(item)
        if watched is not None:
            watched.look()
        return NOTHING

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = item.stash.get(WATCHED, None)
        if watched is None:
            yield
            return
        watched.look()
        with watched.warmed_up():
            yield

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        watched: WatchedTest | None = item.stash.get(WATCHED, None)
        if watched is None:
            yield
            return
        try:
            watched.look()
            yield
        except BaseException:
            self._end(item, watched)
            raise
        failing = self._end(item, watched)
        if failing:
            from pytest_gpumem.plugin.judging import fail_by_limits

            fail_by_limits(item, self._session, failing)

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

    # A test

    def _begin(self, item: pytest.Item) -> WatchedTest | None:
        """Begin to watch a test; None if it is not to be watched."""
        session = self._session
        try:
            reads_waits = _reads_waits(item, session)
            names = (*OF_FOOTPRINT, MAX_WAITS) if reads_waits else OF_FOOTPRINT
            limits = session.limits(item, names)
        except SettingsError:  # reported where the marker is read
            return None
        footprint = session.settings.footprint
        marked = [name for name in (*OF_FOOTPRINT, MAX_WAITS) if by_marker(limits, name)]
        limited = uses(item, MEMORY_FIXTURE) or bool(marked)
        has_limit = any(getattr(limits, name) is not None for name in OF_FOOTPRINT)
        shows = footprint != "off" and (footprint != "auto" or limited or has_limit)
        watches = shows or (footprint != "off" and uses(item, TEST_FIXTURE))
        if session.lost_in is not None or not (watches or reads_waits):
            return None
        from pytest_gpumem.plugin.watched_test import WatchedTest

        watched = WatchedTest(
            item,
            session,
            limits,
            shows_memory=shows,
            limited=limited,
            reads_waits=reads_waits,
        )
        if watches:
            start = functools.partial(self._start, item, watched.settings, driver=shows)
            watched.begin(start)
        if watched.trouble is not None:
            self._say_once(f"footprint: not watched from {item.nodeid} on: {watched.trouble}")
        return watched

    def _start(self, item: pytest.Item, settings: Settings, *, driver: bool) -> None:
        """Have the sources report. `driver`: that of the driver's allocations too."""
        if uses(item, TEST_FIXTURE):
            _ = self._session.device  # opened now: it belongs to no test
        lines = settings.footprint == "trace" or bool(settings.allow_kept)
        self._watching = True
        self._session.footprints.start(driver=driver, lines=lines)

    def _stop(self) -> None:
        if self._watching:
            from pytest_gpumem.plugin.watched_test import TROUBLE

            self._watching = False
            with suppress(*TROUBLE):
                self._session.footprints.stop()

    def _say_once(self, why: str) -> None:
        """Say at the session's end why memory is not watched: the first reason."""
        if not self._refused:
            self._session.remark(why)
            self._refused = True

    def _end(self, item: pytest.Item, watched: WatchedTest) -> list[Row]:
        """Complete the rows of a test with what it keeps; return those that fail by it."""
        from pytest_gpumem.plugin.watched_test import attached

        session = self._session
        item.stash[WATCHED] = None
        try:
            if session.lost_in is not None:
                return []
            footprint = watched.after()
        finally:
            watched.end()
            self._stop()
        if watched.trouble is not None:
            item.add_report_section("teardown", "gpumem", f"footprint: {watched.trouble}")
        elif watched.shows_memory and footprint.driver_peak is None:
            unseen = "; ".join(footprint.not_watched)
            self._say_once(f"footprint: not all is watched from {item.nodeid} on: {unseen}")
        rows = item.stash.get(ROWS, [])
        if watched.row_at_end:
            range_name = session.names.unique(item.nodeid)
            rows = attached(rows, footprint, watched, range_name)
        item.stash[ROWS], failing = _judged_at_the_end(rows, footprint, watched)
        return failing


def _judged_at_the_end(
    rows: list[Row], footprint: Any, watched: WatchedTest
) -> tuple[list[Row], list[Row]]:
    """The rows of a test with its whole footprint, and those that fail by it."""
    from pytest_gpumem.baselines.verdicts import memory_findings
    from pytest_gpumem.judging.footprint import AT_THE_END, RULES
    from pytest_gpumem.judging.judge import is_failure
    from pytest_gpumem.judging.verdict import known, with_verdict
    from pytest_gpumem.plugin.watched_test import limited

    session = watched.session
    strict = session.settings.strict
    names = tuple(RULES) if watched.row_at_end else AT_THE_END
    judged, failing = list[Row](), list[Row]()
    for before in rows:
        unread = watched.trouble is not None
        if (
            before.label
            or before.footprint is None
            or (unread and not limited(before.limits, AT_THE_END))
        ):
            judged.append(before)
            continue
        if unread:  # what was read before stays
            whole = replace(
                before.footprint, watched=(), not_watched=footprint.not_watched, ended=True
            )
        else:
            whole = replace(footprint, further=before.footprint.further)
        row = replace(before, footprint=whole)
        findings = memory_findings(row, session.baseline, names, simulated=session.facts.simulated)
        row = with_verdict(row, [*known(row), *findings], strict=strict)
        by_findings = any(is_failure(finding, strict) for finding in findings)
        fails = by_findings and is_failure(row.verdict, strict)
        judged.append(replace(row, failed=row.failed or fails))
        # A test whose body failed is reported, and what a failure keeps is no finding of its own.
        if fails and not before.failed and not session.is_further:
            failing.append(judged[-1])
    return judged, failing


def _reads_waits(item: pytest.Item, session: GpuSession) -> bool:
    """True if the waits of a test are read. A benchmark's limit on them is on one launch.
    Raises `SettingsError`: a keyword of its marker that cannot be used.
    """
    if uses(item, BENCHMARK_FIXTURE) or uses_benchmark(item):
        return False
    return session.settings.waits or session.limits(item, (MAX_WAITS,)).max_waits is not None
