"""What the statistics need of a measurement: one reading for each process, with the session that it is of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Protocol

from pytest_gpumem.records.measurement import Measurement, Taken

SESSION_SECONDS = 3600.0
"""Processes on one card that begin within this time of each other are of one session."""


class Known(Protocol):
    """What a variance asks of a measurement or of a reading."""

    @property
    def latency(self) -> float:
        """Seconds: the mean of the medians."""

    @property
    def medians(self) -> tuple[float, ...]:
        """Seconds: one for each placement."""

    @property
    def overhead(self) -> float | None:
        """Seconds of launch overhead in it, where that is known."""

    @property
    def sampler(self) -> str:
        """How samples were taken."""

    @property
    def taken(self) -> Taken | None:
        """When and where."""


@dataclass(frozen=True)
class Reading:
    """One process's measurement, worked out once: a `Measurement` takes its medians anew at every look."""

    latency: float
    medians: tuple[float, ...]
    overhead: float | None
    sampler: str
    taken: Taken | None


def readings(measurement: Measurement) -> list[Reading]:
    """One for each process behind a measurement: its own first, then the further ones of its run."""
    medians = measurement.medians
    own = Reading(statistics.fmean(medians), medians, measurement.overhead, measurement.sampler, measurement.taken)
    return [own] + [
        Reading(statistics.fmean(r.medians), r.medians, r.overhead, measurement.sampler, measurement.taken) for r in measurement.further
    ]


def sessions(known: Sequence[Known]) -> list[Hashable]:
    """The session of each reading: card and the start of its first process; None for those that do not know theirs."""
    found: list[Hashable] = [None] * len(known)
    by_card: dict[str | None, list[tuple[float, int]]] = {}
    for index, one in enumerate(known):
        if one.taken is not None and (began := _seconds(one.taken.utc)) is not None:
            by_card.setdefault(one.taken.card, []).append((began, index))
    for card, starts in by_card.items():
        first = -math.inf
        for began, index in sorted(starts):
            if began - first > SESSION_SECONDS:
                first = began
            found[index] = (card, first)
    return found


def _seconds(utc: str) -> float | None:
    try:
        moment = datetime.fromisoformat(utc.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp()
