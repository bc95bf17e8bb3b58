"""A watch over the memory of a test, from its begin on, and the footprint that it reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from pytest_gpumem.devices.errors import NotCounted
from pytest_gpumem.devices.memory_events import (
    NOTHING,
    Accounts,
    Change,
    Figures,
    Series,
    account,
    claim,
    live_of,
    pool_sizes,
)
from pytest_gpumem.devices.sources import Sources
from pytest_gpumem.records.footprint import DRIVER, FIXTURES, Footprint, MemoryUse


class OpenWatch:
    """The memory from now on."""

    def __init__(self, footprints: Sources) -> None:
        self._footprints, self._log, self._driver = footprints, footprints.log, footprints.driver
        self._sources = footprints.sources or ()
        self._log.open += 1
        self._mark = self._log.mark()
        self._gaps_before = {source.name: len(source.gaps) for source in self._sources}
        self._figures = footprints.figures()
        self._drift = dict(footprints.drift)
        self._free = None if footprints.driver_is_watched else footprints.free_bytes()
        self._accounts = account(())
        self._most: dict[Series, int] = {}  # by library: most bytes in use when it was read
        self._closed = False

    def _gaps(self) -> dict[str, str]:
        """By source: why it did not report all the time since the begin."""
        gaps = {}
        for source in self._sources:
            if len(source.gaps) > self._gaps_before[source.name]:
                gaps[source.name] = source.gaps[-1]
        return gaps

    def read(self) -> Footprint:
        footprints = self._footprints
        footprints.settle()
        gaps = self._gaps()
        if self._driver is not None and self._driver.name in gaps:
            raise NotCounted(gaps[self._driver.name])
        changes = [change for change in self._log.since(self._mark) if change.series[0] not in gaps]
        after = footprints.figures()
        not_watched = [f"{name}: {why}" for name, why in {**gaps, **footprints.reasons}.items()]
        driver = footprints.driver_is_watched
        if driver:
            for series, figures in after.items():
                if not self._claims(changes, series, figures):
                    which = "which allocations of the driver its pool is made of"
                    not_watched.append(f"{series[0]}: {which}: they count as CUDA's too")
        self._accounts = accounts = account(changes)
        uses, unknown = dict(accounts.uses), 0
        for series, figures in after.items():
            use = uses.get(series, MemoryUse(*series))
            use, more = self._counted(use, series, figures, reported=series[0] not in gaps)
            if more is not None:
                why = "its peak, which is below an earlier one of this process"
                not_watched.append(f"{series[0]}: {why}")
                unknown += more
            if use != MemoryUse(*series):
                uses[series] = use
        # Where allocations were not seen one by one, the peak of all is at least that of each.
        peaks = {series: use.peak for series, use in uses.items() if series[1] == "device"}
        peak = max(accounts.peak, *peaks.values(), 0)
        most = peak + unknown
        for series, figures in after.items():
            unseen = self._unseen(changes, series, figures)
            if unseen is not None:
                why = "arrays of a thread that ran before, or that Python did not begin"
                not_watched.append(f"{series[0]}: {why}: its pool grew for them")
                most = max(most, unseen + sum(peaks.values()) - peaks.get(series, 0))
        return Footprint(
            peak=peak,
            peak_bound=most if most > peak else None,
            uses=self._sorted(uses.values()),
            driver_peak=accounts.driver_peak if driver else None,
            bound=self._bound(uses.values()),
            watched=("fixtures", *footprints.running),
            not_watched=tuple(not_watched),
        )

    def _since_begin(self, series: Series, figures: Figures) -> Figures:
        """Return by how much a library's counts grew, without what is no test's."""
        before = self._figures.get(series, NOTHING)
        return figures.minus(before).minus(self._nobodys(series))

    def _nobodys(self, series: Series) -> Figures:
        """Return by how much a library grew in blocks of `ours` since the begin."""
        drift = self._footprints.drift.get(series, NOTHING)
        return drift.minus(self._drift.get(series, NOTHING))

    def _claims(self, changes: Sequence[Change], series: Series, figures: Figures) -> bool:
        """Give a library the driver's allocations that its pool grew by; False if it cannot."""
        if figures.segments is None:
            return True
        grown = self._since_begin(series, figures).segments or 0
        missing = grown - pool_sizes(changes, series)[-1]
        return missing <= 0 or claim(changes, series[0], missing)

    def _unseen(self, changes: Sequence[Change], series: Series, figures: Figures) -> int | None:
        """Return the most bytes that a library's arrays took, where the pool grew unreported.

        Its arrays were not reported then either. None for a library with a high-water mark.
        """
        grown = self._since_begin(series, figures).segments or 0
        if figures.high is not None or grown <= self._log.segments(series[0], self._mark):
            return None
        unused = self._figures.get(series, NOTHING).unused
        return unused + max(grown, *pool_sizes(changes, series))

    def _counted(
        self, use: MemoryUse, series: Series, figures: Figures, *, reported: bool
    ) -> tuple[MemoryUse, int | None]:
        """Complete what was seen one by one with a library's own counts.

        Returns by how many bytes its peak may be larger too; None if the peak is known.
        """
        grown, footprints = self._since_begin(series, figures), self._footprints
        kept, peak, allocations, unknown = use.kept, use.peak, use.allocations, None
        # Where the library came into use meanwhile, not all of its allocations were seen.
        from_begin = series in self._figures or series in footprints.since_ours
        single = figures.single and reported and from_begin
        if figures.allocations is not None and not single:
            allocations = grown.allocations or 0
        if grown.used is not None:
            kept = grown.used
            self._most[series] = peak = max(peak, kept, self._most.get(series, 0))
        if figures.high is not None and not single:
            before = self._figures.get(series, NOTHING)
            high = figures.high - (before.used or 0) - (self._nobodys(series).used or 0)
            if figures.high > max(before.high or 0, footprints.high_in_ours.get(series, 0)):
                peak = max(peak, high)
            elif figures.high and (figures.allocations is None or allocations):
                unknown = max(0, high - peak)
        use = replace(use, kept=kept, reserved=grown.unused, peak=peak, allocations=allocations)
        return use, unknown

    def _sorted(self, uses: Iterable[MemoryUse]) -> tuple[MemoryUse, ...]:
        """Return the uses with their sources, by kind, the largest first."""
        methods = {FIXTURES: "fixtures"}
        for source in self._sources:
            methods[source.name] = source.method
            if source is self._driver:
                methods[DRIVER] = source.method
        named = [replace(use, source=methods.get(use.library, "")) for use in uses]
        return tuple(sorted(named, key=lambda use: (use.kind, -use.peak, use.library)))

    def _bound(self, uses: Iterable[MemoryUse]) -> int | None:
        """Return what the free memory of the device tells beyond what is known."""
        if self._free is None:
            return None
        now = self._footprints.free_bytes()
        if now is None:
            return None
        known = 0
        for series in self._footprints.drift:
            if series[1] == "device":
                nobodys = self._nobodys(series)
                known += (nobodys.used or 0) + nobodys.unused
        for use in uses:
            if use.kind == "device" and use.library != FIXTURES:
                known += use.kept + use.reserved
        return max(0, self._free - now - known)

    def accounts(self) -> Accounts:
        return self._accounts

    def settle(self) -> bool:
        self._footprints.settle()
        live = live_of(self._log.since(self._mark))
        kept = [event for event in live if event.layer == "driver"]
        changed = False
        for source in self._footprints.running.values():
            changed = source.settle(kept) or changed
        return changed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._log.closed()
