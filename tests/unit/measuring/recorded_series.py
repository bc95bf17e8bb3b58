"""Series of samples that a GPU gave; their origin stands in the file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TICK = 32e-9
"""Seconds: what an event's time is a multiple of."""
MEBIBYTES = (2, 32, 256)
"""Sizes of the triad's arrays."""


@dataclass(frozen=True)
class Recorded:
    """One triad on an H200, in seconds."""

    rounds: list[list[float]]
    """One sample of each placement, in each round."""
    medians: list[float]
    """Of every placement of the process."""
    warm_up: list[float]
    """Consecutive samples of one placement, from the first on."""

    def placements(self, count: int, rounds: int) -> list[list[float]]:
        """Samples of the first placements, as far as they go."""
        return [
            list(samples)
            for samples in zip(*(r[:count] for r in self.rounds[:rounds]), strict=True)
        ]


def recorded(mebibytes: int) -> Recorded:
    document = json.loads((Path(__file__).with_name("recorded") / "h200_triad.json").read_text())
    (one,) = (t for t in document["triad"] if t["mib"] == mebibytes)
    return Recorded(
        rounds=[[TICK * ticks for ticks in taken] for taken in one["rounds"]],
        medians=[TICK * ticks for ticks in one["medians"]],
        warm_up=[TICK * ticks for ticks in one["warm_up"]],
    )
