"""The object that the fixture `gpu_memory` gives: watches the memory of parts of a test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.protocol import DeviceError, MemoryWatch
from pytest_gpumem.limits import OF_FOOTPRINT
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.plugin.session import SESSION, WATCHED, GpuSession
from pytest_gpumem.plugin.watched_test import WatchedTest, collections, freed, unread
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.row import key_of
from pytest_gpumem.settings import marker_limits

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from pytest_gpumem.limits import FootprintKeywords


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
            footprint = self._watched.tried(functools.partial(_read, self._watched, self._watch))
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
        """End the part of a test."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._final = self._watched.tried(lambda: _at_the_end(self._watched, watch))
            watch.close()
        return unread(self._watched.trouble) if self._final is None else self._final

    def __repr__(self) -> str:
        if self._watched.trouble is not None and self._final is None:
            return "<Used, not read>"
        return f"<Used peak {self.peak} B, kept {self.kept} B>"


def _read(watched: WatchedTest, watch: MemoryWatch) -> Footprint:
    """The footprint of a part of a test."""
    return watched.without_allowed(watch.read(), watch)


def _at_the_end(watched: WatchedTest, watch: MemoryWatch) -> Footprint:
    """The same, without what only the garbage collector has to free."""
    read = functools.partial(_read, watched, watch)
    return watched.traced(freed(read, [*collections(), watch.settle]), watch)


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
        watched: WatchedTest | None = self._item.stash.get(WATCHED, None)
        if watched is None or self._session.settings.footprint == "off":
            raise BadCall(
                f"gpu_memory.watch({label!r}): memory is not watched: --gpumem-footprint=off"
            )
        if not isinstance(label, str) or not label.strip() or not label.isprintable():
            raise BadCall(
                f"gpu_memory.watch({label!r}): a label is a short text that tells this part from "
                "others of the same test"
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
                f"gpu_memory.watch() has no keyword {unknown[0]!r}; accepted are "
                f"{', '.join(OF_FOOTPRINT)}"
            )
        # A marker's limits are of the whole test.
        of_part = marker_limits(limits, "call")
        used = BlockMemory(watched)
        try:
            watched.look()
            yield used
        finally:
            ended = used.end()
            if not watched.warms_up:
                watched.parts.append((label, ended, of_part))

    @property
    def _session(self) -> GpuSession:
        return self._item.config.stash[SESSION]
