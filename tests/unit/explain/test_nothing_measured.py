"""A side that has nothing to measure is not asked a second time, and the reason is said."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.explain import playing
from pytest_gpumem.explain.errors import NothingMeasured
from pytest_gpumem.explain.playing import Asked, play

TREES: Any = [SimpleNamespace(what=what) for what in ("revision main", "working tree")]


class Workers:
    """Of tests that do not exist, or of one that is skipped while it runs."""

    def __init__(self, outcomes: dict[str, tuple[str, str]]) -> None:
        self.outcomes = outcomes
        self.runs = 0
        self.closed = False

    def run(self, turns: object, tests: object, round: int) -> Any:
        self.runs += 1
        return SimpleNamespace(error=None, facts={}, rows=(), outcomes=self.outcomes, seconds=0.1)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("tests", "outcomes", "runs", "said"),
    [
        (("t.py::test_a",), {}, 1, "measured nothing: it has no test t.py::test_a, or its module is skipped"),
        ((), {}, 1, "measured nothing: it has no test that measures"),
        (("t.py::test_a",), {"t.py::test_a": ("skipped", "no library")}, 4, "measured nothing"),
    ],
)
def test_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tests: tuple[str, ...], outcomes: dict[str, tuple[str, str]], runs: int, said: str
) -> None:
    workers = Workers(outcomes)
    monkeypatch.setattr(playing, "Workers", lambda *given, **named: workers)
    with pytest.raises(NothingMeasured, match=said):
        play(*TREES, Asked(tests=tests, arguments=(), pairs=2, counters=False), {}, lambda line: None)
    assert (workers.runs, workers.closed) == (runs, True)
