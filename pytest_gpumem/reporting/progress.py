"""Progress of a run: tests, samples, time left. Pure but for its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytest_gpumem.judging.finding import counted
from pytest_gpumem.printable import printable


class Progress:
    """Counts the tests of a run that measure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds of a clock that never goes back."""
        self._clock = clock
        self._begun = clock()
        self._tests: frozenset[str] = frozenset()
        self._samples: dict[str, int] = {}  # of each test that has ended
        self._running = ""

    def expect(self, tests: Iterable[str]) -> None:
        """Set the ids of the tests that measure, and start the time."""
        self._tests = frozenset(tests)
        self._begun = self._clock()

    def begin(self, test: str) -> None:
        """Note that a test begins."""
        if test in self._tests:
            self._running = test

    def end(self, test: str, samples: int) -> None:
        """Note that a test has ended, and took so many samples in all."""
        self._samples[test] = samples

    def __bool__(self) -> bool:
        """True if any test measures."""
        return bool(self._tests)

    def line(self, width: int) -> str:
        """One line of at most `width` characters; the running test's name only where it fits."""
        ended, every = len(self._tests & self._samples.keys()), len(self._tests)
        line = f"gpumem: {ended} of {counted(every, 'test')}"
        line += f", {counted(sum(self._samples.values()), 'sample')}"
        if 0 < ended < every:  # the estimate assumes tests as long as those before
            left = (self._clock() - self._begun) / ended * (every - ended)
            line += f", about {rounded(left)} left"
        named = f"{line}: {printable(self._running)}"
        shown = self._running and self._running not in self._samples and len(named) <= width
        return named if shown else line[:width]


def of_processes(ended: int, processes: int, finished: int, tests: int, seconds: float) -> str:
    """Such as "gpumem: 1 of 3 processes measured, 14 of 95 tests of the next, about 40 s left".
    `ended`: processes that have ended.
    `finished`: tests that the present one has finished.
    `tests`: of each process.
    `seconds`: since the first process began.
    """
    parts = [f"gpumem: {ended} of {counted(processes, 'process')} measured"]
    finished, tests = min(finished, tests), max(1, tests)
    if finished:
        parts.append(f"{finished} of {counted(tests, 'test')} of the next")
    done, all_of_them = ended * tests + finished, processes * tests
    if 0 < done < all_of_them:
        parts.append(f"about {rounded(seconds / done * (all_of_them - done))} left")
    return ", ".join(parts)


def rounded(seconds: float) -> str:
    """An estimated time: "40 s", "3 min", "2 h 10 min"."""
    if seconds < 55:
        # To 5 s from 10 s on: a figure that changes with every test distracts.
        return f"{max(1, round(seconds))} s" if seconds < 10 else f"{round(seconds / 5) * 5} s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
