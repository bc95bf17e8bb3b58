"""Watches over what a test does besides: the memory that it takes, and its waits."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.memory_events import Accounts, Growth
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.waits import Waits


class WaitCounter(Protocol):
    """Counts the waits of this process, by the innermost line of the user's code.

    It needs no context.
    """

    def start(self) -> None:
        """Count from now on. Raises `NotCounted`: with the reason."""

    def stop(self) -> None:
        """Count no longer; a second call does nothing."""

    def read(self, root: Path, allowed: Sequence[str]) -> Waits:
        """Return what was counted.

        `root`: files are shown relative to it.
        `allowed`: lines that do not count, such as "conftest.py:*".
        """


class MemoryWatch(Protocol):
    """The memory that is taken from its begin on. Watches may lie inside each other."""

    def read(self) -> Footprint:
        """Return the footprint so far. Waits for no work.

        What pools keep for reuse is `reserved`, not `kept`.
        """

    def settle(self) -> bool:
        """Have libraries give back what they keep for reuse and cannot tell from what is used.

        Such as page-locked memory. False if nothing changed: a `read` gives what the last gave.
        """

    def accounts(self) -> Accounts:
        """The single allocations behind the last `read`: those of the peak, and those kept."""

    def close(self) -> None:
        """End it."""


class Footprints(Protocol):
    """The memory that all libraries of this process, and the driver, take on this device."""

    def start(self, *, driver: bool, lines: bool = False) -> None:
        """Have the sources report from now on. A second call changes what is watched.

        `driver`: watch the driver's allocations too, which takes some 3 us each.
        `lines`: keep the line of the user's code behind each allocation.
        """

    def stop(self) -> None:
        """Have the sources report no longer."""

    def look(self) -> None:
        """Watch libraries that have come into use too; else a read of a footprint does so."""

    def watch(self) -> MemoryWatch:
        """Begin to watch. Raises `DeviceError` before `start`."""

    def ours(self) -> AbstractContextManager[Growth]:
        """A block whose allocations are no test's. Frees count wherever they happen.

        Yields the bytes by which libraries use more after the block; empty until it ends.
        """

    def paused(self) -> AbstractContextManager[None]:
        """As `ours`, and no source reports inside, so that none takes time: for timed samples."""

    def resumed(self) -> AbstractContextManager[None]:
        """Inside `paused`, a block that is watched."""

    def released(self, growth: Growth) -> None:
        """What was no test's, as `ours` gave it, is about to be freed: no open watch counts it."""

    def took(self, kind: MemoryKind, nbytes: int) -> int:
        """A fixture gave the test memory; return a number for `gave_back`.

        The number stays the same if the harness moves the memory.
        """

    def gave_back(self, number: int) -> None:
        """A fixture's memory is the test's no longer; a second call does nothing."""
