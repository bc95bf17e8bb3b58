"""What needs a look, and in which order."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.concerns import Level, concerns

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
    assert [one.row.nodeid[6:] for one in found] == ["slow", "asserts", "more", "little", "throttled"]
    assert [one.level for one in found] == [Level.FAILURE] * 2 + [Level.WARNING] * 3


def test_a_name_says_what_else_failed_and_what_is_simulated(make_row: Make) -> None:
    (failed,) = concerns([replace(make_row("t.py::t", reason="within\nits limits"), failed=True)])
    assert failed.sentence == "PASS, test failed t.py::t: within its limits"
    (simulated,) = concerns([make_row("t.py::t", Outcome.FAIL, simulated=True)])
    assert simulated.name == "FAIL (simulated)"
