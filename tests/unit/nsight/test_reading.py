"""Reports of Nsight Systems, and profiles beside the rows of their run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import ncu_csv
import pytest
from measurements import passing
from nsys_sqlite import Export
from test_ncu_report import page
from test_nsys import one_test

from pytest_gpumem.nsight.ncu import read_csv
from pytest_gpumem.nsight.reading import read, with_results
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import ToolMissing
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.row import Row


@pytest.fixture
def export(tmp_path: Path) -> Path:
    made = Export(tmp_path / "report.sqlite")
    made.domain()
    one_test(made)
    made.copy(1600, 1700, 4096, 1, made.call(1115, 1116), srcKind=0, dstKind=2)
    return made.close()


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_a_report_of_nsys_is_exported(tmp_path: Path, export: Path) -> None:
    report = tmp_path / "run.nsys-rep"
    report.write_text("opaque")
    told = tmp_path / "told"
    # The file to write is the seventh argument of `export --type sqlite --force-overwrite=true --output FILE REPORT`.
    nsys = program(tmp_path / "nsys", f'echo "$@" > {told}; cp {export} "$6"')
    found = read(report, {**os.environ, "GPUMEM_NSYS": str(nsys)})
    assert [(one.name, one.nodeid, one.launches) for one in found] == [
        ("test_triad", "tests/test_a.py::test_triad[1]", 2)
    ]
    assert told.read_text().startswith("export --type sqlite --force-overwrite=true --output /")
    assert told.read_text().endswith(f" {report}\n")
    broken = program(
        tmp_path / "broken",
        "echo 'Processing'; echo 'FATAL ERROR: unsupported report version'; exit 1",
    )
    with pytest.raises(
        BadReport,
        match=r"run.nsys-rep: nsys export wrote nothing \(exit code 1\): FATAL ERROR: unsupported report version",
    ):
        read(report, {**os.environ, "GPUMEM_NSYS": str(broken)})
    empty = program(tmp_path / "empty", 'touch "$6"')
    with pytest.raises(BadReport, match=r"run.nsys-rep: an empty file"):
        read(report, {**os.environ, "GPUMEM_NSYS": str(empty)})


def row(label: str, window: Window | None = None) -> Row:
    return passing(
        "tests/test_a.py::test_triad[1]",
        label=label,
        window=window,
        placements=((1e-3,) * 3,),
        range_name="test_triad",
    )


def test_results_of_the_run_tell_launches_and_windows() -> None:
    cell = ncu_csv.measured("test_triad", labelled("test_triad", "1 MiB"))
    (profile,) = read_csv(page({"ranges": cell}, {"ranges": cell}, {"ranges": cell}))
    window = Window(1 << 20, 1.0, 3 << 20)
    (found,) = with_results([profile], [row(""), row("1 MiB", window)])
    assert (found.nodeid, found.label, found.launches) == (
        "tests/test_a.py::test_triad[1]",
        "1 MiB",
        3,
    )
    assert (found.window, found.set_aside) == (window, 3 << 20)
    assert sum(kernel.dram_read or 0 for kernel in found.kernels) == 3 * 1073762048
    (found,) = with_results([profile], [row(""), row("else")])
    assert found == profile


def test_without_nsys_its_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolMissing, match=r"^GPUMEM_NSYS="):
        read(tmp_path / "a.nsys-rep", {"GPUMEM_NSYS": str(tmp_path / "nowhere"), "PATH": ""})
