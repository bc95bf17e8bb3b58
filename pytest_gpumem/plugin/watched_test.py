"""The memory of a test: watched from before its setup until after its teardown."""

from __future__ import annotations

import functools
import gc
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.allocation_sites import is_named, sites
from pytest_gpumem.devices.memory_events import Series
from pytest_gpumem.devices.protocol import DeviceError, MemoryWatch, NotCounted, WaitCounter
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, with_further
from pytest_gpumem.judging.verdict import UNLIMITED
from pytest_gpumem.plugin.marks import TEST_FIXTURE, marks_of, uses, uses_benchmark
from pytest_gpumem.plugin.session import FORKED, GpuSession
from pytest_gpumem.records.footprint import Footprint, Waits
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, key_of
from pytest_gpumem.settings import (
    SettingsError,
    both_limits,
    marker_keywords,
    of_marker,
    of_test,
)

T = TypeVar("T")
TROUBLE = (DeviceError, RuntimeError)
"""Errors of the device and of libraries: limits on memory are UNDECIDED then."""
NO_FIXTURE_SIMULATED = "a simulated device counts only the buffers of fixtures"


class WatchedTest:
    """A test whose memory is watched, or whose waits are read."""

    def __init__(
        self,
        item: pytest.Item,
        session: GpuSession,
        limits: Limits,
        *,
        shows_memory: bool,
        limited: bool,
        reads_waits: bool,
    ) -> None:
        """`shows_memory`: an option, a limit or a fixture asks for a row of memory.
        `limited`: its own marker or fixture does: it has a row even where it takes no memory.
        """
        self.item, self.session, self.limits = item, session, limits
        self.settings = of_test(session.settings, marker_keywords(marks_of(item)))
        self.reads_waits = reads_waits
        self.shows_memory, self.limited = shows_memory, limited
        self._forks = session.forks
        self._watch: MemoryWatch | None = None
        self.trouble: BaseException | None = None
        """Why its memory cannot be read; None while it can."""
        self.waits: Waits | None = None  # of its body, once it has ended
        self.counter: WaitCounter | None = None  # while its waits are read
        self.warms_up = False  # its function is called before it counts: parts have no rows
        self.parts: list[tuple[str, Footprint, Limits]] = []
        """Labelled parts that have ended, with their limits."""
        self.row_at_end = False
        """Its row is made at its end: nothing is judged before, and a look takes time."""

    @property
    def limited_in_body(self) -> bool:
        """True if something is judged at the end of its body."""
        in_body = [name for name in RULES if name not in AT_THE_END]
        return bool(self.parts) or limited(self.limits, in_body)

    def tried(self, read: Callable[[], T]) -> T | None:
        """What is read; None once reading has failed."""
        if self.trouble is None:
            try:
                return read()
            except TROUBLE as error:
                self.trouble = error
        return None

    def begin(self, start: Callable[[], None]) -> None:
        """Begin to watch memory. `start`: has the sources report."""
        self.tried(start)
        self._watch = self.tried(self.session.footprints.watch)

    def end(self) -> None:
        """Watch no longer."""
        if self._watch is not None:
            self._watch.close()

    def look(self) -> None:
        """Watch libraries that have come into use too."""
        if self._watch is not None:
            self.tried(self.session.footprints.look)

    # What was read

    def so_far(self) -> Footprint:
        """The footprint while the test runs."""
        return self._read(ended=False)

    def after(self) -> Footprint:
        """The footprint at the end, without what only pytest still refers to."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Footprint:
        watch = self._watch
        if watch is None and self.trouble is None:
            return Footprint(0, ended=ended, waits=self.waits)
        footprint = None
        if watch is not None:
            footprint = self.tried(functools.partial(self._of_watch, watch, ended=ended))
        if footprint is None:
            footprint = unread(self.trouble, ended=ended)
        return replace(footprint, waits=self.waits)

    def _of_watch(self, watch: MemoryWatch, *, ended: bool) -> Footprint:
        read = functools.partial(self._look, watch, ended=ended)
        if not ended:
            return self.traced(read(), watch)
        if read().reserved:
            watch.settle()
        let_go = functools.partial(_let_go, self.item)
        frees: list[Callable[[], object]] = [watch.settle, let_go, *collections(), watch.settle]
        return self.traced(freed(read, frees), watch)

    def _look(self, watch: MemoryWatch, *, ended: bool) -> Footprint:
        if self.session.forks != self._forks:
            raise NotCounted(FORKED)
        footprint = replace(watch.read(), ended=ended)
        if self.session.facts.simulated and not uses(self.item, TEST_FIXTURE):
            footprint = replace(footprint, watched=(), not_watched=(NO_FIXTURE_SIMULATED,))
        return self.without_allowed(footprint, watch)

    def without_allowed(self, footprint: Footprint, watch: MemoryWatch) -> Footprint:
        """A footprint whose kept memory leaves out what lines that `allow_kept` names allocated.
        Memory of an unknown line counts. A free that the log missed counts as one of such a line.
        """
        allowed = self.settings.allow_kept
        if not allowed or not footprint.ended or not footprint.kept:
            return footprint
        named, others = Counter[Series](), Counter[Series]()
        for event in watch.accounts().kept:
            if is_named(event.line, allowed, self.item.config.rootpath):
                named[event.series] += event.nbytes
            else:
                others[event.series] += event.nbytes
        uses = []
        for use in footprint.uses:
            if use.kept <= 0:
                uses.append(use)
                continue
            series = use.library, use.kind
            kept = max(use.kept - named[series], min(use.kept, others[series]))
            uses.append(replace(use, kept=kept, allowed=use.kept - kept))
        return replace(footprint, uses=tuple(uses))

    def traced(self, footprint: Footprint, watch: MemoryWatch) -> Footprint:
        """A footprint with the lines that allocated, if they are traced."""
        if self.session.settings.footprint != "trace":
            return footprint
        accounts, root = watch.accounts(), self.item.config.rootpath
        kept = []
        if footprint.ended and footprint.kept:
            for event in accounts.kept:
                if not is_named(event.line, self.settings.allow_kept, root):
                    kept.append(event)
        return replace(footprint, sites=sites(accounts.at_peak, kept, root))

    # Warming up

    @contextmanager
    def warmed_up(self) -> Iterator[None]:
        """Have the function called as often as `warmups` says before the call that counts.
        Raises `SettingsError`: it cannot be called again.
        """
        item = self.item
        times = of_marker(marker_keywords(marks_of(item)), "warmups")
        if times is None or self._watch is None:
            yield
            return
        if uses_benchmark(item):
            raise SettingsError(
                f"marker: warmups {times}: a benchmark warms up by itself; accepted are tests "
                "without one"
            )
        if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
            raise SettingsError(
                f"marker: warmups {times}: only a plain function or method can be called again"
            )
        body = item.obj

        @functools.wraps(body)
        def function(*arguments: Any, **keywords: Any) -> Any:
            with self._warming():
                for _ in range(times):
                    body(*arguments, **keywords)
            return body(*arguments, **keywords)

        item.obj = function
        try:
            yield
        finally:
            item.obj = body

    @contextmanager
    def _warming(self) -> Iterator[None]:
        """What these calls leave, such as plans and workspaces, belongs to no test."""
        self.warms_up = True
        try:
            with self.session.footprints.ours():
                yield
                # Cycles that the call to come would free make up for what it keeps.
                gc.collect()
        finally:
            self.warms_up = False
        if self.counter is not None:
            self.counter.stop()
            self.counter.start()


def limited(limits: Limits, names: Iterable[str] = tuple(RULES)) -> bool:
    """True if one of the limits is set."""
    return any(getattr(limits, name) is not None for name in names)


def collections() -> list[Callable[[], object]]:
    """The garbage collector on most objects of a test, and on all."""
    return [functools.partial(gc.collect, 1), functools.partial(gc.collect, 2)]


def freed(read: Callable[[], Footprint], frees: Iterable[Callable[[], object]]) -> Footprint:
    """What is read after as many of these calls, in order, as it takes until nothing is kept."""
    footprint = read()
    for free in frees:
        if footprint.kept:
            free()
            footprint = read()
    return footprint


def unread(trouble: BaseException | None, *, ended: bool = True) -> Footprint:
    """The footprint of a test, or of a part of it, that could not be read."""
    why = str(trouble)
    if not isinstance(trouble, NotCounted):
        why = f"the memory could not be read: {why}"
    return Footprint(0, not_watched=(why,), ended=ended)


def _let_go(item: pytest.Item) -> None:
    """Drop the values of fixtures, as pytest does as soon as the report of the teardown is made."""
    arguments: dict[str, Any] = getattr(item, "funcargs", {})
    for name in list(arguments):
        # pytest-benchmark looks for its fixture once more.
        if name != "benchmark" and not name.startswith("_gpumem"):
            del arguments[name]


def attached(
    rows: Sequence[Row], footprint: Footprint, watched: WatchedTest, range_name: str
) -> list[Row]:
    """The rows of a test with its footprint and those of its parts."""
    session, nodeid = watched.session, watched.item.nodeid
    by_label = {row.label: row for row in rows}
    if any(row.measurement is not None for row in rows):  # a limit on waits is on one launch then
        watched.waits = None
        footprint = replace(footprint, waits=None)
    footprints = list(watched.parts)
    if "" in by_label or _has_row(watched, footprint):
        footprints.insert(0, ("", footprint, watched.limits))
    further = [process.by_key for process in session.further]
    for label, seen, limits in footprints:
        if watched.trouble is not None and not seen.watched and not limited(limits):
            continue  # nothing was read, and nothing is judged by it
        of_all = with_further(seen, key_of(nodeid, label), further)
        row = by_label.get(label)
        if row is None:
            verdict = replace(UNLIMITED, simulated=session.facts.simulated)
            by_label[label] = Row(
                nodeid, limits, verdict, label=label, range_name=range_name, footprint=of_all
            )
        else:
            by_label[label] = replace(row, limits=both_limits(row.limits, limits), footprint=of_all)
    return list(by_label.values())


def _has_row(watched: WatchedTest, footprint: Footprint) -> bool:
    """True if a test that measures nothing has a row.
    A limit of the session is no reason for a test that does not touch the GPU.
    """
    if not watched.shows_memory and not watched.reads_waits:
        return False
    if footprint.uses or watched.limited:
        return True
    if watched.trouble is not None and limited(watched.limits):
        return True  # whether it touches the GPU is not known
    waits = footprint.waits or Waits()
    not_read = waits.not_read is not None and watched.limits.max_waits is not None
    return bool(waits.lines) or not_read
