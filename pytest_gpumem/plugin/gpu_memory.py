"""The memory of a test, watched from before its setup until after its teardown, and of its parts,
which the fixture `gpu_memory` watches."""

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
from pytest_gpumem.limits import AT_THE_END, MAX_WAITS, OF_FOOTPRINT, OF_WATCHED, FootprintKeywords
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.plugin.marks import (
    MEMORY_FIXTURE,
    SESSION_PLUGIN,
    TEST_FIXTURE,
    keywords_of,
    uses,
    uses_benchmark,
)
from pytest_gpumem.plugin.session import NO_FIXTURE_SIMULATED, GpuSession, state_of
from pytest_gpumem.records import key_of
from pytest_gpumem.records.footprint import Footprint, Waits
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.settings import SettingsError, by_marker, marker_limits, of_marker, of_test

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytest_gpumem.devices.footprints import MemoryWatch

T = TypeVar("T")
TROUBLE = (DeviceError, RuntimeError)
"""Errors of the device and of libraries: limits on memory are UNDECIDED then."""
COLLECTIONS = [lambda: gc.collect(1), lambda: gc.collect(2)]  # most objects of a test, and all


class WatchedTest:
    """A test whose memory is watched, or whose waits are read."""

    def __init__(self, item: pytest.Item, session: GpuSession) -> None:
        """Raises `SettingsError`: a marker cannot be used."""
        self.item, self.session = item, session
        self.settings = of_test(session.settings, keywords_of(item))
        # A benchmark's limit on waits is on one launch.
        is_benchmark = uses_benchmark(item)
        names = OF_FOOTPRINT if is_benchmark else OF_WATCHED
        self.limits = session.limits(item, names)
        self.limited = uses(item, MEMORY_FIXTURE)  # it has a row even where it takes no memory
        for name in names:
            self.limited = self.limited or by_marker(self.limits, name)
        footprint = session.settings.footprint
        self.shown = self.watches = False
        if footprint != "off":
            of_memory = limited(self.limits, OF_FOOTPRINT)
            self.shown = footprint == "on" or self.limited or of_memory  # in a row
            self.watches = self.shown or uses(item, TEST_FIXTURE)
        self.reads_waits = limited(self.limits, [MAX_WAITS])
        if session.settings.waits and not is_benchmark:
            self.reads_waits = True
        self._watch: MemoryWatch | None = None
        self._collections = gc.get_stats()[1:]  # those that make what survives old
        self.trouble: BaseException | None = None  # why its memory cannot be read
        self.waits: Waits | None = None  # of its body, once it has ended
        self.count_waits: Callable[[], None] | None = None  # anew, where its waits are read
        self.warms_up = False  # its function is called before it counts: parts have no rows
        self.parts: list[tuple[str, Footprint, Limits]] = []  # those that have ended, by label

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
        if uses(self.item, TEST_FIXTURE):
            _ = self.session.device  # opened now: it belongs to no test
        footprints, root = self.session.footprints, self.item.config.rootpath
        footprints.start(driver=self.shown, allow_kept=self.settings.allow_kept, root=root)
        return footprints.watch()

    def look(self) -> None:
        if self._watch is not None:
            self.tried(self.session.footprints.look)

    def end(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self.watches:
            with suppress(*TROUBLE):
                self.session.footprints.stop()

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
        if self.session.facts.simulated and not uses(self.item, TEST_FIXTURE):
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
        item, times = self.item, of_marker(keywords_of(self.item), "warmups")
        if times is None or self._watch is None:
            yield
            return
        why = None
        if uses_benchmark(item):
            why = "a benchmark warms up by itself; accepted are tests without one"
        elif not isinstance(item, pytest.Function) or inspect.iscoroutinefunction(item.obj):
            why = "only a plain function or method can be called again"
        if why is not None:
            raise SettingsError(f"marker: warmups {times}: {why}")
        assert isinstance(item, pytest.Function)
        body = item.obj

        @wraps(body)
        def function(*arguments: Any, **keywords: Any) -> Any:
            self.warms_up = True
            try:
                with self.session.footprints.ours():
                    for _ in range(times):
                        body(*arguments, **keywords)
                    # Cycles that the call to come would free make up for what it keeps.
                    gc.collect()
            finally:
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


# The fixture


def check_label(call: str, label: object, used: Iterable[str], item: pytest.Item) -> None:
    """Raise `BadCall`: the label is no short text, or names another part, or another test."""
    if not isinstance(label, str) or not label.strip() or not label.isprintable():
        raise BadCall(
            f"{call}: a label is a short text that tells this part from others of the same test"
        )
    session = item.config.pluginmanager.getplugin(SESSION_PLUGIN)
    if label in used or key_of(item.nodeid, label) in session.tests:
        raise BadCall(f"{call}: the label is used already; choose another one")


class BlockMemory:
    """The memory that a part of a test took, in bytes: inside the block so far, afterwards in
    total."""

    def __init__(self, watched: WatchedTest) -> None:
        self._watched = watched
        self._watch = watched.tried(watched.session.footprints.watch)
        self._final: Footprint | None = None

    @property
    def footprint(self) -> Footprint:
        """Everything that was recorded. Raises `DeviceError`: it could not be read."""
        footprint = self._final
        if footprint is None and self._watch is not None:
            footprint = self._watched.tried(self._watch.read)
        if footprint is None:
            raise DeviceError(f"the memory could not be read: {self._watched.trouble}")
        return footprint

    @property
    def peak(self) -> int:
        """Most bytes of device memory in use at once, above those before."""
        return self.footprint.peak

    @property
    def kept(self) -> int:
        """Bytes of all kinds that are in use and were not before."""
        return self.footprint.kept

    def end(self) -> Footprint:
        """End the part of a test; leave out what only the garbage collector has to free."""
        watch, self._watch = self._watch, None
        if watch is not None:
            frees = (*COLLECTIONS, watch.settle)
            self._final = self._watched.tried(partial(read_after, watch, frees))
            watch.close()
        return self._final or self._watched.unread()


class GpuMemory:
    """Watches parts of a test: `with gpu_memory.watch("decode") as used: ...`."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    @contextmanager
    def watch(self, label: str, **limits: Unpack[FootprintKeywords]) -> Iterator[BlockMemory]:
        """Watch the memory that the block takes.

        Args:
            label: names the part; its row in results is the test's with this label.
            limits: limits of this part by name, such as `max_peak="64 MiB"`. Kept memory is judged
                at the end of the block.

        Raises:
            BadCall: the label is no short text, or was used; or memory is not watched.
            SettingsError: a limit that is none.
        """
        __tracebackhide__ = True
        item = self._item
        watched: WatchedTest | None = state_of(item).watched
        if watched is None or watched.session.settings.footprint == "off":
            raise BadCall("gpu_memory.watch(): memory is not watched: --gpumem-footprint=off")
        labels = [part[0] for part in watched.parts]
        check_label(f"gpu_memory.watch({label!r})", label, labels, item)
        for name in limits:
            if name not in OF_FOOTPRINT:
                raise BadCall(
                    f"gpu_memory.watch() has no keyword {name!r}; accepted are "
                    f"{', '.join(OF_FOOTPRINT)}"
                )
        of_part = marker_limits(limits, "call")  # a marker's limits are of the whole test
        used = BlockMemory(watched)
        try:
            yield used
        finally:
            ended = used.end()
            if not watched.warms_up:
                watched.parts.append((label, ended, of_part))
