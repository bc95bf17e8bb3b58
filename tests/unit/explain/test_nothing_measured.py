"""A side that has nothing to measure is not asked a second time, and the reason is said."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from processes import row

from pytest_gpumem.explain import processes as explaining
from pytest_gpumem.explain.processes import ExplainRequest, measure_sides
from pytest_gpumem.outcomes import NoAnswer
from pytest_gpumem.runs.experiment import Processes
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord, Turn

BOTH = "base (revision main) and head (working tree)"
TREES: Any = {
    side: SimpleNamespace(title=title)
    for side, title in ((BASE, "revision main"), (HEAD, "working tree"))
}
MEASURED = row("t.py::test_a", 1e-3)


class Started(Processes):
    """Of tests that do not exist, or of one that is skipped while it runs."""

    def __init__(self, outcomes: dict[str, tuple[str, str]], measures: str = "") -> None:
        """`measures`: the side that measures."""
        self.outcomes, self.measures = outcomes, measures
        self.runs = 0
        self.closed = False

    def run(
        self,
        turns: Sequence[Turn],
        tests: object,
        attempt: int,
        variables: object = None,
        watch: Callable[[int], None] = lambda _: None,
    ) -> ProcessRecord:
        self.runs += 1
        watch(0)
        measures = turns[0].side == self.measures
        return ProcessRecord(
            turns[0],
            attempt,
            "",
            0.1,
            1,
            rows=(MEASURED,) if measures else (),
            outcomes={} if measures else self.outcomes,
        )

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Started]:
    """Puts processes that are made up in the place of real ones; arguments as for `Started`."""

    def started(*given: Any) -> Started:
        made = Started(*given)

        def make(trees: Any, *_: object, **__: object) -> Started:
            made.sides, made.titles = trees, None
            return made

        monkeypatch.setattr(explaining, "Processes", make)
        return made

    return started


def measure(trees: Any, tests: tuple[str, ...] = (), pairs: int = 3) -> object:
    return measure_sides(
        trees,
        ExplainRequest(tests=tests, arguments=(), pairs=pairs, counters=False),
        {},
        lambda line: None,
    )


@pytest.mark.parametrize(
    ("tests", "outcomes", "runs", "said"),
    [
        (
            ("t.py::test_a",),
            {},
            1,
            "measured nothing: it has no test t.py::test_a, or its module is skipped",
        ),
        ((), {}, 1, "measured nothing: it has no test that measures"),
        (
            ("t.py::test_a",),
            {"t.py::test_a": ("skipped", "Skipped: no library")},
            2,
            f"{BOTH} measured nothing: t.py::test_a skipped: no library",
        ),
        (
            (),
            {f"t.py::test_{one}": ("skipped", "no library") for one in "abc"},
            2,
            f"{BOTH} measured nothing: 3 tests skipped: no library",
        ),
        (
            (),
            {f"t.py::test_{one}": ("failed", one) for one in "abcde"},
            2,
            "t.py::test_c failed: c; and 2 further reasons",
        ),
    ],
)
def test_the_reason_is_said(
    start: Callable[..., Started],
    tests: tuple[str, ...],
    outcomes: dict[str, tuple[str, str]],
    runs: int,
    said: str,
) -> None:
    started = start(outcomes)
    with pytest.raises(NoAnswer, match=re.escape(said) + "$" if "it has no" not in said else said):
        measure(TREES, tests, 2)
    assert (started.runs, started.closed) == (runs, True)


def test_one_side_that_skips_is_enough_to_end(start: Callable[..., Started]) -> None:
    started = start({"t.py::test_a": ("skipped", "no library")}, BASE)
    with pytest.raises(
        NoAnswer,
        match=r"^head \(working tree\) measured nothing: t.py::test_a skipped: no library$",
    ):
        measure(TREES)
    assert started.runs == 2


def test_a_head_that_is_measured_alone_is_asked_once(start: Callable[..., Started]) -> None:
    started = start({"t.py::test_a": ("failed", "assert 0")})
    with pytest.raises(
        NoAnswer, match=r"^head \(working tree\) measured nothing: t.py::test_a failed: assert 0$"
    ):
        measure({HEAD: TREES[HEAD]})
    assert started.runs == 1


def test_processes_that_take_too_long_are_ended(start: Callable[..., Started]) -> None:
    """After each second, whichever of them is at work."""
    started, now = start({}, HEAD), iter([0.0, 59.0, 61.0])
    asked = ExplainRequest(("t.py::test_a",), (), 1, counters=False, seconds=60.0)
    with pytest.raises(NoAnswer, match=r"^they take longer than 60\.00 s$"):
        measure_sides(TREES, asked, {}, lambda line: None, lambda: next(now))
    assert (started.runs, started.closed) == (2, True)
