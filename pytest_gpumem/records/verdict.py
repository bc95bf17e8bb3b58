"""The judgement of one measurement, with the figures that led to it."""

from __future__ import annotations

from enum import Enum

from pytest_gpumem.records.record import Record

ENOUGH = 3
"""Runs, or processes, that show their own spread."""
GROSS = 0.1
"""Beyond the limit, what fewer processes prove. On H200 cards 5 of 2475 single measurements of unchanged code were 2 to 3 % slow at all
their placements, for no visible reason (ci/records/nvidia-h200/gate_validation_short.json)."""


class Outcome(str, Enum):
    """The result of judging one measurement against its limits."""

    PASS = "PASS"
    """Within every limit, beyond doubt."""
    FAIL = "FAIL"
    """Outside of a limit, beyond doubt."""
    UNDECIDED = "UNDECIDED"
    """Neither; `Verdict.code` names the reason."""
    NEW = "NEW"
    """There is nothing to compare with."""

    @property
    def rank(self) -> int:
        """Order in which outcomes are read, the one that most needs a person first."""
        return ("FAIL", "UNDECIDED", "NEW", "PASS").index(self.value)


class Code(str, Enum):
    """Why an outcome is what it is, for programs and for grouping."""

    SLOWER = "slower"
    """FAIL: above `max_regression`, beyond doubt."""
    CREPT = "crept"
    """FAIL: above `max_regression` against the first accepted run, by steps that each passed."""
    FASTER = "faster"
    """FAIL: beyond `fail_if_faster`, beyond doubt."""
    NOISY = "noisy"
    """UNDECIDED: the interval of the change holds the limit."""
    LOOKS_SLOWER = "looks slower"
    """UNDECIDED: measured above the limit, not beyond doubt."""
    CONDITIONS = "conditions"
    """UNDECIDED: throttling, another process, a profiler or a changed device forbids a judgement."""
    MEASURED_DIFFERENTLY = "measured differently"
    """UNDECIDED: the baseline measured another kernel, in another mode or by another sampler, or moved another number of bytes."""
    TOO_FEW_RUNS = "too few runs"
    """UNDECIDED: the baseline has too few runs to know how they differ."""
    OTHER_CARD_VARIANT = "other card variant"
    """UNDECIDED: all of the baseline is of another variant of this card."""
    NOT_MEASURED = "not measured"
    """UNDECIDED: this run has no measurement of the row."""
    NO_BASELINE = "no baseline"
    """NEW: the baseline holds no such row."""
    ACCEPTED = "accepted"
    """NEW: a change of the row was accepted (`gpumem accept`), and no run since."""


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
    """One outcome and one sentence of why."""

    outcome: Outcome
    """The result."""
    reason: str
    """One sentence with the figure, the limit and the margin."""
    comparison: Comparison | None = None
    """Change against the baseline, where there is one."""
    simulated: bool = False
    """Every verdict about a simulated device says so."""
    code: Code | None = None
    """Why; None for PASS, and for a FAIL by an absolute limit."""
