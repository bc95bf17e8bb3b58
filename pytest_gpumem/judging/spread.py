"""The spread between runs of the same code (docs/explanation/judging.md).

A process has one figure: the logarithm of its latency, corrected for launch overhead. A run has the mean over its processes. Runs differ
by session (an hour, a card); processes of a run differ by process and by buffer placement.

Every variance is moderated: the prior counts as `PRIOR` observations beside the row's own (Smyth 2004, "Linear models and empirical Bayes
methods", eq. 3). With enough observations the row's own variance counts in full if it is larger. With n runs of m processes in S sessions,

    w  = variance between processes of a run
    s2 = variance between runs, prior session2 + w/m
    SE2 = v(M) + s2/S,    v(M) = session2 + w/M + the excess of s2 over its prior

for a run of M processes, with PRIOR + n - 1 degrees of freedom. Runs of one session count as one in s2/S, because they share its offset;
if this run belongs to that session too, each counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import NamedTuple

from pytest_gpumem.judging import student
from pytest_gpumem.records.measurement import Measurement, Provenance
from pytest_gpumem.records.record import LEAST_TIME, LONGEST_TIME
from pytest_gpumem.records.row import ENOUGH

# Latency in seconds (kernels of 2, 32 and 256 MiB), and the measured standard deviation of its logarithm.
_BETWEEN_PROCESSES = ((5.4e-6, 0.0051), (24.8e-6, 0.0012), (183e-6, 0.00037))
# At 183 us the processes differ no more than their placements explain: the whole spread is an upper bound.
_BETWEEN_PLACEMENTS = ((5.4e-6, 0.0094), (24.8e-6, 0.0029), (183e-6, 0.0016))
# At 5.4 and 24.8 us: means of 30 to 60 processes on two cards and at two times on one of them (peers.json, peers_random.json,
# unrelated_allocation.json), less the part of their processes. At 183 us one session is recorded;
# the spread of its processes stands for that of sessions.
_BETWEEN_SESSIONS = ((5.4e-6, 0.0025), (24.8e-6, 0.0007), (183e-6, 0.0004))

LAUNCH_OVERHEAD = 60e-9
"""Standard deviation of the launch overhead between processes, in seconds (ci/records/nvidia-h200/reading_noise.json)."""


def process_spread(latency: float, *, overhead_corrected: bool = True) -> float:
    """Expected spread of a latency between processes of one session, without that of their placements, as a share of the latency.

    `latency`: seconds, above 0. Between the measured points a straight line in logarithms; above, constant; below, a constant time.
    `overhead_corrected`: the launch overhead is known and subtracted, or a batch of launches shares it.
    """
    spread = _interpolated(_BETWEEN_PROCESSES, latency)
    return spread if overhead_corrected else math.hypot(spread, LAUNCH_OVERHEAD / latency)


def placement_spread(latency: float) -> float:
    """Expected spread between buffer placements of one process, as a share of the latency."""
    return _interpolated(_BETWEEN_PLACEMENTS, latency)


def session_spread(latency: float) -> float:
    """Expected spread between sessions (another hour, another card of the same kind), as a share of the latency."""
    return _interpolated(_BETWEEN_SESSIONS, latency)


def _interpolated(points: tuple[tuple[float, float], ...], latency: float) -> float:
    if latency <= points[0][0]:
        return points[0][1] * points[0][0] / latency
    for (left, high), (right, low) in itertools.pairwise(points):
        if latency <= right:
            position = math.log(latency / left) / math.log(right / left)
            return math.exp(math.log(high) + position * (math.log(low) - math.log(high)))
    return points[-1][1]


PRIOR = 6  # degrees of freedom of the priors: the variances of recorded rows scatter around them as those of 4 to 13 observations do
PLACEMENT_PRIOR = 4  # degrees of freedom of the prior between placements: less than the 7 of eight placements
SESSION_SECONDS = 3600.0  # processes on one card belong to one session if they start within this time of its first one

FARTHEST = math.log(LONGEST_TIME / LEAST_TIME) + 1  # log-ratio that no two times have; exponentials of larger ones overflow


@dataclass(frozen=True)
class Variance:
    """An estimated variance of a log-latency."""

    value: float  # a share, squared
    freedom: float  # degrees of freedom of the estimate

    def __add__(self, other: Variance) -> Variance:
        """Variance of a sum of independent parts; degrees of freedom by Welch and Satterthwaite."""
        value = self.value + other.value
        if value == 0:
            return Variance(0.0, self.freedom + other.freedom)
        return Variance(value, value**2 / (self.value**2 / self.freedom + other.value**2 / other.freedom))

    def reach(self, confidence: float) -> float:
        """Largest one-sided distance with this confidence, as a log-ratio; `FARTHEST` at most."""
        return min(student.quantile(confidence, self.freedom) * math.sqrt(self.value), FARTHEST)

    def chance(self, distance: float) -> float:
        """Probability of a log-ratio of at least `distance` where the true one is 0 (Student's t, one-sided)."""
        if self.value == 0:
            return 0.0 if distance > 0 else 1.0
        return student.tail(distance / math.sqrt(self.value), self.freedom)


class Reading(NamedTuple):
    """One process's measurement."""

    latency: float  # seconds: the mean of the medians
    medians: tuple[float, ...]  # seconds: one for each placement that counts
    overhead: float | None  # seconds of launch overhead in `latency`; None if unknown
    sampler: str  # how samples were taken
    provenance: Provenance | None  # when and on which card


def readings(measurement: Measurement) -> list[Reading]:
    """One reading a process of a run; the first process comes first."""
    first = (measurement.counting, measurement.overhead)
    every = [first, *((measurement.counting_of(repeat.medians), repeat.overhead) for repeat in measurement.further)]
    return [Reading(statistics.fmean(medians), medians, over, measurement.sampler, measurement.provenance) for medians, over in every]


def corrected_latencies(known: Sequence[Reading]) -> list[float]:
    """Latencies in seconds, corrected to the mean launch overhead of all of them. Latencies stay as they are if an overhead is unknown or a
    correction exceeds half of a latency."""
    latencies = [one.latency for one in known]
    overheads = [one.overhead for one in known if one.overhead is not None]
    if len(overheads) < len(known):
        return latencies
    common = statistics.fmean(overheads)
    corrected = [latency + common - overhead for latency, overhead in zip(latencies, overheads, strict=True)]
    return corrected if all(c > latency / 2 for c, latency in zip(corrected, latencies, strict=True)) else latencies


def corrected_logs(runs: Sequence[Sequence[Reading]]) -> list[list[float]]:
    """Logarithms of the latencies of each run's processes, all corrected to one launch overhead (`corrected_latencies`)."""
    corrected = iter(corrected_latencies([reading for run in runs for reading in run]))
    return [[math.log(next(corrected)) for _ in run] for run in runs]


@dataclass(frozen=True)
class Difference:
    """A run less its baseline, on a logarithmic scale."""

    log: float  # mean log(latency) of the run less that of the baseline's runs
    session: float  # prior variance between sessions, plus the excess of the runs' variance over its prior
    process: float  # variance between processes of a run
    base: float  # variance of the mean over the baseline's runs
    freedom: float  # degrees of freedom of all of them
    runs: int  # runs of the baseline
    processes: int  # processes of the baseline
    measured: int  # processes of the run
    has_prior: bool  # True if the prior of device-timed kernels applies, so that few runs suffice

    def variance(self, measured: int | None = None) -> Variance:
        """Variance of `log` for unchanged code and a run of this many processes; default: as many as it has."""
        return Variance(self.session + self.process / (measured or self.measured) + self.base, self.freedom)


def difference(now: Measurement, history: Sequence[Measurement]) -> Difference:
    """A run less its baseline of one or more runs.
    `now`: this run, with its further processes.
    `history`: one measurement for each run.
    """
    runs = [readings(one) for one in (now, *history)]
    logs = corrected_logs(runs)
    means = [statistics.fmean(values) for values in logs]
    prior = _prior_applies(runs)
    weight = 0 if not prior and len(history) >= ENOUGH else PRIOR
    own, base = _processes(runs[:1], logs[:1], weight), _processes(runs[1:], logs[1:], weight)
    process = max(own.value, base.value)
    # A baseline of single processes does not show the spread of processes; this run's own processes do.
    session = (base if base.freedom else max(own, base)).session
    per_run = statistics.fmean(1 / len(run) for run in runs[1:])
    expected = session + base.value * per_run
    between = moderated(expected, squares_around_mean(means[1:]), len(history) - 1, weight)
    own_session, *others = sessions([run[0] for run in runs])
    independent = len(others) if own_session is not None and set(others) == {own_session} else len(set(others))
    return Difference(
        log=means[0] - statistics.fmean(means[1:]),
        session=session + max(0.0, between - expected),
        process=process,
        base=between / independent,
        freedom=weight + len(history) - 1,
        runs=len(history),
        processes=sum(map(len, runs[1:])),
        measured=len(runs[0]),
        has_prior=prior,
    )


def of_repetition(measurement: Measurement) -> Variance:
    """Variance of log(latency) of one process in another session: `Measurement.latency` is of one too, whatever further ones there are."""
    run = readings(measurement)
    process = _processes([run], corrected_logs([run]), PRIOR)
    return Variance(process.session + process.value, PRIOR)


class _Processes(NamedTuple):
    session: float  # prior variance between sessions
    value: float  # variance between processes of a run
    freedom: int  # degrees of freedom of the row's own processes


def _processes(runs: Sequence[Sequence[Reading]], logs: Sequence[Sequence[float]], weight: int) -> _Processes:
    """The variance between processes of a run, and the prior between sessions."""
    every = [reading for run in runs for reading in run]
    latency = statistics.fmean(reading.latency for reading in every)
    class_placement = placement_spread(latency) ** 2
    squares = sum(squares_around_mean([math.log(median) for median in reading.medians]) for reading in every)
    freedom = sum(len(reading.medians) - 1 for reading in every)
    placement = (PLACEMENT_PRIOR * class_placement + squares) / (PLACEMENT_PRIOR + freedom)
    # A row that varies more between placements than its class is expected to vary more between processes and sessions too.
    noisier = max(1.0, placement / class_placement)
    of_placements = placement * statistics.fmean(1 / len(reading.medians) for reading in every)
    known = all(reading.overhead is not None or reading.sampler in ("graph", "batched") for reading in every)
    expected = process_spread(latency, overhead_corrected=known) ** 2 * noisier + of_placements
    within = sum(len(run) - 1 for run in runs)
    value = moderated(expected, sum(map(squares_around_mean, logs)), within, weight or PRIOR)
    return _Processes(session_spread(latency) ** 2 * max(1.0, value / expected), value, within)


def moderated(prior: float, squares: float, freedom: int, weight: int) -> float:
    """A variance from its prior, which counts as `weight` observations, and a sum of squares with `freedom` degrees of freedom."""
    if freedom == 0:
        return prior
    value = (weight * prior + squares) / (weight + freedom)
    return max(value, squares / freedom) if freedom >= ENOUGH - 1 else value


def _prior_applies(runs: Sequence[Sequence[Reading]]) -> bool:
    """Host-timed, single-placement rows, such as those of stock pytest-benchmark, get no prior."""
    return any(reading.sampler != "host" or len(reading.medians) > 1 for run in runs for reading in run)


def squares_around_mean(values: Sequence[float]) -> float:
    """Sum of the squared distances from the mean. `statistics.pvariance`, with exact fractions, takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def sessions(known: Sequence[Reading]) -> list[Hashable]:
    """The session of each reading: card and start of its first process; None for a reading without them."""
    found: list[Hashable] = [None] * len(known)
    by_card: dict[str | None, list[tuple[float, int]]] = {}
    for index, one in enumerate(known):
        if one.provenance is not None and (began := _seconds(one.provenance.utc)) is not None:
            by_card.setdefault(one.provenance.card, []).append((began, index))
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
