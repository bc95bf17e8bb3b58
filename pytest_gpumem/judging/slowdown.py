"""The rules of `max_regression`: the reference of a row, and how a run compares with it. Pure.

At the test's end a row fails only by a gross slow-down. The screen judges the others at the
session's end, when the changes of all rows are known. A duet decides what is open then. The rules
and their error rates: docs/explanation/judging.md. Which runs count: `baselines.references`.

Changes are log-ratios: +0.01 is 1 % slower. A limit is log(1 + `max_regression`).
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from statistics import NormalDist, fmean, median, stdev

from pytest_gpumem.judging.differences import ran_the_same
from pytest_gpumem.judging.finding import Check, against, basis
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records import FARTHEST
from pytest_gpumem.records.measurement import Measurement, quantile
from pytest_gpumem.records.row import Comparison, LimitResult
from pytest_gpumem.units import format_share, parse_margin

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
MOST_CORRECTED = 0.5
"""Largest part of a latency that a correction of the overhead takes away; choice."""

Runs = Sequence[tuple[date, Measurement]]
"""Saved runs of a row, each with its UTC date, oldest first."""


# Latencies


def corrected_logs(runs: Sequence[Measurement]) -> list[list[float]]:
    """Return the log-latencies of each run's processes, corrected to their mean launch overhead.

    As they are where an overhead is unknown, or a correction exceeds `MOST_CORRECTED` of a latency.
    """
    latencies, overheads = list[float](), list[float | None]()
    for run in runs:
        latencies.append(fmean(run.counting))
        overheads.append(run.overhead)
        for repeat in run.further:
            latencies.append(fmean(run.counting_of(repeat.medians)))
            overheads.append(repeat.overhead)
    corrected = _corrected(latencies, overheads)
    logs, begin = [], 0
    for run in runs:
        end = begin + 1 + len(run.further)
        logs.append([math.log(latency) for latency in corrected[begin:end]])
        begin = end
    return logs


def _corrected(latencies: list[float], overheads: Sequence[float | None]) -> list[float]:
    known = [overhead for overhead in overheads if overhead is not None]
    if len(known) < len(latencies):
        return latencies
    common = fmean(known)
    corrected = []
    for latency, overhead in zip(latencies, known, strict=True):
        value = latency + common - overhead
        if value <= (1 - MOST_CORRECTED) * latency:
            return latencies
        corrected.append(value)
    return corrected


# The reference, and the screen


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


# A run against its reference


@dataclass(frozen=True)
class ComparedRun:
    measurement: Measurement
    reference: Reference
    log_ratio: float  # mean of the run's log-latencies less the reference's
    same_code: bool  # the run ran the same machine code as every run of the reference

    @property
    def comparison(self) -> Comparison:
        reach = self.reference.reach(self.same_code)
        latency = fmean(corrected_logs([self.measurement])[0])
        return Comparison(
            change=math.expm1(self.log_ratio),
            reach=math.expm1(min(reach, FARTHEST)) if math.isfinite(reach) else None,
            days=self.reference.days,
            processes=self.reference.processes,
            same_code=self.same_code,
            base=math.exp(latency - self.log_ratio),
        )

    def limit(self, check: Check) -> float:
        """Return log(1 + `max_regression`). Raises `QuantityError`: it cannot be read."""
        return math.log1p(parse_margin(check.written).over(self.reference.latency))

    @property
    def text(self) -> str:
        return f"{against(self.comparison)}, {basis(self.measurement)}"


def against_reference(measurement: Measurement, runs: Runs) -> ComparedRun:
    """Compare a run with the saved runs of its reference, not empty."""
    saved = [run for _, run in runs]
    logs = corrected_logs([measurement, *saved])
    dated = []
    for (day, _), of_run in zip(runs, logs[1:], strict=True):
        dated.append((day, of_run))
    reference = Reference(dated)
    log_ratio = fmean(logs[0]) - reference.mean
    return ComparedRun(measurement, reference, log_ratio, same_code(measurement, *saved))


def same_code(measurement: Measurement, *past: Measurement) -> bool:
    """Return whether a run ran the same machine code in the same way as each past run.

    Never by the host's clock: what the host does between its calls was not watched.
    """
    records = []
    for run in (measurement, *past):
        if run.what_ran is None or run.sampler in ("host", "plain"):
            return False
        records.append(run.what_ran)
    return ran_the_same(records[0], records[1:])


def at_the_tests_end(run: ComparedRun, check: Check) -> LimitResult | None:
    """Return the FAIL of a gross slow-down; None: the session's end judges the row."""
    log_latency = run.reference.mean + run.log_ratio
    if not fails_in_plain_session(log_latency, run.limit(check), run.reference):
        return None
    why = f"more than {check.limit} + 10 % above the slowest saved process"
    return check.finding(Outcome.FAIL, f"{run.text}: {why}", Code.SLOWER)


def at_the_sessions_end(
    run: ComparedRun, check: Check, others: Sequence[float], nodeid: str
) -> LimitResult:
    """Return the screen's finding. `nodeid`: for the command that decides; empty in a gate."""
    limit = run.limit(check)
    outcome = screen(run.log_ratio, limit, run.reference, others, same_code=run.same_code)
    if outcome is Outcome.PASS:
        sure = run.reference.confidence(run.same_code) * 100
        why = f"we are {sure:g} % sure that it is not slower than the limit allows"
        return check.finding(outcome, f"{run.text}: within {check.limit}; {why}")
    code, needs = Code.NOISY, f"{check.limit} needs a duet"
    # What a reader acts on comes first.
    if run.log_ratio > limit:
        code = Code.LOOKS_SLOWER
        why = f"looks slower than {check.limit} allows"
    elif run.reference.processes < 2:
        code = Code.TOO_FEW_RUNS
        why = f"a single process shows no noise (--gpumem-processes 3 saves more): {needs}"
    elif others and abs(median(others)) > SHIFT:
        shift = format_share(math.expm1(median(others)), sign=True)
        why = f"the other rows changed by {shift} (median), as on another GPU: {needs}"
    elif run.log_ratio < -limit:
        why = f"{needs}, as a gain beyond it would hide a later loss"
    else:
        why = f"{needs}, as noise may hide {format_share(run.comparison.reach or 0.0)}"
    if nodeid:
        why += f": gpumem duet BASE --test {shlex.quote(nodeid)} decides"
    return check.finding(outcome, f"{run.text}: {why}", code)
