"""The fixture `gpu_memory`, which watches parts of a test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from pytest_gpumem.devices.errors import DeviceError
from pytest_gpumem.limits import OF_FOOTPRINT, FootprintKeywords
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.plugin.footprints import COLLECTIONS, WatchedTest, read_after
from pytest_gpumem.plugin.marks import SESSION_PLUGIN
from pytest_gpumem.plugin.session import state_of
from pytest_gpumem.records import key_of
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.settings import marker_limits

if TYPE_CHECKING:
    from typing_extensions import Unpack


def check_label(call: str, label: object, used: Iterable[str], item: pytest.Item) -> None:
    """Raise `BadCall` unless a label is a short text that no other part or test has."""
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
            BadCall: the label is no short text, or was used; memory is not watched; or the block
                ends after the test's body.
            SettingsError: a limit has a wrong value.
        """
        __tracebackhide__ = True
        item = self._item
        watched: WatchedTest | None = state_of(item).watched
        if watched is None or watched.session.settings.footprint == "off":
            raise BadCall("gpu_memory.watch(): memory is not watched: --gpumem-footprint=off")
        check = partial(check_label, f"gpu_memory.watch({label!r})", label, watched.parts, item)
        check()
        for name in limits:
            if name not in OF_FOOTPRINT:
                raise BadCall(
                    f"gpu_memory.watch() has no keyword {name!r}; accepted are "
                    f"{', '.join(OF_FOOTPRINT)}"
                )
        of_part = marker_limits(limits, "call")  # a marker's limits are of the whole test
        used, test = BlockMemory(watched), state_of(item).test
        try:
            yield used
        finally:
            ended = used.end()
            test.check_unjudged()
            check()  # a block inside may have it
            if not watched.warms_up:
                watched.parts[label] = ended, of_part
