"""Work that overlaps: the time of each part alone, and the hidden share of the time that overlap
can hide."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pytest_gpumem.records.record import Record, Seconds

Pieces = Annotated[int, Meta(ge=1)]
NOTHING_TO_HIDE = 0.02  # Share of the sequential time that is noise


class Part(Record, frozen=True):
    """One part, measured alone."""

    name: str  # Such as "host to device"
    seconds: Seconds  # Its latency alone, in seconds


class Overlap(Record, frozen=True):
    """Parts of work that overlaps. Times are in seconds, measured as the overlapping work is."""

    parts: tuple[Part, ...]
    """Each part alone."""
    sequential: Seconds
    """Seconds of all parts, one after another."""
    bound: Seconds
    """Seconds that no overlap can beat: the longest part, or the sum of the parts that share an
    engine."""
    streams: int
    """Streams that the work is spread over."""
    chunks: Pieces | None = None
    """Pieces that the data is cut into; None where the parts are whole and independent."""

    @property
    def estimate(self) -> float | None:
        """Estimate of the guide in seconds, tE + tT/n or tT + tE/n: the bound, and an n-th part of
        the rest (Best Practices Guide, 9.1.2). None where nothing is cut into pieces.
        """
        if self.chunks is None:
            return None
        rest = sum(part.seconds for part in self.parts) - self.bound
        return self.bound + rest / self.chunks

    @property
    def hideable(self) -> float | None:
        """Seconds that the best overlap hides: sequential less bound; None where this is next to
        nothing."""
        seconds = self.sequential - self.bound
        if seconds <= NOTHING_TO_HIDE * self.sequential:
            return None
        return seconds

    def hidden(self, latency: float) -> float | None:
        """Return the hidden share of the time that can be hidden: 0 at the sequential time, 1 at
        the bound, below 0 for slower than sequential. None where there is nothing to hide.
        `latency`: of the overlapping work, in seconds.
        """
        if self.hideable is None:
            return None
        return (self.sequential - latency) / self.hideable
