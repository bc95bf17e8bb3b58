"""A side that has nothing to measure is not asked a second time, and the reason is said."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.explain import processes
from pytest_gpumem.explain.processes import ExplainRequest, measure_head, measure_sides
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.runs import child
from pytest_gpumem.runs.workers import HEAD

BOTH = "base (revision main) and head (working tree)"
TREES: Any = [SimpleNamespace(title=title) for title in ("revision main", "working tree")]


class Workers:
    """Of tests that do not exist, or of one that is skipped while it runs."""

    def __init__(self, outcomes: dict[str, tuple[str, str]]) -> None:
        self.outcomes = outcomes
        self.runs = 0
        self.closed = False

    def run(self, turns: object, tests: object, round: int) -> Any:
        self.runs += 1
        return SimpleNamespace(error=None, device=None, rows=(), outcomes=self.outcomes, seconds=0.1)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("tests", "outcomes", "runs", "said"),
    [
        (("t.py::test_a",), {}, 1, "measured nothing: it has no test t.py::test_a, or its module is skipped"),
        ((), {}, 1, "measured nothing: it has no test that measures"),
        (
            ("t.py::test_a",),
            {"t.py::test_a": ("skipped", "Skipped: no library")},
            2,
            f"{BOTH} measured nothing: t.py::test_a skipped: no library",
        ),
        ((), {f"t.py::test_{one}": ("skipped", "no library") for one in "abc"}, 2, f"{BOTH} measured nothing: 3 tests skipped: no library"),
        ((), {f"t.py::test_{one}": ("failed", one) for one in "abcde"}, 2, "t.py::test_c failed: c; and 2 further reasons"),
    ],
)
def test_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tests: tuple[str, ...], outcomes: dict[str, tuple[str, str]], runs: int, said: str
) -> None:
    workers = Workers(outcomes)
    monkeypatch.setattr(processes, "Workers", lambda *given, **named: workers)
    with pytest.raises(NoAnswer, match=re.escape(said) + "$" if "it has no" not in said else said):
        measure_sides(TREES[0], TREES[1], ExplainRequest(tests=tests, arguments=(), pairs=2, counters=False), {}, lambda line: None)
    assert (workers.runs, workers.closed) == (runs, True)


def test_one_side_that_skips_is_enough_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneSide(Workers):
        def run(self, turns: Any, tests: object, round: int) -> Any:
            done = super().run(turns, tests, round)
            return done if turns[0].side == HEAD else SimpleNamespace(**{**vars(done), "rows": (measured,), "outcomes": {}})

    measured = SimpleNamespace(key="t.py::test_a", measurement=object())
    workers = OneSide({"t.py::test_a": ("skipped", "no library")})
    monkeypatch.setattr(processes, "Workers", lambda *given, **named: workers)
    with pytest.raises(NoAnswer, match=r"^head \(working tree\) measured nothing: t.py::test_a skipped: no library$"):
        measure_sides(TREES[0], TREES[1], ExplainRequest(tests=(), arguments=(), pairs=3, counters=False), {}, lambda line: None)
    assert workers.runs == 2


def test_a_head_that_is_measured_alone_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs: list[object] = []
    tree: Any = SimpleNamespace(title="working tree", folder=tmp_path, root=tmp_path, python="python")
    monkeypatch.setattr(child, "run", lambda *given, **named: runs.append(given))
    monkeypatch.setattr(
        processes, "results_of", lambda *given: SimpleNamespace(device=None, rows=(SimpleNamespace(measurement=None, footprint=None),))
    )
    with pytest.raises(NoAnswer, match=r"^head \(working tree\) measured nothing: its tests skipped or failed; "):
        measure_head(tree, ExplainRequest(tests=(), arguments=(), pairs=3, counters=False), {}, lambda line: None)
    assert len(runs) == 1
