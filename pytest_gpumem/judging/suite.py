"""Many verdicts in one run: Holm's procedure limits false alarms of a whole suite of unchanged tests.

A test is judged when it ends, before the suite has ended. Its p-value is compared with Holm's threshold at that moment: alpha over the
number of compared rows less the rows rejected so far. In any order of rows, this rejects nothing that Holm over the whole suite would not
(Holm 1979, "A simple sequentially rejective multiple test procedure": sorted, the rejected p-values meet its thresholds).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Verdict

ALPHA = 0.05
"""Largest share of suites of unchanged tests with a false alarm."""


@dataclass(frozen=True)
class Family:
    """The rows of one suite that are compared with a baseline."""

    size: int = 1
    """Number of compared rows; a number that is too large is stricter."""
    rejected: int = 0
    """Number of rows rejected so far."""

    @property
    def threshold(self) -> float:
        """The largest p-value that is a change now."""
        return ALPHA / max(self.size - self.rejected, 1)

    def after(self, verdict: Verdict) -> Family:
        """The family after this verdict of a compared row."""
        failed = verdict.comparison is not None and verdict.outcome is Outcome.FAIL
        p_value = verdict.comparison.p_value if verdict.comparison is not None else None
        # A row that fails by another limit is not rejected.
        return replace(self, rejected=self.rejected + 1) if failed and p_value is not None and p_value <= self.threshold else self


ALONE = Family()
"""The family of a single row."""
