"""The judgement of one measurement, with the figures that led to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):
    """What the gate says; see the design's table of verdicts."""

    PASS = "PASS"
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"
    """The screen flags a slow-down that is not beyond doubt: a warning."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The noise hides a slow-down of the size asked about."""
    UNRELIABLE = "UNRELIABLE"
    """The conditions (throttling, a profiler) forbid a judgement."""
    NO_BASELINE = "NO BASELINE"
    """A regression limit without an accepted row to compare with."""


@dataclass(frozen=True)
class Comparison:
    """A row against its baseline, as shares of the baseline's latency: +0.01 is 1 % slower."""

    delta: float
    """Measured change."""
    low: float
    """Lower end of its interval, one-sided at 99.9 %: what guards against a false alarm."""
    high: float
    """Upper end of its interval, one-sided at 99 %: what guards against a miss."""
    resolvable: float
    """Smallest slow-down that this comparison could have caught."""
    processes: int
    """Accepted processes that the baseline holds."""


@dataclass(frozen=True)
class Verdict:
    """One outcome and one sentence of why."""

    outcome: Outcome
    reason: str
    """One sentence with the figure, the limit and the margin."""
    comparison: Comparison | None = None
    """Change against the baseline, where there is one."""
    simulated: bool = False
    """Every verdict about a simulated device says so."""
