"""How far a run has come: tests, samples, time left. Pure but for the clock that it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import shortened


class Progress:
    """Counts the tests of a run that measure, as they begin and end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args:
        clock: seconds of a clock that never goes back.
        """
        self._clock = clock
        self._begun = clock()
        self._tests: frozenset[str] = frozenset()
        self._ended: set[str] = set()
        self._samples: dict[str, int] = {}
        self._running = ""

    def expect(self, tests: Iterable[str]) -> None:
        """The ids of the tests that measure; the time begins to count."""
        self._tests = frozenset(tests)
        self._begun = self._clock()

    def begin(self, test: str) -> None:
        """A test begins."""
        if test in self._tests:
            self._running = test

    def took(self, test: str, samples: int) -> None:
        """A test has taken that many samples in all."""
        self._samples[test] = samples

    def end(self, test: str) -> None:
        """A test is over."""
        if test in self._tests:
            self._ended.add(test)

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the other tests will take if they are like those that have ended; None before the first has."""
        if not self._ended:
            return None
        return (self._clock() - self._begun) / len(self._ended) * (len(self._tests) - len(self._ended))

    def __bool__(self) -> bool:
        """Whether there is anything to tell."""
        return bool(self._tests)

    def line(self, width: int) -> str:
        """One line of at most `width` characters, ASCII."""
        parts = [f"gpumem: {len(self._ended)} of {len(self._tests)} tests", f"{sum(self._samples.values())} samples"]
        if (left := self.seconds_left) is not None and len(self._ended) < len(self._tests):
            parts.append(f"about {rounded(left)} left")
        said = ", ".join(parts)
        running = printable(self._running) if self._running not in self._ended else ""
        room = width - len(said) - 2
        # A few letters of an id tell nothing.
        return f"{said}: {shortened(running, room)}" if running and room >= 12 else said[:width]


def rounded(seconds: float) -> str:
    """A time that is only roughly known: "40 s", "3 min", "2 h 10 min"."""
    if seconds < 55:
        # To 5 s from 10 s on: what changes at every test distracts.
        return f"{max(1, round(seconds))} s" if seconds < 10 else f"{round(seconds / 5) * 5} s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
