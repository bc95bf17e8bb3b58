"""A total budget, which the tests that measure share. Pure."""

from __future__ import annotations

from collections.abc import Iterable

LEAST = 1e-3  # least seconds of sampling of a measurement, however little time is left


class Ledger:
    """The time that is left of a total budget. Tests that have not ended share it equally."""

    def __init__(self, total: float, tests: Iterable[str]) -> None:
        """`total`: seconds for all measurements together. `tests`: those that measure."""
        self.total = total
        self.spent = 0.0  # seconds used so far
        self._waiting = set(tests)

    def share(self, test: str) -> float:
        """Seconds of sampling for a measurement that is about to begin; at least 1 ms."""
        tests = len(self._waiting | {test})
        return max((self.total - self.spent) / tests, LEAST)

    def took(self, seconds: float) -> None:
        """Count the seconds of a measurement, finished or not."""
        self.spent += seconds

    def ended(self, test: str) -> None:
        """Leave the time that a test did not use to the others: it measures nothing more."""
        self._waiting.discard(test)
