"""Something that reports memory into a log: the driver, or the allocator of a library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog, Series


class Source(ABC):
    """Something that reports memory: the driver, or the allocator of a library."""

    name: str  # as in `Footprint.watched`
    method: str  # as `MemoryUse.source`
    lost: Callable[[str], None]
    """Takes the reason when it did not report for a while. A watch that is open then is not read;
    of a library, by its counts alone."""

    @abstractmethod
    def ready(self) -> bool:
        """True if its library is in use. Imports nothing."""

    def start(self, log: MemoryLog, lines: bool) -> str | None:
        """Report into `log` from now on, also after a `stop`.

        Returns the reason if it cannot report single allocations. Its figures count all the same.
        """
        return None

    def drain(self) -> None:
        """Report what has happened up to now, where it is not reported at once."""
        return

    def figures(self) -> Mapping[Series, Figures]:
        """The library's own counts now."""
        return {}

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
        """Give back what it keeps for reuse and cannot tell from what is used.

        `kept`: allocations of the driver that live, and that no pool is known to have made.
        Returns False if nothing has changed.
        """
        return False

    def alive(self, allocated: AllocationEvent) -> bool:
        """False if an allocation is surely freed: frees inside `paused` were not reported."""
        return True

    def stop(self) -> None:
        """Report no longer."""
        return
