"""Many verdicts in one run: Holm's procedure, so that a whole suite of unchanged tests seldom raises an alarm.

A test is judged when it ends, not when the suite has. So a p-value is held against Holm's threshold at that moment: alpha over the number
of compared rows less those that were rejected before. In whatever order rows come, this rejects nothing that Holm over the whole suite
would not (Holm 1979, "A simple sequentially rejective multiple test procedure": sorted, the rejected p-values meet its thresholds).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.verdict import Verdict

ALPHA = 0.05
"""Share of suites of unchanged tests that may raise an alarm."""


@dataclass(frozen=True)
class Family:
    """The rows of one suite that are compared with a baseline, as far as they were judged."""

    size: int = 1
    """Rows that are compared; too large a number is only stricter."""
    rejected: int = 0
    """Rows judged so far that did not survive as unchanged."""

    @property
    def threshold(self) -> float:
        """The largest p-value that counts as a change now."""
        return ALPHA / max(self.size - self.rejected, 1)

    def after(self, verdict: Verdict) -> Family:
        """The family once a compared row has this verdict."""
        failed = verdict.comparison is not None and verdict.outcome is Outcome.FAIL
        p_value = verdict.comparison.p_value if verdict.comparison is not None else None
        # A row that fails by another limit is no rejected one.
        return replace(self, rejected=self.rejected + 1) if failed and p_value is not None and p_value <= self.threshold else self


ALONE = Family()
"""A row that is judged by itself."""
