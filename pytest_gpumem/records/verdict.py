"""The verdict on one measurement, with its figures."""

from __future__ import annotations

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.record import Record

ENOUGH = 3
"""Number of runs, or of processes, whose own spread counts."""
GROSS = 0.1
"""Share beyond the limit that fewer processes can prove. On H200 cards 5 of 2475 single measurements of unchanged code were 2 to 3 % slow
at all placements, for no visible reason (ci/records/nvidia-h200/gate_validation_short.json)."""


class Comparison(Record, frozen=True):
    """A row against its baseline, as shares of the baseline's latency: +0.01 is 1 % slower."""

    delta: float
    """Measured change."""
    low: float
    """Lower bound of the change, one-sided at 99.9 %: what FAIL rests on."""
    high: float
    """Upper bound of the change, one-sided at 99.5 %: what PASS rests on."""
    catches: float
    """Smallest slow-down that this comparison fails in 99 % of runs."""
    processes: int
    """Accepted processes of the baseline."""
    runs: int = 1
    """Accepted runs that those processes are of."""
    measured: int = 1
    """Processes of this run behind the change."""
    p_value: float | None = None
    """Probability that a change of no more than the limit shows such a slow-down or a larger one."""


class Verdict(Record, frozen=True):
    """The outcome of one row, with its reason."""

    outcome: Outcome
    """The result."""
    reason: str
    """One sentence with the figure, the limit and the margin."""
    comparison: Comparison | None = None
    """Change against the baseline, where there is one."""
    simulated: bool = False
    """Every verdict about a simulated device says so."""
    code: Code | None = None
    """Why; None for a PASS by the figures, and for a FAIL by an absolute limit."""
