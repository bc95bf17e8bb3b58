"""Profiles beside the rows of their run."""

from __future__ import annotations

import ncu_csv
from measurements import passing
from test_ncu_report import page

from pytest_gpumem.nsight.ncu import read_csv
from pytest_gpumem.nsight.reading import with_results
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.row import Row


def row(label: str, window: Window | None = None) -> Row:
    return passing("tests/test_a.py::test_triad[1]", label=label, window=window, placements=((1e-3,) * 3,), range_name="test_triad")


def test_results_of_the_run_tell_launches_and_windows() -> None:
    cell = ncu_csv.measured("test_triad", labelled("test_triad", "1 MiB"))
    (profile,) = read_csv(page({"ranges": cell}, {"ranges": cell}, {"ranges": cell}))
    window = Window(1 << 20, 1.0, 3 << 20)
    (found,) = with_results([profile], [row(""), row("1 MiB", window)])
    assert (found.nodeid, found.label, found.launches) == ("tests/test_a.py::test_triad[1]", "1 MiB", 3)
    assert (found.window, found.set_aside) == (window, 3 << 20)
    assert sum(kernel.dram_read or 0 for kernel in found.kernels) == 3 * 1073762048
    (found,) = with_results([profile], [row(""), row("else")])
    assert found == profile
