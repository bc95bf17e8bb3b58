"""How far a latency would lie from itself if nothing changed: variances of its logarithm, with degrees of freedom.

Three sources. *Placement*: where buffers land; seen inside a process, averaged over its placements. *Process*: everything that stays
the same inside a process; seen only across processes. *Session*: what stays the same for all processes of an hour on one card; seen only
across sessions. Each estimate is moderated: what real GPUs showed (`noise`) counts as a stated number of observations beside the data,
so that a variance from few values is neither wildly small nor useless (Smyth 2004, "Linear models and empirical Bayes methods", eq. 3).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

from pytest_gpumem.verdicts.noise import placement_spread, process_spread, session_spread
from pytest_gpumem.verdicts.reading import Known, sessions

PLACEMENT_PRIOR = 4
"""Degrees of freedom that the expected placement spread counts for: less than the 7 of eight placements."""
PROCESS_PRIOR = 8
"""Degrees of freedom that the expected process spread counts for: less than the 29 of the processes behind each of its figures, because
they are of one kind of GPU and one kernel."""
SESSION_PRIOR = 6
"""Degrees of freedom that the expected session spread counts for: three sessions at two sizes on H200, and H100 cards that agreed."""
PROCESS_TO_PLACEMENT = 0.5
"""Process spread over placement spread, as seen at 32 MiB (0.12 : 0.29) and 2 MiB (0.51 : 0.94): what varies a lot between
placements (a pageable copy, page faults) is not trusted to agree between processes."""
SESSION_TO_PROCESS = 0.5
"""Session spread over process spread, as seen at 32 MiB (0.07 : 0.12) and 2 MiB (0.25 : 0.51): what varies a lot between processes is not
trusted to agree between sessions."""
ENOUGH_PROCESSES = 3
"""Fewer say nothing about their own spread."""
ENOUGH_SESSIONS = 3
"""Fewer are not taken at their word where they show more than is expected."""


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
        if value == 0:
            return Variance(0.0, self.freedom + other.freedom)
        freedom = value**2 / (self.value**2 / self.freedom + other.value**2 / other.freedom)
        return Variance(value, freedom)

    def times(self, factor: float) -> Variance:
        return Variance(self.value * factor, self.freedom)

    def reach(self, confidence: float) -> float:
        """How far, as a log-ratio, the true value lies to one side at most with this confidence."""
        return float(stdtrit(self.freedom, confidence)) * math.sqrt(self.value)

    def chance(self, difference: float) -> float:
        """Probability of a log-ratio of at least `difference` where the true one is 0 (Student's t, one-sided)."""
        if self.value == 0:
            return 0.0 if difference > 0 else 1.0
        return float(stdtr(self.freedom, -difference / math.sqrt(self.value)))


def level(measurements: Sequence[Known]) -> list[float]:
    """Latencies in seconds as if all their processes had the same launch overhead: the mean of theirs.

    A latency is left as it is where an overhead is unknown, and where the correction would be no small one: more than half of it.
    """
    latencies = [m.latency for m in measurements]
    known = [m.overhead for m in measurements if m.overhead is not None]
    if len(known) < len(measurements):
        return latencies
    common = statistics.fmean(known)
    put = [latency + common - overhead for latency, overhead in zip(latencies, known, strict=True)]
    return put if all(p > latency / 2 for p, latency in zip(put, latencies, strict=True)) else latencies


def between_placements(measurements: Sequence[Known]) -> Variance:
    """Variance of one placement's median, pooled over processes of one row."""
    expected = placement_spread(statistics.fmean(m.latency for m in measurements)) ** 2
    squares, freedom = PLACEMENT_PRIOR * expected, float(PLACEMENT_PRIOR)
    for measurement in measurements:
        medians = measurement.medians
        squares += _squares([math.log(median) for median in medians])
        freedom += len(medians) - 1
    return Variance(squares / freedom, freedom)


def between_processes(measurements: Sequence[Known]) -> Variance:
    """Variance of what a process adds to its placements' mean, within one session.

    From three processes on their own spread counts beside the expected one, and in full where it is the larger of the two.
    """
    return _processes(measurements, between_placements(measurements))


def _processes(measurements: Sequence[Known], placement: Variance) -> Variance:
    expected = process_spread(statistics.fmean(m.latency for m in measurements), levelled=_levelled(measurements)) ** 2
    expected = max(expected, PROCESS_TO_PLACEMENT**2 * placement.value)
    groups = _by_session(level(measurements), sessions(measurements))
    within = len(measurements) - len(groups)
    if within < ENOUGH_PROCESSES - 1:
        return Variance(expected, PROCESS_PRIOR)
    seen = sum(map(_squares, groups)) / within
    # What the placements leave in a mean over them is counted with them already.
    seen = max(0.0, seen - placement.value * _one_over_placements(measurements))
    if not _expected_holds(measurements):
        return Variance(max(expected, seen), within)
    freedom = PROCESS_PRIOR + within
    moderated = (PROCESS_PRIOR * expected + within * seen) / freedom
    return Variance(max(moderated, seen), freedom)


def _expected_holds(measurements: Sequence[Known]) -> bool:
    """Whether what is expected of processes says anything of these: it is that of device-timed kernels over several placements.

    What is timed by the host's clock on one placement, as in files of stock pytest-benchmark, differs by what it shows itself, and
    by no less than such kernels.
    """
    return any(m.sampler != "host" or len(m.medians) > 1 for m in measurements)


def between_sessions(measurements: Sequence[Known]) -> Variance:
    """Variance of what a session adds to its processes' mean.

    From two sessions on their own spread counts beside the expected one, from three on in full where it is the larger of the two.
    """
    placement = between_placements(measurements)
    return _sessions(measurements, placement, _processes(measurements, placement))


def _sessions(measurements: Sequence[Known], placement: Variance, process: Variance) -> Variance:
    expected = session_spread(statistics.fmean(m.latency for m in measurements)) ** 2
    expected = max(expected, SESSION_TO_PROCESS**2 * process.value)
    groups = _by_session(level(measurements), sessions(measurements))
    if len(groups) < 2:
        return Variance(expected, SESSION_PRIOR)
    seen = _squares([statistics.fmean(group) for group in groups]) / (len(groups) - 1)
    left = process.value + placement.value * _one_over_placements(measurements)
    seen = max(0.0, seen - left * statistics.fmean(1 / len(group) for group in groups))
    freedom = SESSION_PRIOR + len(groups) - 1
    moderated = (SESSION_PRIOR * expected + (len(groups) - 1) * seen) / freedom
    return Variance(max(moderated, seen) if len(groups) >= ENOUGH_SESSIONS else moderated, freedom)


def _by_session(latencies: Sequence[float], labels: Sequence[Hashable]) -> list[list[float]]:
    """Logarithms of latencies, those of one session together."""
    groups: dict[Hashable, list[float]] = {}
    for latency, label in zip(latencies, labels, strict=True):
        groups.setdefault(label, []).append(math.log(latency))
    return list(groups.values())


def _squares(values: Sequence[float]) -> float:
    """Sum of the squared distances from the mean. Not `statistics.pvariance`, whose exact fractions take a hundred times as long."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _levelled(measurements: Sequence[Known]) -> bool:
    """Whether `level` takes the launch overhead out, or a batch has left next to nothing of it in a latency."""
    return all(m.overhead is not None or m.sampler == "batched" for m in measurements)


def of_difference(now: Known | Sequence[Known], history: Sequence[Known]) -> Variance:
    """Variance of the mean log(latency) of this run's processes minus that of the history's.

    With a new session it is session^2 (1 + 1/S) + process^2 (1/M + 1/K) + what the placements leave: M processes of this run, K of the
    history in S sessions of equal size. A session that the history already has differs from it by less.
    """
    run = list(now) if isinstance(now, Sequence) else [now]
    count = len(history)
    new = between_placements(run).times(_one_over_placements(run) / len(run))
    placement = between_placements(history)
    old = placement.times(_one_over_placements(history) / count)
    # Worked out once: a suite asks for hundreds of them.
    process = _processes(history, placement)
    if count < ENOUGH_PROCESSES <= len(run):
        # A baseline that says nothing of how processes differ is no reason to overlook what this run's own say.
        process = max(process, _processes(run, between_placements(run)), key=lambda variance: variance.value)
    session = _sessions(history, placement, process)
    return new + old + process.times(1 / len(run) + 1 / count) + session.times(_sessions_apart(run, history))


def _sessions_apart(run: Sequence[Known], history: Sequence[Known]) -> float:
    """Sum of the squared weights that sessions have in the difference of the two means."""
    labels = sessions([*run, *history])
    ours, theirs = Counter(labels[: len(run)]), Counter(labels[len(run) :])
    # Who does not know its session is not taken for a member of the history's.
    unknown = (ours.pop(None, 0) / len(run)) ** 2 + (theirs.pop(None, 0) / len(history)) ** 2
    return unknown + sum((ours[one] / len(run) - theirs[one] / len(history)) ** 2 for one in {*ours, *theirs})


def of_repetition(measurement: Known) -> Variance:
    """Variance of log(latency) if the process was run again, in this session or another."""
    placement = between_placements([measurement])
    process = _processes([measurement], placement)
    return placement.times(1 / len(measurement.medians)) + process + _sessions([measurement], placement, process)


def _one_over_placements(measurements: Sequence[Known]) -> float:
    return statistics.fmean(1 / len(m.medians) for m in measurements)
