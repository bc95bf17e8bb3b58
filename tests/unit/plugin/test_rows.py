"""The processes of one run are put together row by row."""

from __future__ import annotations

from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.plugin.rows import merged
from pytest_gpumem.records.device import Conditions
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement, Repeat
from pytest_gpumem.records.row import Row, Verdict


def rows(taken: Measurement | None) -> dict[str, Row]:
    row = Row("t.py::test_a", Limits(), Verdict(Outcome.FAIL, ""), taken, failed=True)
    return {row.key: row}


def test_each_process_gives_its_medians_and_its_overhead() -> None:
    own = measurement(overhead=2e-6)
    other = measurement(placements=((1.1e-3, 1.1e-3), (1.2e-3, 1.2e-3)), overhead=3e-6)
    # A row of a failed test counts: what was measured has nothing to do with what a test asserts.
    result = merged(own, "t.py::test_a", [rows(other), rows(own)])
    assert result == replace(own, further=(Repeat(other.medians, 3e-6), Repeat(own.medians, 2e-6)))


def test_what_is_left_out_is_said() -> None:
    own = measurement()
    throttled = replace(
        own, conditions=(Conditions(), Conditions(throttle_reasons=("sw_power_cap",)))
    )
    others = [
        rows(replace(own, sampler="host")),
        rows(throttled),
        rows(None),
        {},
        rows(replace(own, mode="hot")),
    ]
    result = merged(own, "t.py::test_a", others)
    assert result.further == ()
    assert result.notes == (
        "process 2 of 6 is left out: it measured copy, host, clean-cold",
        "process 3 of 6 is left out: throttled at the last samples (sw_power_cap)",
        "process 4 of 6 is left out: it has no such row",
        "process 5 of 6 is left out: it has no such row",
        "process 6 of 6 is left out: it measured copy, blocked, hot",
    )
