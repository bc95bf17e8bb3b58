"""The rules of `max_regression`: a measurement against the reference of its row. Pure.

At the test's end a row fails only by a gross slow-down. The screen judges the others at the
session's end, when the changes of all rows are known. A duet decides what is open then.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from statistics import fmean, median

from pytest_gpumem.judging.finding import Check, against, basis
from pytest_gpumem.judging.reference import SHIFT, Reference, fails_in_plain_session, screen
from pytest_gpumem.judging.spread import FARTHEST
from pytest_gpumem.judging.what_ran import ran_the_same
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Comparison, LimitResult
from pytest_gpumem.units import format_share, parse_margin

NAME = "max_regression"
WIDEST = 0.5
"""Largest part of a latency in doubt, by half its 95 % interval or by overhead; choice."""
Runs = Sequence[tuple[date, Measurement]]
"""Saved runs of a row, each with its UTC date, oldest first."""


# Latencies


def corrected_logs(runs: Sequence[Measurement]) -> list[list[float]]:
    """Return the log-latencies of each run's processes, corrected to their mean launch overhead.

    As they are where an overhead is unknown, or a correction exceeds `WIDEST` of a latency.
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
        if value <= (1 - WIDEST) * latency:
            return latencies
        corrected.append(value)
    return corrected


def base_latency(measurement: Measurement, delta: float) -> float:
    """Return the latency that a row changed from. `delta`: as `Comparison.delta`."""
    latency = measurement.latency
    if measurement.further:
        latency = math.exp(fmean(corrected_logs([measurement])[0]))
    # A change of 1e-16 and less is -1 as a float.
    return latency / max(1 + delta, sys.float_info.epsilon)


# Against the reference


@dataclass(frozen=True)
class ComparedRun:
    """A run against the reference of its row."""

    measurement: Measurement
    reference: Reference
    log_ratio: float  # mean of the run's log-latencies less the reference's
    same_code: bool  # the run ran the same machine code as every run of the reference

    @property
    def log_latency(self) -> float:
        return self.reference.mean + self.log_ratio

    @property
    def comparison(self) -> Comparison:
        reach = self.reference.reach(self.same_code)
        return Comparison(
            delta=math.expm1(self.log_ratio),
            reach=math.expm1(min(reach, FARTHEST)) if math.isfinite(reach) else None,
            days=self.reference.days,
            processes=self.reference.processes,
            same_code=self.same_code,
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
    if not fails_in_plain_session(run.log_latency, run.limit(check), run.reference):
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
    code, needs = Code.NOISY, check.needs_duet
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
