"""Joining kernels with measurements."""

from __future__ import annotations

from measurements import TRIAD, measurement
from ncu_csv import line, log, stack

from pytest_gpumem.nsight.ncu import read_csv
from pytest_gpumem.nsight.reading import by_row
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict


def row(range_name: str, label: str = "", *, launches: int = 5) -> Row:
    made = measurement(label=label, sampler="plain", placements=((1e-3,) * launches,), profiled=True, **TRIAD)
    return Row(f"t.py::{range_name}", Limits(), Verdict(Outcome.UNDECIDED, "a profiler was attached"), made, label, range_name=range_name)


def test_measured_launches_are_joined_by_test_and_label() -> None:
    rows = [row("test_a"), row("test_b", "64 MiB"), row("test_b", "64_MiB"), row("test_b"), row("test_a", "measure")]
    ran = [
        stack("test_a", "test_a.setup"),
        stack("test_a", "test_a.measure", "test_a.launch"),
        stack("test_b", labelled("test_b", "64 MiB"), "test_b.measure", "test_b.launch"),
        stack("test_b", labelled("test_b", "64_MiB"), "test_b.measure", "test_b.launch"),
        stack("test_b", labelled("test_b", "64_MiB"), "test_b.flush"),
        stack("test_b", "test_b.measure", "test_b.launch"),
        stack("test_a", "test_a.measure", "test_a.launch", "test_a.launch"),
        stack("test_a", labelled("test_a", "measure"), "test_a.flush"),  # a label like a phase is none
        "",
    ]
    page = log(*(line(i, "k", ranges, (10**i, 0, 1, 0, 0)) for i, ranges in enumerate(ran)))
    found = by_row(read_csv(page), rows)
    assert {key: sum(k.dram_read or 0 for k in one.kernels) for key, one in found.items()} == {
        "t.py::test_a": 10 + 10**6,
        "t.py::test_b[64 MiB]": 10**2,
        "t.py::test_b[64_MiB]": 10**3,
        "t.py::test_b": 10**5,
    }
