"""The memory of each test: watched from before its setup until after its teardown, judged, and shown with its rows."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
from msgspec.structs import replace

from pytest_gpumem.baselines.verdicts import memory_findings
from pytest_gpumem.devices.protocol import DeviceError, MemoryWatch, NotCounted, WaitCounter
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.judging.footprint import AT_THE_END, RULES, with_further
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.judging.verdict import UNLIMITED, known, with_verdict
from pytest_gpumem.limits import MAX_WAITS, OF_FOOTPRINT
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.plugin.forks import FORKED
from pytest_gpumem.plugin.marks import (
    BENCHMARK_FIXTURE,
    MEMORY_FIXTURE,
    TEST_FIXTURE,
    marks_of,
    uses,
    uses_benchmark,
)
from pytest_gpumem.plugin.reported import broken_limits, failure_texts
from pytest_gpumem.plugin.running import Feature
from pytest_gpumem.plugin.state import ROWS, SESSION, GpuSession
from pytest_gpumem.plugin.tracing import memory_texts, traced, with_lines, without_allowed
from pytest_gpumem.records.footprint import Footprint, Phase
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, key_of
from pytest_gpumem.records.waits import Waits
from pytest_gpumem.settings import (
    Settings,
    SettingsError,
    both_limits,
    by_marker,
    loosened,
    marker_keywords,
    marker_limits,
    merge_limits,
    of_marker,
    of_test,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytest_gpumem.limits import FootprintKeywords

T = TypeVar("T")
TROUBLE = (DeviceError, RuntimeError)
"""Errors of the device and of libraries: memory is not read then, and the test goes on. Its limits on memory are UNDECIDED."""
YOUNG, OLD = 1, 2
"""Generations of the garbage collector: up to which the objects of a test mostly are, and of all. To collect all takes tens of
milliseconds."""
NO_FIXTURE_SIMULATED = "a simulated device counts only the buffers of fixtures"


class WatchedTest:
    """The memory of one test."""

    def __init__(
        self,
        item: pytest.Item,
        session: GpuSession,
        limits: Limits,
        *,
        asked: bool,
        limited: bool,
        reads_waits: bool,
    ) -> None:
        self.item, self.session, self.limits = item, session, limits
        self.settings = of_test(session.settings, marker_keywords(marks_of(item)))
        self.forks = session.forks.count
        self.watch: MemoryWatch | None = None
        # why its memory cannot be read; None while it can
        self.trouble: BaseException | None = None
        self.asked = asked
        """Someone asked for it, by an option, a limit or a fixture: it has a row even where nothing is measured."""
        self.limited = limited  # its own marker or fixture asks for it: it has a row even where it takes no memory
        self.reads_waits = reads_waits
        self.waits: Waits | None = None  # of its body, once it has ended
        self.counter: WaitCounter | None = None  # while its waits are read
        self.warms_up = False
        """Its function is called before it counts: parts have no rows."""
        self.parts: list[
            tuple[str, Footprint, Limits]
        ] = []  # labelled parts that have ended, with their limits
        self.phases: list[Phase] = []
        self.row_at_end = False
        """Its row is made when it has ended: nothing was to be judged before, and a look takes time."""

    @property
    def judged_in_body(self) -> bool:
        """True if something is judged at the end of its body."""
        return bool(self.parts) or _limited(
            self.limits, [name for name in RULES if name not in AT_THE_END]
        )

    def tried(self, read: Callable[[], T]) -> T | None:
        """What is read; None once reading has failed."""
        if self.trouble is None:
            try:
                return read()
            except TROUBLE as error:
                self.trouble = error
        return None

    def begin(self, start: Callable[[], None]) -> None:
        """Begin to watch. `start`: has the sources report."""

        def watch() -> MemoryWatch:
            start()
            return self.part()

        self.watch = self.tried(watch)

    @property
    def shown(self) -> bool:
        """True if it has a row where it has touched the GPU, whether or not something is measured."""
        return self.asked or self.reads_waits

    @contextmanager
    def warming(self) -> Iterator[None]:
        """Calls of its function before the one that counts. What they leave, such as plans and workspaces, belongs to no test."""
        self.warms_up = True
        try:
            with self.session.footprints.ours():
                yield
                gc.collect()  # cycles that the call to come would free, so that they made up for what it keeps
        finally:
            self.warms_up = False
        if self.counter is not None:
            self.counter.stop()
            self.counter.start()

    def part(self) -> MemoryWatch:
        """Begin to watch a part of the test."""
        return self.session.footprints.watch()

    def _look(self) -> None:
        self.session.footprints.look()

    def end(self) -> None:
        """Watch no longer."""
        if self.watch is not None:
            self.watch.close()

    def so_far(self) -> Footprint:
        """The footprint while the test runs."""
        found = self.tried(self._so_far)
        return replace(
            unread(self.trouble, ended=False) if found is None else found, waits=self.waits
        )

    def _so_far(self) -> Footprint:
        if self.watch is None:
            return Footprint(0, ended=False)
        return self.traced(self._read(ended=False), self.watch)

    def without_allowed(self, footprint: Footprint, watch: MemoryWatch) -> Footprint:
        """A footprint without the kept memory that `allow_kept` names."""
        return without_allowed(
            footprint, watch, self.settings.allow_kept, self.item.config.rootpath
        )

    def traced(self, footprint: Footprint, watch: MemoryWatch) -> Footprint:
        """A footprint with the lines that allocated, if they are traced."""
        return traced(footprint, watch, self.settings.allow_kept, self.item, self.session)

    @property
    def _watch(self) -> MemoryWatch:
        assert self.watch is not None
        return self.watch

    def _seconds(self) -> float:
        return 0.0 if self.watch is None else self.tried(self.watch.seconds) or 0.0

    def _read(self, *, ended: bool) -> Footprint:
        if self.session.forks.count != self.forks:
            raise NotCounted(FORKED)
        found = replace(
            self._watch.read(),
            ended=ended,
            notes=tuple(loosened(self.limits, self.session.settings, OF_FOOTPRINT)),
        )
        if self.session.facts.simulated and not uses(self.item, TEST_FIXTURE):
            found = replace(found, watched=(), not_watched=(NO_FIXTURE_SIMULATED,))
        found = replace(found, phases=tuple(sorted(self.phases, key=lambda phase: phase.begin)))
        return self.without_allowed(found, self._watch)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note when a phase of the test begins and ends."""
        if self.watch is not None:
            self.tried(self._look)
        begun = self._seconds()
        try:
            yield
        finally:
            self.phases.append(Phase(name, begun, max(begun, self._seconds())))

    def after(self) -> Footprint:
        """The footprint at the end, without what only pytest still refers to."""
        found = self.tried(self._after)
        return replace(
            unread(self.trouble, ended=True) if found is None else found, waits=self.waits
        )

    def _after(self) -> Footprint:
        if self.watch is None:
            return Footprint(0)
        found = self._read(ended=True)
        if (found.kept or found.reserved) and self._watch.settle():
            found = self._read(ended=True)
        if found.kept:
            _let_go(self.item)
            found = self._read(ended=True)
        for generation in (YOUNG, OLD):
            if found.kept:
                gc.collect(generation)
                found = self._read(ended=True)
        if found.kept and self._watch.settle():  # once more, for what the collection left to caches
            found = self._read(ended=True)
        return self.traced(found, self._watch)


def _limited(limits: Limits, names: Iterable[str] = tuple(RULES)) -> bool:
    return any(getattr(limits, name) is not None for name in names)


def unread(trouble: BaseException | None, *, ended: bool = True) -> Footprint:
    """The footprint of a test, or of a part of it, that could not be read."""
    why = (
        str(trouble)
        if isinstance(trouble, NotCounted)
        else f"the memory could not be read: {trouble}"
    )
    return Footprint(0, not_watched=(why,), ended=ended)


def _reads_waits(item: pytest.Item, session: GpuSession) -> bool:
    """True if the waits of a test are read: by the option, or by a limit on them. A benchmark's limit is on one launch.
    Raises `SettingsError`: a keyword of its marker that cannot be used.
    """
    if uses(item, BENCHMARK_FIXTURE) or uses_benchmark(item):
        return False
    return session.settings.waits or session.limits(item, (MAX_WAITS,)).max_waits is not None


WATCHED: pytest.StashKey[WatchedTest | None] = pytest.StashKey()
"""On `item.stash`, while the memory of the test is watched."""


@contextmanager
def _warmed_up(item: pytest.Item, watched: WatchedTest) -> Iterator[None]:
    """Have the function of a test called as often as its keyword `warmups` says before the call that counts.
    Raises `SettingsError`: it cannot be called again.
    """
    times = of_marker(marker_keywords(marks_of(item)), "warmups")
    if times is None or watched.watch is None:
        yield
        return
    if uses_benchmark(item):
        raise SettingsError(
            f"marker: warmups {times}: a benchmark warms up by itself; accepted are tests without one"
        )
    if not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
        raise SettingsError(
            f"marker: warmups {times}: only a plain function or method can be called again"
        )
    body = item.obj

    @functools.wraps(body)
    def warmed_up(*arguments: Any, **keywords: Any) -> Any:
        with watched.warming():
            for _ in range(times):
                body(*arguments, **keywords)
        return body(*arguments, **keywords)

    item.obj = warmed_up
    try:
        yield
    finally:
        item.obj = body


def _let_go(item: pytest.Item) -> None:
    """Drop the values of fixtures, as pytest does as soon as the report of the teardown is made."""
    arguments = getattr(item, "funcargs", None)
    if arguments:
        # pytest-benchmark looks for its fixture once more.
        for name in [
            name for name in arguments if name != "benchmark" and not name.startswith("_gpumem")
        ]:
            del arguments[name]


class FootprintFeature(Feature):
    """Watches tests."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._watching = False
        self._refused = False
        self._of_session = merge_limits(None, None, session.settings, OF_FOOTPRINT)
        """Limits of tests without a marker."""
        limited = [name for name in OF_FOOTPRINT if getattr(self._of_session, name) is not None]
        if limited and session.facts.simulated:
            written = ", ".join(
                f"{self._of_session.origin[name]}: {name} {getattr(self._of_session, name)}"
                for name in limited
            )
            verb = "limits" if len(limited) == 1 else "limit"
            session.remarks.append(
                f"{written} {verb} only tests with fixtures of this plugin: {NO_FIXTURE_SIMULATED}"
            )

    @contextmanager
    def tests(self, session: pytest.Session) -> Iterator[None]:
        """Import what is needed where every test is watched, so that the first one does not take longer."""
        gpu, config = self._session, session.config
        if (
            gpu.settings.footprint in ("on", "trace")
            and not config.option.collectonly
            and gpu.measures
        ):
            with suppress(*TROUBLE):  # the first test finds it
                _ = gpu.footprints
        yield

    def _start(self, item: pytest.Item, settings: Settings, *, driver: bool) -> None:
        if uses(item, TEST_FIXTURE):
            # is opened now; for another test nobody but itself makes a context
            _ = self._session.device
        lines = settings.footprint == "trace" or bool(settings.allow_kept)
        self._watching = True
        self._session.footprints.start(driver=driver, lines=lines)

    def _stop(self) -> None:
        if self._watching:
            self._watching = False
            with suppress(*TROUBLE):
                self._session.footprints.stop()

    @contextmanager
    def setup(self, item: pytest.Item) -> Iterator[None]:
        item.stash[WATCHED] = watched = self._begin(item)
        with nullcontext() if watched is None else watched.phase("setup"):
            yield

    @contextmanager
    def call(self, item: pytest.Item) -> Iterator[None]:
        watched = item.stash.get(WATCHED, None)
        if watched is None:
            yield
            return
        with watched.phase("call"), _warmed_up(item, watched):
            yield

    @contextmanager
    def teardown(self, item: pytest.Item) -> Iterator[None]:
        watched = item.stash.get(WATCHED, None)
        if watched is None:
            yield
            return
        try:
            with watched.phase("teardown"):
                yield
        except BaseException:
            self._end(item, watched)
            raise
        if failing := self._end(item, watched):
            item.stash[ROWS] = [
                with_lines(row, self._session) if row in failing else row
                for row in item.stash[ROWS]
            ]
            raise broken_limits(
                failing,
                [
                    *failure_texts(failing, self._session.facts),
                    *memory_texts(failing, self._session),
                ],
            )

    @contextmanager
    def fixture(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Memory of a fixture of a wider scope than one test belongs to no test."""
        if (
            not self._watching
            or fixturedef.scope == "function"
            or self._session.lost_in is not None
        ):
            yield
            return
        footprints = self._session.footprints
        with footprints.ours() as growth:
            yield
        if growth:
            fixturedef.addfinalizer(lambda: footprints.released(growth))

    def _begin(self, item: pytest.Item) -> WatchedTest | None:
        """Begin to watch a test; None if it is not to be watched, or cannot be."""
        session = self._session
        try:
            reads_waits = _reads_waits(item, session)
            limits = session.limits(item, (*OF_FOOTPRINT, *((MAX_WAITS,) if reads_waits else ())))
        except SettingsError:  # reported where the marker is read
            return None
        limited = uses(item, MEMORY_FIXTURE) or any(
            by_marker(limits, name) for name in (*OF_FOOTPRINT, MAX_WAITS)
        )
        asked = (
            session.settings.footprint != "auto"
            or limited
            or any(getattr(limits, name) is not None for name in OF_FOOTPRINT)
        )
        memory = (asked or uses(item, TEST_FIXTURE)) and session.settings.footprint != "off"
        if session.lost_in is not None or not (memory or reads_waits):
            return None
        watched = WatchedTest(
            item, session, limits, asked=asked and memory, limited=limited, reads_waits=reads_waits
        )
        if memory:
            watched.begin(functools.partial(self._start, item, watched.settings, driver=asked))
        if watched.trouble is not None:
            self._say_once(f"footprint: not watched from {item.nodeid} on: {watched.trouble}")
        return watched

    def _say_once(self, why: str) -> None:
        """Say at the session's end why memory is not watched, or not all of it: the first reason."""
        if not self._refused:
            self._session.remarks.append(why)
            self._refused = True

    def _end(self, item: pytest.Item, watched: WatchedTest) -> list[Row]:
        """Complete the rows of a test with what it keeps; the rows that fail by it."""
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
        elif watched.asked and footprint.driver_peak is None:
            self._say_once(
                f"footprint: not all is watched from {item.nodeid} on: {'; '.join(footprint.not_watched)}"
            )
        rows, failing = list[Row](), list[Row]()
        here = item.stash.get(ROWS, [])
        if watched.row_at_end:
            here = _attached(here, footprint, watched, session.names.unique(item.nodeid))
        for before in here:
            at_the_end = watched.trouble is None or _limited(before.limits, AT_THE_END)
            if before.label or before.footprint is None or not at_the_end:
                rows.append(before)
                continue
            if watched.trouble is not None:  # what was read before stays
                footprint = replace(
                    before.footprint, watched=(), not_watched=footprint.not_watched, ended=True
                )
            row = replace(before, footprint=replace(footprint, further=before.footprint.further))
            names = tuple(RULES) if watched.row_at_end else AT_THE_END
            findings = memory_findings(
                row, session.baseline, names, simulated=session.facts.simulated
            )
            strict = session.settings.strict
            row = with_verdict(row, [*known(row), *findings], strict=strict)
            fails = is_failure(row.verdict, strict) and any(
                is_failure(finding, strict) for finding in findings
            )
            rows.append(replace(row, failed=row.failed or fails))
            # A test whose body failed is reported, and what a failure keeps is no finding of its own.
            if fails and not before.failed and not session.is_further:
                failing.append(rows[-1])
        item.stash[ROWS] = rows
        return failing


def with_footprints(
    item: pytest.Item, rows: Sequence[Row], range_name: str, session: GpuSession
) -> list[Row]:
    """The rows of a test at the end of its body, with the footprints of the test and of its labelled parts; not judged."""
    watched = item.stash.get(WATCHED, None)
    if watched is None or session.lost_in is not None:
        return list(rows)
    return _attached(rows, watched.so_far(), watched, range_name)


def _attached(
    rows: Sequence[Row], footprint: Footprint, watched: WatchedTest, range_name: str
) -> list[Row]:
    """The rows of a test with its footprint and those of its parts."""
    item, session = watched.item, watched.session
    found = {row.label: row for row in rows}
    if any(row.measurement is not None for row in rows):  # a limit on waits is on one launch then
        watched.waits = None
        footprint = replace(footprint, waits=None)
    # A limit of the session is no reason for a row of a test that does not touch the GPU. Whether one does that was not read is not known.
    waits = footprint.waits or Waits()
    touches = (
        footprint.uses
        or waits.lines
        or (waits.not_read is not None and watched.limits.max_waits is not None)
        or watched.limited
        or (watched.trouble is not None and _limited(watched.limits))
    )
    of_test = (
        [("", footprint, watched.limits)] if (watched.shown and touches) or "" in found else []
    )
    for label, seen, limits in [*of_test, *watched.parts]:
        if watched.trouble is not None and not seen.watched and not _limited(limits):
            continue  # nothing was read, and nothing is judged by it
        of_all = with_further(
            seen, key_of(item.nodeid, label), [process.by_key for process in session.further]
        )
        row = found.get(label)
        if row is None:
            open_ = replace(UNLIMITED, simulated=session.facts.simulated)
            found[label] = Row(
                item.nodeid, limits, open_, label=label, range_name=range_name, footprint=of_all
            )
        else:
            found[label] = replace(row, limits=both_limits(row.limits, limits), footprint=of_all)
    return list(found.values())


class BlockMemory:
    """The memory that a part of a test took, in bytes: inside the block so far, afterwards in total."""

    def __init__(self, watched: WatchedTest) -> None:
        self._watched = watched
        self._watch = watched.tried(watched.part)
        self._final: Footprint | None = None

    @property
    def footprint(self) -> Footprint:
        """Everything that was recorded. Raises `DeviceError`: it could not be read."""
        found = self._final
        if found is None and self._watch is not None:
            found = self._watched.tried(functools.partial(_read, self._watched, self._watch))
        if found is None:
            raise DeviceError(f"the memory could not be read: {self._watched.trouble}")
        return found

    @property
    def peak(self) -> int:
        """Most bytes of device memory in use at once, above those before."""
        return self.footprint.peak

    @property
    def kept(self) -> int:
        """Bytes of all kinds that are in use and were not before."""
        return self.footprint.kept

    @property
    def reserved(self) -> int:
        """Bytes that pools hold unused, above those before."""
        return self.footprint.reserved

    @property
    def allocations(self) -> int:
        """Number of allocations."""
        return self.footprint.allocations

    @property
    def largest(self) -> int:
        """Bytes of the largest allocation."""
        return self.footprint.largest

    @property
    def pinned(self) -> int:
        """Most bytes of page-locked memory."""
        return self.footprint.pinned_peak

    @property
    def managed(self) -> int:
        """Most bytes of managed memory."""
        return self.footprint.managed_peak

    def end(self) -> Footprint:
        """End the part of a test."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._final = self._watched.tried(lambda: _at_the_end(self._watched, watch))
            watch.close()
        return unread(self._watched.trouble) if self._final is None else self._final

    def __repr__(self) -> str:
        if self._watched.trouble is not None and self._final is None:
            return "<Used, not read>"
        return f"<Used peak {self.peak} B, kept {self.kept} B, reserved {self.reserved} B, {counted(self.allocations, 'allocation')}>"


def _read(watched: WatchedTest, watch: MemoryWatch) -> Footprint:
    """The footprint of a part of a test."""
    return watched.without_allowed(watch.read(), watch)


def _at_the_end(watched: WatchedTest, watch: MemoryWatch) -> Footprint:
    """The same, without what only the garbage collector has to free."""
    found = _read(watched, watch)
    if found.kept:
        gc.collect(YOUNG)
        found = _read(watched, watch)
    if found.kept:
        gc.collect(OLD)
        watch.settle()
        found = _read(watched, watch)
    return watched.traced(found, watch)


class GpuMemory:
    """Watches parts of a test: `with gpu_memory.watch("decode") as used: ...`."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    @contextmanager
    def watch(self, label: str, **limits: Unpack[FootprintKeywords]) -> Iterator[BlockMemory]:
        """Watch the memory that the block takes.

        Args:
            label: names the part; its row in results is the test's with this label.
            limits: limits of this part by name, such as `max_peak="64 MiB"`. Kept memory is judged at the end of the block.

        Raises:
            BadCall: the label is no short text, or was used; or memory is not watched.
            SettingsError: a limit that is none.
        """
        __tracebackhide__ = True
        watched = self._item.stash.get(WATCHED, None)
        if watched is None or self._session.settings.footprint == "off":
            raise BadCall(
                f"gpu_memory.watch({label!r}): memory is not watched: --gpumem-footprint=off"
            )
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise BadCall(
                f"gpu_memory.watch({label!r}): a label is a short text that tells this part from others of the same test"
            )
        if (
            any(label == known for known, _, _ in watched.parts)
            or key_of(self._item.nodeid, label) in self._session.tests
        ):
            raise BadCall(
                f"gpu_memory.watch({label!r}): the label is used already; choose another one"
            )
        unknown = [name for name in limits if name not in OF_FOOTPRINT]
        if unknown:
            raise BadCall(
                f"gpu_memory.watch() has no keyword {unknown[0]!r}; accepted are {', '.join(OF_FOOTPRINT)}"
            )
        # A marker's limits are of the whole test.
        own = marker_limits(limits, "call")
        used = BlockMemory(watched)
        try:
            with watched.phase(label):
                yield used
        finally:
            ended = used.end()
            if not watched.warms_up:
                watched.parts.append((label, ended, own))

    @property
    def _session(self) -> GpuSession:
        return self._item.config.stash[SESSION]
