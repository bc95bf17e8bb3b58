"""How to measure, and how long the phases of a measurement take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Plan:
    """How to measure."""

    mode: str = "clean-cold"
    sampler: str = "auto"
    placements: int = 8
    precision: float = 0.001
    """Wanted half-width of the confidence interval over placements, as a share of the latency."""
    budget: float = 1.0  # seconds for a measurement


class Passes(NamedTuple):
    """Untimed passes of a measurement."""

    pages: bool = False  # counts page faults and migrations
    ran: bool = False  # finds each step of a launch, with the machine code of its kernels
    streams: bool = True  # finds work of a foreign launch outside of the timed interval


NO_PASSES = Passes()


class Stopwatch:
    """Seconds of the phases of a measurement."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._last = now, now()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap as the phase's."""
        now = self._now()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
