"""The reference of a row, and the screen that compares a process with it.

The rules and their error rates: docs/explanation/judging.md. Which runs count: `baselines.history`.

Changes are log-ratios: +0.01 is 1 % slower. A limit is log(1 + `max_regression`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from statistics import NormalDist, fmean, median, stdev

from pytest_gpumem.judging.spread import quantile
from pytest_gpumem.outcomes import Outcome

DAYS = 12
"""Dates that a reference takes; with 6, fewer unchanged rows of 32 MiB pass the screen."""
PROCESS_NOISE = 27.5e-9
"""Least standard deviation between processes, in seconds; recorded on an H200, 2026-11-21."""
DAY_NOISE = 0.003
"""Least noise of a reference of a day, as a share; it falls with the square root of the days."""
OUTLIER = 5.0
"""Standard deviations between a process and the others from which on it does not count."""
ENOUGH_TO_LEAVE_OUT = 6
"""Processes from which on an outlier is left out."""
PASSES = 0.995
"""Confidence of a PASS of the screen, and of the last look of a duet."""
SAME_CODE = 0.95
"""Confidence of a PASS of the screen where the same code ran."""
SAME_CODE_ONE_DAY = 0.90
"""The same, with a reference of a single day and by the normal distribution."""
SHIFT = 0.005
"""Median change of the other rows from which on the screen passes nothing."""
PLAIN = 0.10
"""Slow-down beyond the limit that fails in a plain session, over the slowest saved process."""
SUCCESSIVE = 3
"""Successive saved days that begin a reference anew if each is faster by more than the limit."""


class Reference:
    """The saved processes of a row and an identity: those of its first `DAYS` UTC dates.

    `runs`: the date of each saved run, and the log-latencies of its processes.
    """

    def __init__(self, runs: Sequence[tuple[date, Sequence[float]]]) -> None:
        dates = sorted({day for day, _ in runs})[:DAYS]
        logs = list[float]()
        for day, of_run in runs:
            if day in dates:
                logs += of_run
        self.slowest = max(logs)
        logs = _without_outlier(logs)
        self.mean = fmean(logs)
        self.days = len(dates)
        self.processes = len(logs)
        self.noise = math.hypot(
            PROCESS_NOISE / math.exp(self.mean), DAY_NOISE / math.sqrt(self.days)
        )
        if self.processes > 1:
            self.noise = max(self.noise, stdev(logs))

    @property
    def latency(self) -> float:
        """The geometric mean of its processes."""
        return math.exp(self.mean)

    def confidence(self, same_code: bool) -> float:
        """Return how sure a PASS is that the row is not slower by its limit."""
        if not same_code:
            return PASSES
        return SAME_CODE_ONE_DAY if self.days == 1 else SAME_CODE

    def reach(self, same_code: bool) -> float:
        """Return what noise may hide of a change, as a log-ratio; infinite for a single process."""
        if self.processes < 2:
            return math.inf
        confidence = self.confidence(same_code)
        if same_code and self.days == 1:
            factor = NormalDist().inv_cdf(confidence)
        else:
            factor = quantile(confidence, self.processes - 1)
        return factor * self.noise * math.sqrt(1 + 1 / self.days)


def _without_outlier(logs: list[float]) -> list[float]:
    """Return the processes without the farthest, if the others say that it does not belong."""
    if len(logs) < ENOUGH_TO_LEAVE_OUT:
        return logs
    middle = median(logs)
    farthest = max(logs, key=lambda value: abs(value - middle))
    others = list(logs)
    others.remove(farthest)
    outlies = abs(farthest - fmean(others)) > OUTLIER * stdev(others)
    return others if outlies else logs


def screen(
    change: float, limit: float, reference: Reference, others: Sequence[float], *, same_code: bool
) -> Outcome:
    """Compare a process with its reference at the end of a session: PASS or UNDECIDED.

    `change`: log(latency) less the reference's mean. `others`: changes of all other rows.
    """
    if others and abs(median(others)) > SHIFT:
        return Outcome.UNDECIDED  # another card, or everything changed
    if change < -limit:
        return Outcome.UNDECIDED  # a gain would hide a later loss
    if change + reference.reach(same_code) < limit:
        return Outcome.PASS
    return Outcome.UNDECIDED


def fails_in_plain_session(log_latency: float, limit: float, reference: Reference) -> bool:
    return log_latency > reference.slowest + limit + math.log1p(PLAIN)


def gains_restart(reference: Reference, newest: Sequence[float], limit: float) -> bool:
    """Return whether saved days begin the reference anew. `newest`: their mean log-latencies."""
    return len(newest) == SUCCESSIVE and max(newest) < reference.mean - limit
