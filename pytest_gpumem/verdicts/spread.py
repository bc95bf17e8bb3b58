"""How far a latency would lie from itself if nothing changed: variances of its logarithm, with degrees of freedom.

Two sources. *Placement*: where buffers land; seen inside a process, averaged over its placements. *Process*: everything that stays
the same inside a process; seen only across processes. Each estimate is moderated: what real GPUs showed (`noise`) counts as a
stated number of observations beside the data, so that a variance from few values is neither wildly small nor useless
(Smyth 2004, "Linear models and empirical Bayes methods", eq. 3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.verdicts.noise import placement_spread, process_spread

PLACEMENT_PRIOR = 4
"""Degrees of freedom that the expected placement spread counts for: less than the 7 of eight placements."""
PROCESS_PRIOR = 8
"""Degrees of freedom that the expected process spread counts for: the processes behind each of its figures."""
PROCESS_TO_PLACEMENT = 0.5
"""Process spread over placement spread, as seen at 32 MiB (0.12 : 0.29) and 2 MiB (0.51 : 0.94): what varies a lot between
placements (a pageable copy, page faults) is not trusted to agree between processes."""
ENOUGH_PROCESSES = 3
"""Fewer say nothing about their own spread."""


@dataclass(frozen=True)
class Variance:
    """An estimated variance of a log-latency."""

    value: float
    """A share, squared."""
    freedom: float
    """Degrees of freedom behind the estimate."""

    def __add__(self, other: Variance) -> Variance:
        """Variance of a sum of independent parts; degrees of freedom by Welch and Satterthwaite."""
        value = self.value + other.value
        freedom = value**2 / (self.value**2 / self.freedom + other.value**2 / other.freedom)
        return Variance(value, freedom)

    def times(self, factor: float) -> Variance:
        return Variance(self.value * factor, self.freedom)

    def reach(self, confidence: float) -> float:
        """How far, as a log-ratio, the true value lies to one side at most with this confidence."""
        return float(stdtrit(self.freedom, confidence)) * math.sqrt(self.value)


def level(measurements: Sequence[Measurement]) -> list[float]:
    """Latencies in seconds as if all their processes had the same launch overhead: the mean of theirs.

    A latency is left as it is where an overhead is unknown, and where the correction would be no small one: more than half of it.
    """
    known = [m.overhead for m in measurements if m.overhead is not None]
    if len(known) < len(measurements):
        return [m.latency for m in measurements]
    common = statistics.fmean(known)
    put = [m.latency + common - overhead for m, overhead in zip(measurements, known, strict=True)]
    return put if all(p > m.latency / 2 for p, m in zip(put, measurements, strict=True)) else [m.latency for m in measurements]


def between_placements(measurements: Sequence[Measurement]) -> Variance:
    """Variance of one placement's median, pooled over processes of one row."""
    expected = placement_spread(statistics.fmean(m.latency for m in measurements)) ** 2
    squares, freedom = PLACEMENT_PRIOR * expected, float(PLACEMENT_PRIOR)
    for measurement in measurements:
        logs = [math.log(median) for median in measurement.medians]
        squares += statistics.pvariance(logs) * len(logs)
        freedom += len(logs) - 1
    return Variance(squares / freedom, freedom)


def between_processes(measurements: Sequence[Measurement]) -> Variance:
    """Variance of what a process adds to its placements' mean.

    From three processes on their own spread counts beside the expected one, and in full where it is the larger of the two.
    """
    placement = between_placements(measurements)
    expected = process_spread(statistics.fmean(m.latency for m in measurements), levelled=_levelled(measurements)) ** 2
    expected = max(expected, PROCESS_TO_PLACEMENT**2 * placement.value)
    count = len(measurements)
    if count < ENOUGH_PROCESSES:
        return Variance(expected, PROCESS_PRIOR)
    seen = statistics.variance(math.log(latency) for latency in level(measurements))
    # What the placements leave in a mean over them is counted with them already.
    seen = max(0.0, seen - placement.value * _one_over_placements(measurements))
    freedom = PROCESS_PRIOR + count - 1
    moderated = (PROCESS_PRIOR * expected + (count - 1) * seen) / freedom
    return Variance(max(moderated, seen), freedom)


def _levelled(measurements: Sequence[Measurement]) -> bool:
    """Whether `level` takes the launch overhead out, or a batch has left next to nothing of it in a latency."""
    return all(m.overhead is not None or m.sampler == "batched" for m in measurements)


def of_difference(measurement: Measurement, history: Sequence[Measurement]) -> Variance:
    """Variance of log(latency) minus the mean log(latency) of the history's processes."""
    count = len(history)
    new = between_placements([measurement]).times(1 / len(measurement.placements))
    old = between_placements(history).times(_one_over_placements(history) / count)
    return new + old + between_processes(history).times(1 + 1 / count)


def of_repetition(measurement: Measurement) -> Variance:
    """Variance of log(latency) if the process was run again."""
    return between_placements([measurement]).times(1 / len(measurement.placements)) + between_processes([measurement])


def _one_over_placements(measurements: Sequence[Measurement]) -> float:
    return statistics.fmean(1 / len(m.placements) for m in measurements)
