"""The spread between runs of the same code (docs/explanation/judging.md).

A process has one figure: the logarithm of its latency, corrected for launch overhead. Processes of one day and card share an offset, and
differ by w2. A change is the mean of this run's M processes less the mean of the n day means of the baseline, with

    SE2 = day2 + w2/M + s2/n

- s2 is the variance between day means, by differences of successive ones (von Neumann 1941), which a creep hardly changes;
- day2 is the part of s2 that is not of processes;
- both have a prior of `PRIOR` observations (Smyth 2004, "Linear models and empirical Bayes methods", eq. 3). With enough observations, a
  larger variance of the row itself counts in full.

A baseline of few days does not tell how the row differs between them: day is `UNSEEN` / (days - 1) at least. If the whole baseline is of
this run's own day and card, its runs take the place of days.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import NamedTuple

from pytest_gpumem.judging import student
from pytest_gpumem.records.measurement import Measurement, Provenance
from pytest_gpumem.records.record import LEAST_TIME, LONGEST_TIME
from pytest_gpumem.records.row import ENOUGH

# Standard deviations of a latency: a time in seconds and a share of it.
BETWEEN_PROCESSES = (27.5e-9, 0.0004)
"""Spread between processes, in seconds and as a share; recorded on an H200, 2026-11-21: 0.51 % at 2 MiB (5.4 us),
0.12 % at 32 MiB and 0.037 % at 256 MiB. Twelve processes of an H200 (ci/records/nvidia-h200/peers_nvbench.json) and of an H100 show it,
and the spread between placements, within a factor of two."""
BETWEEN_PLACEMENTS = (50e-9, 0.0017)
"""Spread between placements, in seconds and as a share; recorded at the same time: 0.94, 0.29 and 0.16 %."""
BETWEEN_DAYS = (13.5e-9, BETWEEN_PROCESSES[1])
"""Spread between days and between cards, in seconds and as a share; recorded on H200s, 2026-11-21: 0.25 and 0.07 %
at 2 and 32 MiB; one session alone at 256 MiB."""
LAUNCH_OVERHEAD = 60e-9
"""Spread of the launch overhead between processes, in seconds; recorded on an H200, 2026-11-21."""


def process_spread(latency: float, *, overhead_corrected: bool = True) -> float:
    """Expected spread of a latency between processes of one day, without that of their placements, as a share of the latency.

    `latency`: seconds, above 0.
    `overhead_corrected`: the launch overhead is known and subtracted, or a batch of launches shares it.
    """
    spread = _share(BETWEEN_PROCESSES, latency)
    return spread if overhead_corrected else math.hypot(spread, LAUNCH_OVERHEAD / latency)


def placement_spread(latency: float) -> float:
    """Expected spread between buffer placements of one process, as a share of the latency."""
    return _share(BETWEEN_PLACEMENTS, latency)


def day_spread(latency: float) -> float:
    """Expected spread between days, and between cards of one kind, as a share of the latency."""
    return _share(BETWEEN_DAYS, latency)


def _share(spread: tuple[float, float], latency: float) -> float:
    time, share = spread
    return math.hypot(time / latency, share)


PRIOR = 6  # observations that a prior counts as; recorded: variances of rows scatter around it as those of 4 to 13 observations
UNSEEN = 0.0035  # least spread between days, times one less than their number; assumed: twice that of two H100s at 32 MiB
DAY = timedelta(
    hours=8
)  # least time from the first run of a day to the first of the next date; choice: a night's runs are of one day
WIDEST = 0.5  # largest part of a latency that is in doubt, by half its 95 % interval over placements or by overhead; choice

FARTHEST = math.log(LONGEST_TIME / LEAST_TIME) + 1
"""Log-ratio that no two times have; exponentials of larger ones overflow."""


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
        return Variance(
            value, value**2 / (self.value**2 / self.freedom + other.value**2 / other.freedom)
        )

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
    every = [
        first,
        *(
            (measurement.counting_of(repeat.medians), repeat.overhead)
            for repeat in measurement.further
        ),
    ]
    return [
        Reading(
            statistics.fmean(medians), medians, over, measurement.sampler, measurement.provenance
        )
        for medians, over in every
    ]


def corrected_latencies(known: Sequence[Reading]) -> list[float]:
    """Latencies in seconds, corrected to the mean launch overhead of all of them. Latencies stay as they are if an overhead is unknown or a
    correction exceeds `WIDEST` of a latency."""
    latencies = [one.latency for one in known]
    overheads = [one.overhead for one in known if one.overhead is not None]
    if len(overheads) < len(known):
        return latencies
    common = statistics.fmean(overheads)
    corrected = [
        latency + common - overhead for latency, overhead in zip(latencies, overheads, strict=True)
    ]
    return (
        corrected
        if all(c > (1 - WIDEST) * latency for c, latency in zip(corrected, latencies, strict=True))
        else latencies
    )


def corrected_logs(runs: Sequence[Sequence[Reading]]) -> list[list[float]]:
    """Logarithms of the latencies of each run's processes, all corrected to one launch overhead (`corrected_latencies`)."""
    corrected = iter(corrected_latencies([reading for run in runs for reading in run]))
    return [[math.log(next(corrected)) for _ in run] for run in runs]


@dataclass(frozen=True)
class Difference:
    """A run less its baseline, on a logarithmic scale."""

    log: float  # mean log(latency) of the run less that of the baseline's days
    day: float  # variance between days
    process: float  # variance between processes of a day
    base: float  # variance of the mean over the baseline's days
    unseen: float  # further variance of both, where days are too few
    steady: float  # as `day`, without the largest step between two days: a step that entered the baseline is no noise
    freedom: float  # degrees of freedom of all of them
    days: int  # days of the baseline
    runs: int  # its runs
    processes: int  # its processes
    measured: int  # processes of the run
    has_prior: bool  # True if the prior of device-timed kernels applies, so that few runs suffice

    def variance(self, *, seen: bool = False) -> Variance:
        """Variance of `log` for unchanged code. `seen`: without `unseen`."""
        value = self.day + self.process / self.measured + self.base
        return Variance(value if seen else value + self.unseen, self.freedom)


def difference(now: Measurement, history: Sequence[Measurement]) -> Difference:
    """A run less its baseline of one or more runs.
    `now`: this run, with its further processes.
    `history`: one measurement for each run, oldest first.
    """
    runs = [readings(one) for one in (now, *history)]
    logs = corrected_logs(runs)
    prior = _prior_applies(runs)
    weight = 0 if not prior and len(history) >= ENOUGH else PRIOR
    own_day, *others = days([run[0] for run in runs])
    one_day = own_day is not None and set(others) == {own_day}
    by_day: dict[Hashable, list[int]] = {}
    for index, other in enumerate(others, 1):
        by_day.setdefault(index if one_day or other is None else other, []).append(index)
    of_days = [[log for index in each for log in logs[index]] for each in by_day.values()]
    process, prior_day = max(
        _between_processes(runs[:1], logs[:1], weight),
        _between_processes(runs[1:], of_days, weight),
    )
    means = [statistics.fmean(values) for values in of_days]
    of_processes = process * statistics.fmean(1 / len(values) for values in of_days)
    steps = sorted((later - earlier) ** 2 / 2 for earlier, later in itertools.pairwise(means))
    spread = moderated(prior_day + of_processes, math.fsum(steps), len(steps), weight)
    steady = moderated(
        prior_day + of_processes, math.fsum(steps[:-1]), max(len(steps) - 1, 0), weight
    )
    day = max(prior_day, spread - of_processes)
    known = {one[1] for one in others if one is not None}
    return Difference(
        log=statistics.fmean(logs[0]) - statistics.fmean(means),
        day=day,
        process=process,
        base=spread / len(means),
        unseen=0.0
        if one_day
        else max(0.0, (UNSEEN / max(len(known) - 1, 1)) ** 2 - day) * (1 + 1 / max(len(known), 1)),
        steady=max(prior_day, steady - of_processes),
        freedom=weight + _successive(len(steps)),
        days=max(len(known), 1),
        runs=len(history),
        processes=sum(map(len, runs[1:])),
        measured=len(runs[0]),
        has_prior=prior,
    )


def _successive(steps: int) -> float:
    """Degrees of freedom of a variance by so many differences of successive values: neighbouring ones share a value."""
    return 2 * steps**2 / (3 * steps - 1) if steps else 0.0


def since(
    found: Difference, newest: Sequence[Measurement], first: Sequence[Measurement]
) -> Difference:
    """The newest runs less the first ones, with the spread of the whole baseline.
    `found`: this run less its baseline.
    `newest`: this run and those before it.
    `first`: the first saved runs.
    """
    runs = [readings(one) for one in (*newest, *first)]
    means = [statistics.fmean(values) for values in corrected_logs(runs)]
    count = len(newest)

    def variance(of: Sequence[Sequence[Reading]]) -> float:
        independent = len(
            {
                index if day is None else day
                for index, day in enumerate(days([run[0] for run in of]))
            }
        )
        return (
            found.steady / independent
            + found.process * math.fsum(1 / len(run) for run in of) / len(of) ** 2
        )

    return replace(
        found,
        log=statistics.fmean(means[:count]) - statistics.fmean(means[count:]),
        day=0.0,
        process=0.0,
        base=variance(runs[:count]) + variance(runs[count:]),
        measured=sum(map(len, runs[:count])),
    )


def of_repetition(measurement: Measurement) -> Variance:
    """Variance of log(latency) of one process on another day: `Measurement.latency` is of one too, whatever further ones there are."""
    run = readings(measurement)
    process, day = _between_processes([run], corrected_logs([run]), PRIOR)
    return Variance(day + process, PRIOR)


def _between_processes(
    runs: Sequence[Sequence[Reading]], logs: Sequence[Sequence[float]], weight: int
) -> tuple[float, float]:
    """The variance between processes of a day, and the prior between days. `logs`: by day."""
    every = [reading for run in runs for reading in run]
    latency = statistics.fmean(reading.latency for reading in every)
    known = all(
        reading.overhead is not None or reading.sampler in ("graph", "batched") for reading in every
    )
    squares = sum(
        squares_around_mean([math.log(median) for median in reading.medians]) for reading in every
    )
    placement = moderated(
        placement_spread(latency) ** 2,
        squares,
        sum(len(reading.medians) - 1 for reading in every),
        PRIOR,
    )
    of_placements = placement * statistics.fmean(1 / len(reading.medians) for reading in every)
    expected = process_spread(latency, overhead_corrected=known) ** 2 + of_placements
    value = moderated(
        expected,
        sum(map(squares_around_mean, logs)),
        sum(len(day) - 1 for day in logs),
        weight or PRIOR,
    )
    # A row whose processes differ more than those of its class is expected to differ more between days too.
    return value, day_spread(latency) ** 2 * max(1.0, value / expected)


def moderated(prior: float, squares: float, freedom: int, weight: int) -> float:
    """A variance from its prior, which counts as `weight` observations, and a sum of squares with `freedom` degrees of freedom."""
    if freedom == 0:
        return prior
    value = (weight * prior + squares) / (weight + freedom)
    return max(value, squares / freedom) if freedom >= ENOUGH - 1 else value


def _prior_applies(runs: Sequence[Sequence[Reading]]) -> bool:
    """Host-timed, single-placement rows, such as those of stock pytest-benchmark, get no prior."""
    return any(
        reading.sampler != "host" or len(reading.medians) > 1 for run in runs for reading in run
    )


def squares_around_mean(values: Sequence[float]) -> float:
    """Sum of the squared distances from the mean. `statistics.pvariance`, with exact fractions, takes a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def days(known: Sequence[Reading]) -> list[tuple[str | None, datetime] | None]:
    """The card and day of each reading, where a day is its first reading; None for one without them.
    Another day is another UTC date, `DAY` or more after the first reading of the day before."""
    found: list[tuple[str | None, datetime] | None] = [None] * len(known)
    begun = [
        (moment, index)
        for index, one in enumerate(known)
        if one.provenance is not None and (moment := _moment(one.provenance.utc))
    ]
    first: datetime | None = None
    for moment, index in sorted(begun):
        if first is None or (moment.date() != first.date() and moment - first >= DAY):
            first = moment
        provenance = known[index].provenance
        found[index] = (provenance.card if provenance is not None else None, first)
    return found


def _moment(utc: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(utc.replace("Z", "+00:00"))
    except ValueError:
        return None
    return moment.astimezone(timezone.utc) if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
