"""Sources of memory: the driver and the allocators of libraries, which report into one log."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from pytest_gpumem.devices.errors import DeviceError
from pytest_gpumem.devices.memory_events import (
    AllocationEvent,
    Figures,
    MemoryLog,
    Series,
)


class Source(ABC):
    """Something that reports memory: the driver, or the allocator of a library."""

    name: str  # as in `Footprint.watched`
    method: str  # as `MemoryUse.source`
    gaps: tuple[str, ...] = ()
    """Why it did not report for a while, each time. A watch that was open then is not read; of a
    library, by its counts alone."""

    def note_gap(self, why: str) -> None:
        """Add to `gaps`."""
        self.gaps = (*self.gaps, why)

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


class Sources:
    """The sources that report into one log.

    `driver`: source of the driver's allocations; None on a simulated device.
    `libraries`: sources of the libraries.
    `context`: gives the number of the context; None while there is none.
    """

    def __init__(
        self,
        driver: Source | None,
        libraries: Sequence[Source],
        context: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.driver, self.libraries, self._number = driver, libraries, context
        self.free_bytes: Callable[[], int | None] = lambda: None
        """Memory of the device that would be free without that of fixtures and of the harness."""
        self._context: int | None = None  # number of the context with all handles of the sources
        self.log = MemoryLog()
        self.sources: tuple[Source, ...] | None = None
        """Sources that are watched once their libraries are in use; None: nothing is watched."""
        self.running: dict[str, Source] = {}
        self.reasons: dict[str, str] = {}  # by source, why it reports no single allocations
        self._gaps_seen: dict[str, int] = {}  # by library
        self.lines = False
        self.are_paused = False
        self.before: dict[Series, Figures] | None = None
        """What libraries counted when a block of `ours` began; None outside of such a block."""
        self.drift: dict[Series, Figures] = {}
        """By which libraries counted more after such blocks than before, since the start."""
        self.since_ours: set[Series] = set()
        """Libraries that came into use in such a block: all that counts of them was reported."""
        self.high_in_ours: dict[Series, int] = {}  # high-water marks that rose in such a block

    def gone(self) -> bool:
        """True if the context is gone: handles of it, such as pools, are segmentation faults."""
        number = self._number()
        if self._context is None:
            self._context = number
        return number != self._context

    @property
    def driver_is_watched(self) -> bool:
        """True if each allocation of the driver is reported.

        On a simulated device only fixtures allocate.
        """
        if self.driver is None:
            return True
        return self.driver.name in self.running and self.driver.name not in self.reasons

    def look(self) -> None:
        self.gone()  # notes the context that a test has made meanwhile
        if self.are_paused:
            return
        for source in self.sources or ():
            if source.name not in self.running and source.ready():
                self.begin(source)
                self.running[source.name] = source

    def begin(self, source: Source) -> None:
        """Have a source report, also again. No open watch has seen all if that begins or ends."""
        before = self.reasons.pop(source.name, None)
        why = source.start(self.log, self.lines)
        if why is not None:
            self.reasons[source.name] = why
        if source.name in self.running and why != before:
            source.note_gap(why or before or "")

    def settle(self, *, ours: bool = False) -> None:
        """Book what the sources have to report."""
        if self.gone():
            problem = "the device was reset (cudaDeviceReset): what its memory held went with it"
            raise DeviceError(problem)
        self.look()
        if not self.are_paused:
            for source in self.running.values():
                source.drain()
        self.log.settle(ours=ours or self.before is not None)
        for source in self.libraries:
            if self._gaps_seen.get(source.name, 0) != len(source.gaps):
                self._gaps_seen[source.name] = len(source.gaps)
                self.log.lose(source.name)

    def figures(self) -> dict[Series, Figures]:
        """Return the own counts of all sources."""
        figures: dict[Series, Figures] = {}
        for source in self.running.values():
            figures.update(source.figures())
        return figures
