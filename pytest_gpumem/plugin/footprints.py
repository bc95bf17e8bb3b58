"""Features that watch the memory and the waits of tests, and a test that they watch."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.errors import DeviceError, NotCounted
from pytest_gpumem.limits import AT_THE_END, MAX_WAITS, OF_FOOTPRINT, OF_WATCHED, of_the_test
from pytest_gpumem.plugin.marks import (
    MARKER,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    keywords_of,
    uses,
    uses_benchmark,
)
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.session import NO_FIXTURE_SIMULATED, GpuSession, state_of
from pytest_gpumem.records.footprint import Footprint, Waits
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.settings import SettingsError, of_marker, of_test

if TYPE_CHECKING:
    from pytest_gpumem.devices.footprints import MemoryWatch

T = TypeVar("T")
TROUBLE = (DeviceError, RuntimeError)
"""Errors of the device and of libraries: limits on memory are UNDECIDED then."""
COLLECTIONS = [lambda: gc.collect(1), lambda: gc.collect(2)]  # most objects of a test, and all
SIMULATED = "not read: a simulated device calls no driver"  # of waits


class FootprintFeature(Feature):
    """Watches tests whose memory or waits somebody asks for, and tests with our fixtures."""

    name = "footprint"

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._watching = False  # the sources report
        settings, written = session.settings, []
        limited = any(settings.limits.values()) or session.in_gate
        self._any_test = limited or settings.footprint == "on" or settings.waits
        """Tests without our fixtures and marker may be watched too."""
        for name in OF_FOOTPRINT:
            if settings.limits[name] is not None:
                written.append(f"{settings.origins[name]}: {name} {settings.limits[name]}")
        if written and session.facts.simulated:
            why = f"{NO_FIXTURE_SIMULATED}, and judges only tests with them"
            session.remark(f"{', '.join(written)}: {why}")

    def setup(self, item: pytest.Item) -> None:
        state = state_of(item)
        state.watched = None
        requested = uses(item, TEST_FIXTURE) or item.get_closest_marker(MARKER) is not None
        if self._session.lost_in is None and (requested or self._any_test):
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
                self._watching = False
                watched.end()
                if watched.unseen:
                    why = f"not all is watched from {item.nodeid} on: {watched.unseen}"
                    self._session.remark_first("footprint", why)

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


class WaitFeature(Feature):
    """Reads the waits of a test's body alone, not those of other features."""

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


class WatchedTest:
    """A test whose memory is watched, or whose waits are read."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        """Raises `SettingsError`: a marker cannot be used."""
        self.item, self.session = item, session
        keywords = keywords_of(item)
        self.settings = of_test(session.settings, keywords)
        self._warmups = of_marker(keywords, "warmups")
        self._has_fixtures = uses(item, TEST_FIXTURE)
        # A benchmark's limit on waits is on one launch.
        is_benchmark = uses_benchmark(item)
        names = OF_FOOTPRINT if is_benchmark else OF_WATCHED
        self.limits = session.limits(item, names)
        by_test = any(map(of_the_test, self.limits.origin.values()))
        self.limited = by_test or uses(item, MEMORY_FIXTURE)  # itself: a row even without memory
        footprint = session.settings.footprint
        self.shown = self.watches = False
        if footprint != "off":
            of_memory = limited(self.limits, OF_FOOTPRINT)
            self.shown = footprint == "on" or self.limited or of_memory  # in a row
            self.watches = self.shown or self._has_fixtures
        self.reads_waits = limited(self.limits, [MAX_WAITS])
        if session.settings.waits and not is_benchmark:
            self.reads_waits = True
        self._watch: MemoryWatch | None = None
        self._collections = gc.get_stats()[1:]  # of generations 1 and 2
        self.trouble: BaseException | None = None  # why its memory cannot be read
        self.waits: Waits | None = None  # of its body, once it has ended
        self.count_waits: Callable[[], None] | None = None  # anew
        self.whole: Footprint | None = None  # its footprint, once it has ended
        self.warms_up = False  # in a warm-up, whose parts get no rows
        self.parts: dict[str, tuple[Footprint, Limits]] = {}  # those that have ended, by label

    def tried(self, read: Callable[[], T]) -> T | None:
        """Return what is read; None once reading has failed."""
        if self.trouble is None:
            try:
                return read()
            except TROUBLE as error:
                self.trouble = error
        return None

    def begin(self) -> None:
        self._watch = self.tried(self._begin)

    def _begin(self) -> MemoryWatch:
        if self._has_fixtures:
            _ = self.session.device  # opened now: it belongs to no test
        footprints, root = self.session.footprints, self.item.config.rootpath
        footprints.start(driver=self.shown, allow_kept=self.settings.allow_kept, root=root)
        return footprints.watch()

    def look(self) -> None:
        if self._watch is not None:
            self.tried(self.session.footprints.look)

    def end(self) -> None:
        """Read the memory with what the test keeps, and watch no longer."""
        try:
            if self.session.lost_in is None:
                self.whole = self.footprint(ended=True)
        finally:
            if self._watch is not None:
                self._watch.close()
            if self.watches:
                with suppress(*TROUBLE):
                    self.session.footprints.stop()

    @property
    def unseen(self) -> str:
        """What of the memory in its rows is not watched; empty if all is."""
        if self.whole is None or not self.shown or self.whole.driver_watched:
            return ""
        return "; ".join(self.whole.not_watched)

    def footprint(self, *, ended: bool) -> Footprint:
        """The footprint so far, or at the end without what only pytest still refers to."""
        footprint = Footprint(0)
        if self._watch is not None or self.trouble is not None:
            footprint = self.tried(partial(self._read, ended=ended)) or self.unread()
        return replace(footprint, ended=ended, waits=self.waits)

    def _read(self, *, ended: bool) -> Footprint:
        watch = self._watch
        assert watch is not None
        footprint = watch.read()
        if ended and (footprint.reserved or footprint.kept):
            watch.settle()
            collect = COLLECTIONS
            if gc.get_stats()[1:] == self._collections and not limited(self.limits, AT_THE_END):
                collect = COLLECTIONS[:1]  # no object of the test is older
            footprint = read_after(watch, [partial(_let_go, self.item), *collect, watch.settle])
        if self.session.facts.simulated and not self._has_fixtures:
            footprint = replace(footprint, watched=(), not_watched=(NO_FIXTURE_SIMULATED,))
        return footprint

    def unread(self) -> Footprint:
        """The footprint of the test, or of a part of it, that could not be read."""
        why = str(self.trouble)
        if not isinstance(self.trouble, NotCounted):
            why = f"the memory could not be read: {why}"
        return Footprint(0, not_watched=(why,))

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Have the function called `warmups` times before the call that counts. What these calls
        leave, such as plans and workspaces, belongs to no test. Raises `SettingsError`.
        """
        item, times = self.item, self._warmups
        if times is None or self._watch is None:
            yield
            return
        place = f"marker: warmups {times}:"
        if uses_benchmark(item):
            raise SettingsError(f"{place} a benchmark warms up by itself; accepted are other tests")
        if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
            raise SettingsError(f"{place} only a plain function or method can be called again")
        body = item.obj

        @wraps(body)
        def function(*arguments: Any, **keywords: Any) -> Any:
            self.warms_up = True
            with self.session.footprints.warming_up():
                for _ in range(times):
                    body(*arguments, **keywords)
                # Garbage of the warm-ups, freed later, would make up for what is kept.
                gc.collect()
            self.warms_up = False
            if self.count_waits is not None:
                self.count_waits()
            return body(*arguments, **keywords)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(item, "obj", function)
            yield


def limited(limits: Limits, names: Iterable[str] = OF_WATCHED) -> bool:
    return any(getattr(limits, name) is not None for name in names)


def read_after(watch: MemoryWatch, frees: Iterable[Callable[[], object]]) -> Footprint:
    """Read a watch after as many calls of `frees`, in order, as it takes until nothing is kept."""
    footprint = watch.read()
    for free in frees:
        if footprint.kept:
            free()
            footprint = watch.read()
    return footprint


def _let_go(item: pytest.Item) -> None:
    """Drop the values of fixtures, as pytest does once the report of the teardown is made."""
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    for name in list(arguments):
        # pytest-benchmark looks for its fixture once more.
        if name != "benchmark" and not name.startswith("_gpumem"):
            del arguments[name]
