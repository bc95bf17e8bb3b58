"""What needs a look, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.concerns import concerns, fails, sentence

Make = Callable[..., Row]


def slower(delta: float) -> Comparison:
    return Comparison(delta, delta, delta, 0.01, 3)


def test_failures_first_then_undecided_by_slow_down_and_no_new_row(make_row: Make) -> None:
    rows = [
        make_row("t.py::throttled", Outcome.UNDECIDED),
        make_row("t.py::fine"),
        make_row("t.py::new", Outcome.NEW),
        make_row("t.py::little", Outcome.UNDECIDED, comparison=slower(0.01)),
        make_row("t.py::more", Outcome.UNDECIDED, comparison=slower(0.02)),
        replace(make_row("t.py::asserts"), failed=True),
        make_row("t.py::slow", Outcome.FAIL, comparison=slower(0.03)),
    ]
    found = concerns(rows)
    assert [row.nodeid[6:] for row in found] == ["slow", "asserts", "more", "little", "throttled"]
    assert [fails(row) for row in found] == [True] * 2 + [False] * 3


def test_a_sentence_says_what_else_failed_and_what_is_simulated(make_row: Make) -> None:
    assert (
        sentence(replace(make_row("t.py::t", reason="within\nits limits"), failed=True)) == "PASS, test failed t.py::t: within its limits"
    )
    assert sentence(make_row("t.py::t", Outcome.FAIL, simulated=True)).startswith("FAIL (simulated) t.py::t: ")
