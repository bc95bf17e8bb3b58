"""The facet `footprints` of both devices: sources report allocations into one log, and watches read their footprint from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from msgspec.structs import replace

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.memory_events import Accounts, Allocated, Figures, MemoryEvent, MemoryLog, Series, account, claim, owned
from pytest_gpumem.devices.protocol import Allocation, DeviceError, Footprints, MemoryWatch
from pytest_gpumem.records.footprint import DRIVER, FIXTURES, Footprint, MemoryPlace, MemoryUse

NOTHING = Figures(0, 0)
Level = Literal["exact", "figures"]


class Source(Protocol):
    """Something that reports memory: the driver, or one library's allocator."""

    name: str
    """As in `Footprint.watched`."""
    method: str
    """As `MemoryUse.source`."""

    def ready(self) -> bool:
        """True if its library is in use. Imports nothing."""

    def start(self, log: MemoryLog, stacks: bool) -> str | None:
        """Report into `log` from now on. The reason, if it cannot report each allocation; its figures count all the same."""

    def drain(self) -> None:
        """Report what has happened up to now."""

    def figures(self) -> Mapping[Series, Figures]:
        """The library's own counts now; empty where it has none."""

    def caches(self) -> None:
        """Give back what is kept for reuse and cannot be told from what is used. Called only where memory seems to be kept."""

    def alive(self, allocated: Allocated) -> bool:
        """False if an allocation of this source is surely freed: frees inside `paused` were not reported."""

    def stop(self) -> None:
        """Report no longer."""
