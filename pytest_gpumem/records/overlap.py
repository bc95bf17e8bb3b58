"""What ran at once in one measurement: how long its parts take alone, and how much of that was hidden."""

from __future__ import annotations

from pytest_gpumem.records.record import Record

NOTHING_TO_HIDE = 0.02
"""Share of the sequential time below which a share of what is hidden would be noise."""


class Part(Record, frozen=True):
    """One part, measured by itself."""

    name: str
    """Such as "host to device"."""
    seconds: float
    """Its latency alone."""


class Overlap(Record, frozen=True):
    """The parts of work that overlaps. All times are seconds, measured in the same way as the overlapping work itself."""

    parts: tuple[Part, ...]
    """Each part alone."""
    sequential: float
    """All parts, one after another."""
    bound: float
    """What no overlap can beat: the longest part, or the sum of those that share an engine."""
    streams: int
    """Streams that the work was spread over."""
    chunks: int | None = None
    """Pieces that the data was cut into; None where the parts are whole and independent."""

    @property
    def estimate(self) -> float | None:
        """The text's rough estimate, tE + tT/n or tT + tE/n: the bound, and an n-th part of everything else (Best Practices Guide, 9.1.2).

        None where nothing was cut into pieces.
        """
        return None if self.chunks is None else self.bound + (sum(part.seconds for part in self.parts) - self.bound) / self.chunks

    @property
    def hideable(self) -> float | None:
        """Time that the best overlap would hide: the sequential time over the bound; None where there is next to nothing."""
        seconds = self.sequential - self.bound
        return seconds if seconds > NOTHING_TO_HIDE * self.sequential else None

    def hidden(self, latency: float) -> float | None:
        """Share of the hideable time that is hidden at a latency: 0 as slow as one after another, 1 at the bound.

        Below 0 where the overlapping work is slower than the sequential one; None where there is nothing to hide.
        """
        return None if self.hideable is None else (self.sequential - latency) / self.hideable
