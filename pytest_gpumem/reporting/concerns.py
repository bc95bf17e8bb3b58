"""The rows that somebody has to look at, worst first: what annotations, summaries and code-quality reports have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Outcome


class Level(Enum):
    FAILURE = "failure"
    """The test failed."""
    WARNING = "warning"
    """The test passed, and its verdict is no PASS."""


@dataclass(frozen=True)
class Place:
    """Where a test stands."""

    file: str
    """Path with forward slashes, relative to the repository."""
    line: int
    """From 1 on."""


@dataclass(frozen=True)
class Concern:
    """One row that needs a look."""

    row: Row
    level: Level

    @property
    def name(self) -> str:
        """The verdict; with what else failed the test, where its own verdict does not say so."""
        outcome = self.row.verdict.outcome
        name = outcome.value + (", test failed" if self.row.failed and outcome is not Outcome.FAIL else "")
        return f"{name} (simulated)" if self.row.verdict.simulated else name

    @property
    def sentence(self) -> str:
        """Verdict, row and reason in one line, whatever the reason is made of."""
        return " ".join(f"{self.name} {self.row.key}: {self.row.verdict.reason}".split())


def concerns(rows: Iterable[Row]) -> list[Concern]:
    """What needs a look: failures, then UNDECIDED; within each, the largest slow-down first. A NEW row needs none."""
    found = []
    for row in rows:
        if row.failed or row.verdict.outcome is Outcome.FAIL:
            found.append(Concern(row, Level.FAILURE))
        elif row.verdict.outcome is Outcome.UNDECIDED:
            found.append(Concern(row, Level.WARNING))
    return sorted(found, key=_rank)


def _rank(concern: Concern) -> tuple[bool, float]:
    verdict = concern.row.verdict
    return concern.level is Level.WARNING, -verdict.comparison.delta if verdict.comparison is not None else 0.0
