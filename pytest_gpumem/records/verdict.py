"""The judgement of one measurement, with the figures that led to it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(str, Enum):
    """What the gate says of a measurement."""

    PASS = "PASS"
    FAIL = "FAIL"
    SUSPECT = "SUSPECT"
    """The screen flags a slow-down that is not beyond doubt: a warning."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """The noise hides a slow-down of the size asked about, or the baseline is of another sort of card."""
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
    sessions: int = 1
    """Sessions that those processes are of."""
    measured: int = 1
    """Processes of this run behind the change."""
    p_value: float | None = None
    """Probability that unchanged code shows such a slow-down or a larger one."""
    errors: float | None = None
    """Standard errors of the change that it is from none."""
    drift: float = 0.0
    """Drift of the device, as control kernels showed it, that was taken out of `delta`; a share, slower counted up."""
    without_slowest: float | None = None
    """`delta` without this run's slowest process; None for a run of one."""


@dataclass(frozen=True)
class Verdict:
    """One outcome and one sentence of why."""

    outcome: Outcome
    """What the gate says."""
    reason: str
    """One sentence with the figure, the limit and the margin."""
    comparison: Comparison | None = None
    """Change against the baseline, where there is one."""
    simulated: bool = False
    """Every verdict about a simulated device says so."""
    fails: bool = False
    """The test fails by it, whatever the outcome: a claim of the test that does not hold beyond its interval."""
    another_sort: bool = False
    """Its max_regression could not be judged, because all of the baseline's cards are of another sort than this one."""
