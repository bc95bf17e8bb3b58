"""The memory of each test: watched from before its setup until after its teardown, judged, and shown with its rows."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.protocol import DeviceError, MemoryWatch
from pytest_gpumem.judging.footprint import AT_THE_END, NO_LIMIT, RULES, PastFootprint, added, judge_footprint
from pytest_gpumem.judging.judge import is_failure
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.plugin.marks import MARKER, MEMORY_FIXTURE, TEST_FIXTURE, marks_of, uses
from pytest_gpumem.plugin.reported import broken_limits, failure_texts
from pytest_gpumem.plugin.state import ROWS, SESSION, GpuSession
from pytest_gpumem.plugin.tracing import memory_texts, traced
from pytest_gpumem.plugin.workers import is_controller
from pytest_gpumem.records.footprint import Footprint, Phase
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict, key_of
from pytest_gpumem.settings import SettingsError, both_limits, loosened, marker_keywords, marker_limits, merge_limits

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytest_gpumem.limits import FootprintKeywords

TROUBLE = (DeviceError, RuntimeError)
"""Errors of the device and of libraries, such as after the loss of the context: memory is not watched then, and the test goes on."""
YOUNG, OLD = 1, 2
"""Generations of the garbage collector: up to which the objects of a test mostly are, and of all. To collect all takes tens of
milliseconds."""
NO_FIXTURE_SIMULATED = "a simulated device counts only the buffers of fixtures"


class WatchedTest:
    """The memory of one test."""

    def __init__(self, item: pytest.Item, session: GpuSession, watch: MemoryWatch, limits: Limits, *, asked: bool, limited: bool) -> None:
        self.item, self.session, self.watch, self.limits = item, session, watch, limits
        self.asked = asked
        """Someone asked for it, by an option, a limit or a fixture: it has a row even where nothing is measured."""
        self.limited = limited  # its own marker or fixture asks for it: it has a row even where it takes no memory
        self.parts: list[tuple[str, Footprint, Limits]] = []  # labelled parts that have ended, with their limits
        self.phases: list[Phase] = []
        self.row_at_end = False
        """Its row is made when it has ended: nothing was to be judged before, and a look takes time."""

    @property
    def judged_in_body(self) -> bool:
        """True if something is judged at the end of its body."""
        return bool(self.parts) or any(getattr(self.limits, name) is not None for name in RULES if name not in AT_THE_END)

    def so_far(self) -> Footprint:
        """The footprint while the test runs."""
        return traced(self._read(ended=False), self.watch, self.item, self.session)

    def _read(self, *, ended: bool) -> Footprint:
        found = replace(self.watch.read(), ended=ended, notes=tuple(loosened(self.limits, self.session.settings, OF_FOOTPRINT)))
        if self.session.facts.simulated and not uses(self.item, TEST_FIXTURE):
            found = replace(found, watched=(), not_watched=(NO_FIXTURE_SIMULATED,))
        return replace(found, phases=tuple(sorted(self.phases, key=lambda phase: phase.begin)))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note when a phase of the test begins and ends."""
        self.session.device.footprints.look()
        begun = self.watch.seconds()
        try:
            yield
        finally:
            self.phases.append(Phase(name, begun, self.watch.seconds()))

    def after(self) -> Footprint:
        """The footprint at the end, without what only pytest still refers to."""
        found = self._read(ended=True)
        if (found.kept or found.reserved) and self.watch.settle():
            found = self._read(ended=True)
        if found.kept:
            _let_go(self.item)
            found = self._read(ended=True)
        for generation in (YOUNG, OLD):
            if found.kept:
                gc.collect(generation)
                found = self._read(ended=True)
        if found.kept and self.watch.settle():  # once more, for what the collection left to caches
            found = self._read(ended=True)
        return traced(found, self.watch, self.item, self.session)


WATCHED: pytest.StashKey[WatchedTest | None] = pytest.StashKey()  # on `item.stash`, while the memory of the test is watched


def _let_go(item: pytest.Item) -> None:
    """Drop pytest's own references to what the test made: values of fixtures, and the frames of its failure."""
    arguments = getattr(item, "funcargs", None)
    if arguments:
        # pytest-benchmark looks for its fixture once more.
        for name in [name for name in arguments if name != "benchmark" and not name.startswith("_gpumem")]:
            del arguments[name]
    error: BaseException | None = getattr(sys, "last_value", None)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        _clear(error.__traceback__)
        error = error.__cause__ or error.__context__


def _clear(found: TracebackType | None) -> None:
    """Forget the variables of the finished functions of a traceback."""
    while found is not None:
        frame, found = found.tb_frame, found.tb_next
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED == 0:
            continue  # of a module or a class, whose variables are its own
        # Up to Python 3.12 a dictionary that was made of the variables outlives them.
        variables = frame.f_locals
        with suppress(RuntimeError):  # it still runs
            frame.clear()
            if isinstance(variables, dict):
                variables.clear()


class FootprintHooks:
    """Watches tests; registered only with `--gpumem`, and unless `--gpumem-footprint=off`. Its hooks are outside all others."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session
        self._level: tuple[bool, bool] | None = None  # what is watched now: the driver, and stacks
        self._refused = False
        self._of_session = merge_limits(None, None, session.settings, OF_FOOTPRINT)
        """Limits of tests without a marker."""
        limited = next((name for name in OF_FOOTPRINT if getattr(self._of_session, name) is not None), None)
        if limited is not None and session.facts.simulated:
            written = f"{self._of_session.origin[limited]}: {limited} {getattr(self._of_session, limited)}"
            session.remarks.append(f"{written} limits only tests with fixtures of this plugin: {NO_FIXTURE_SIMULATED}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Open the device before the first test where every test is watched, so that the first one does not take longer."""
        gpu, config = self._session, session.config
        if gpu.settings.footprint in ("on", "trace") and not config.option.collectonly and not is_controller(config):
            with suppress(*TROUBLE):  # the first test finds it
                self._start((True, gpu.settings.footprint == "trace"))

    def _start(self, level: tuple[bool, bool]) -> None:
        if level != self._level:
            self._session.device.footprints.start(driver=level[0], stacks=level[1])
            self._level = level

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[WATCHED] = watched = self._begin(item)
        if watched is None:
            return (yield)
        with watched.phase("setup"):
            return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)  # inside the judging of the body
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        watched = item.stash.get(WATCHED, None)
        if watched is None:
            return (yield)
        with watched.phase("call"):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, object, object]:
        watched = item.stash.get(WATCHED, None)
        if watched is None:
            return (yield)
        try:
            with watched.phase("teardown"):
                result = yield
        except BaseException:
            self._end(item, watched)
            raise
        if failing := self._end(item, watched):
            raise broken_limits(failing, [*failure_texts(failing, self._session.facts), *memory_texts(failing, self._session)])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Memory of a fixture of a wider scope than one test belongs to no test."""
        if self._level is None or fixturedef.scope == "function" or self._session.lost_in is not None:
            return (yield)
        footprints = self._session.device.footprints
        with footprints.ours() as growth:
            result = yield
        if growth:
            fixturedef.addfinalizer(lambda: footprints.released(growth))
        return result

    def _begin(self, item: pytest.Item) -> WatchedTest | None:
        """Begin to watch a test; None if it is not to be watched, or cannot be."""
        session = self._session
        limits = self._of_session
        if item.get_closest_marker(MARKER) is not None:
            try:
                limits = merge_limits(None, marker_limits(marker_keywords(marks_of(item))), session.settings, OF_FOOTPRINT)
            except SettingsError:  # reported where the marker is read
                return None
        limited = uses(item, MEMORY_FIXTURE) or any(limits.origin.get(name) == "marker" for name in OF_FOOTPRINT)
        asked = session.settings.footprint != "auto" or limited or any(getattr(limits, name) is not None for name in OF_FOOTPRINT)
        if session.lost_in is not None or not (asked or uses(item, TEST_FIXTURE)):
            return None
        level = (asked, session.settings.footprint == "trace")
        try:
            self._start(level)
            return WatchedTest(item, session, session.device.footprints.watch(), limits, asked=asked, limited=limited)
        except TROUBLE as error:
            if not self._refused:
                session.remarks.append(f"footprint: not watched from {item.nodeid} on: {error}")
            self._refused = True
            return None

    def _end(self, item: pytest.Item, watched: WatchedTest) -> list[Row]:
        """Complete the rows of a test with what it keeps; the rows that fail by it."""
        session = self._session
        item.stash[WATCHED] = None
        try:
            if session.lost_in is not None:
                return []
            footprint = watched.after()
        except TROUBLE as error:
            item.add_report_section("teardown", "gpumem", f"footprint: {error}")
            return []
        finally:
            watched.watch.close()
        rows, failing = list[Row](), list[Row]()
        here = item.stash.get(ROWS, [])
        if watched.row_at_end:
            here = _attached(here, footprint, watched, session.names.unique(item.nodeid))
        for before in here:
            if before.label or before.footprint is None:
                rows.append(before)
                continue
            row = replace(before, footprint=replace(footprint, further_peaks=before.footprint.further_peaks))
            findings = _findings(row, session, tuple(RULES) if watched.row_at_end else AT_THE_END)
            fails = any(is_failure(finding, session.settings.strict) for finding in findings)
            verdict = added(row.verdict, findings, session.settings.strict)
            rows.append(replace(row, verdict=verdict, failed=row.failed or fails))
            # A test whose body failed is reported, and what a failure keeps is no finding of its own.
            if fails and not before.failed and session.further_reports is None:
                failing.append(rows[-1])
        item.stash[ROWS] = rows
        return failing


def with_footprints(item: pytest.Item, rows: Sequence[Row], range_name: str, session: GpuSession) -> list[Row]:
    """The rows of a test at the end of its body, with the footprints of the test and of its labelled parts; not judged."""
    watched = item.stash.get(WATCHED, None)
    if watched is None or session.lost_in is not None:
        return list(rows)
    try:
        return _attached(rows, watched.so_far(), watched, range_name)
    except TROUBLE:
        return list(rows)


def _attached(rows: Sequence[Row], footprint: Footprint, watched: WatchedTest, range_name: str) -> list[Row]:
    """The rows of a test with its footprint and those of its parts."""
    item, session = watched.item, watched.session
    found = {row.label: row for row in rows}
    whole = ("", footprint, watched.limits)
    # A limit of the session is no reason for a row of a test that does not touch the GPU.
    touches = whole[1].uses or watched.limited
    of_test = [whole] if (watched.asked and touches) or "" in found else []
    for label, seen, limits in [*of_test, *watched.parts]:
        further = (process.rows.get(key_of(item.nodeid, label)) for process in session.further)
        peaks = tuple(row.footprint.peak for row in further if row is not None and row.footprint is not None)
        of_all = replace(seen, further_peaks=peaks)
        row = found.get(label)
        if row is None:
            open_ = Verdict(Outcome.PASS, NO_LIMIT, simulated=session.facts.simulated)
            found[label] = Row(item.nodeid, limits, open_, label=label, range_name=range_name, footprint=of_all)
        else:
            found[label] = replace(row, limits=both_limits(row.limits, limits), footprint=of_all)
    return list(found.values())


def with_verdict(row: Row, verdict: Verdict, session: GpuSession) -> Verdict:
    """The verdict on a row's measurement, with what is found of its footprint so far."""
    if row.footprint is None:
        return verdict
    names = tuple(name for name in RULES if row.footprint.ended or name not in AT_THE_END)
    return added(verdict, _findings(row, session, names), session.settings.strict)


def _findings(row: Row, session: GpuSession, names: Sequence[str]) -> list[Any]:
    assert row.footprint is not None
    past = [PastFootprint(one.footprint, one.process.revision) for one in session.baseline.past_footprints(row.key)]
    why = session.baseline.accepted(row.key) or session.baseline.note
    return list(judge_footprint(row.footprint, row.limits, past, names, None if past else why))


class Used:
    """The memory that a part of a test took, in bytes: inside the block so far, afterwards in total."""

    def __init__(self, watch: MemoryWatch) -> None:
        self._watch: MemoryWatch | None = watch
        self._final: Footprint | None = None

    @property
    def footprint(self) -> Footprint:
        """Everything that was recorded."""
        if self._final is not None:
            return self._final
        assert self._watch is not None
        return self._watch.read()

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

    def end(self, item: pytest.Item) -> Footprint:
        """End the part of a test."""
        assert self._watch is not None
        found = self._watch.read()
        if found.kept:
            gc.collect(YOUNG)
            found = self._watch.read()
        if found.kept:
            gc.collect(OLD)
            self._watch.settle()
            found = self._watch.read()
        found = traced(found, self._watch, item, item.config.stash[SESSION])
        self._watch.close()
        self._watch, self._final = None, found
        return found

    def __repr__(self) -> str:
        return f"<Used peak {self.peak} B, kept {self.kept} B, reserved {self.reserved} B, {self.allocations} allocations>"


class GpuMemory:
    """Watches parts of a test: `with gpu_memory.watch("decode") as used: ...`."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    @contextmanager
    def watch(self, label: str, **limits: Unpack[FootprintKeywords]) -> Iterator[Used]:
        """Watch the memory that the block takes.

        Args:
            label: names the part; its row in results is the test's with this label.
            limits: limits of this part by name, such as `max_peak="64 MiB"`. Kept memory is judged at the end of the block.

        Raises:
            BadCall: the label is no short text, or was used; or memory is not watched, with the reason.
            SettingsError: a limit that is none.
        """
        __tracebackhide__ = True
        watched = self._item.stash.get(WATCHED, None)
        if watched is None:
            off = "--gpumem-footprint=off" if self._session.settings.footprint == "off" else "its sources could not be started"
            raise BadCall(f"gpu_memory.watch({label!r}): memory is not watched: {off}")
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise BadCall(f"gpu_memory.watch({label!r}): a label is a short text that tells this part from others of the same test")
        if any(label == known for known, _, _ in watched.parts) or key_of(self._item.nodeid, label) in self._session.tests:
            raise BadCall(f"gpu_memory.watch({label!r}): the label is used already; choose another one")
        unknown = [name for name in limits if name not in OF_FOOTPRINT]
        if unknown:
            raise BadCall(f"gpu_memory.watch() has no keyword {unknown[0]!r}; accepted are {', '.join(OF_FOOTPRINT)}")
        # A marker's limits are of the whole test.
        own = marker_limits(limits, "call")
        used = Used(self._session.device.footprints.watch())
        try:
            with watched.phase(label):
                yield used
        finally:
            watched.parts.append((label, used.end(self._item), own))

    @property
    def _session(self) -> GpuSession:
        return self._item.config.stash[SESSION]
