"""Reports of every kind of file, and the command that reads them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import ncu_csv
import pytest
from click.testing import CliRunner
from measurements import passing
from nsys_sqlite import Export
from test_ncu_report import page
from test_nsys import one_test

from pytest_gpumem.cli import main
from pytest_gpumem.nsight import ncu as ncu_module
from pytest_gpumem.nsight.reading import read, with_results
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.nsight.tools import ToolMissing
from pytest_gpumem.ranges import labelled
from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import profiles_from_json


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
    assert [one.name for one in found.profiles] == ["test_triad"]
    assert told.read_text().startswith("export --type sqlite --force-overwrite=true --output /")
    assert told.read_text().endswith(f" {report}\n")
    broken = program(tmp_path / "broken", "echo 'Processing'; echo 'FATAL ERROR: unsupported report version'; exit 1")
    with pytest.raises(
        BadReport, match=r"run.nsys-rep: nsys export wrote nothing \(exit code 1\): FATAL ERROR: unsupported report version"
    ):
        read(report, {**os.environ, "GPUMEM_NSYS": str(broken)})
    with pytest.raises(BadReport, match="there is no such file"):
        read(tmp_path / "absent.nsys-rep", {**os.environ, "GPUMEM_NSYS": str(nsys)})


def test_a_report_of_ncu_is_printed_by_ncu_and_read_by_its_module_where_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncu_module, "module", lambda: pytest.fail("a native module was loaded though ncu is there"))
    report = tmp_path / "run.ncu-rep"
    report.write_text("opaque")
    (tmp_path / "page").write_text(page({"ranges": ncu_csv.measured("test_triad")}))
    ncu = program(tmp_path / "ncu", f'test "$1 $3" = "--import --csv" && cat {tmp_path / "page"}')
    assert [one.name for one in read(report, {**os.environ, "GPUMEM_NCU": str(ncu)}).profiles] == ["test_triad"]
    broken = program(tmp_path / "broken", "echo '==ERROR== Failed to load report file.'; exit 1")
    with pytest.raises(BadReport, match="ncu: Failed to load report file"):
        read(report, {**os.environ, "GPUMEM_NCU": str(broken)})
    monkeypatch.setattr(ncu_module, "module", lambda: None)
    with pytest.raises(ToolMissing, match="neither ncu nor the package ncu_report was found"):
        read(report, {"GPUMEM_NCU": str(tmp_path / "nowhere"), "PATH": ""})


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("run.qdstrm", b"x", "was not imported into a report: .* libdw"),
        ("notes.txt", b"hello", "no report of Nsight Systems or Nsight Compute; accepted are"),
        ("ncu.log", b"==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "ERR_NVGPUCTRPERM"),
        ("empty.sqlite", b"", "an empty file"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadReport, match=said) as refusal:
        read(path, {})
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)


def row(label: str, window: Window | None = None) -> Row:
    return passing("tests/test_a.py::test_triad[1]", label=label, window=window, placements=((1e-3,) * 3,), range_name="test_triad")


def test_results_of_the_run_tell_launches_and_windows() -> None:
    cell = ncu_csv.measured("test_triad", labelled("test_triad", "1 MiB"))
    (profile,) = ncu_module.read_csv(page({"ranges": cell}, {"ranges": cell}, {"ranges": cell})).profiles
    window = Window(1 << 20, 1.0, 3 << 20)
    (found,) = with_results([profile], [row(""), row("1 MiB", window)])
    assert (found.nodeid, found.label, found.launches) == ("tests/test_a.py::test_triad[1]", "1 MiB", 3)
    assert (found.window, found.set_aside) == (window, 3 << 20)
    assert sum(kernel.dram_read or 0 for kernel in found.kernels) == 3 * 1073762048
    (found,) = with_results([profile], [row(""), row("else")])
    assert found == profile


def test_the_command_says_what_was_found(export: Path) -> None:
    done = CliRunner().invoke(main, ["read", str(export)])
    assert done.exit_code == 0
    assert f"{export} (nsys 2024.6.2.225)" in done.output
    for part in (
        "tests/test_a.py::test_triad[1]  2 launches",
        "void triad<float, 2>(T1 *, const T1 *)",
        "2 launches of 264 x 1024 threads, 100.0 ns each",
        "1 H2D copy, pageable to device: 4 KiB in 100.0 ns",
        "besides: 2 kernels in 280.0 ns",
    ):
        assert part in done.output, done.output


def test_the_command_writes_json_and_goes_on_past_what_it_cannot_read(export: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["read", str(tmp_path / "absent.sqlite"), str(export), "--json", "-"])
    assert done.exit_code == 4
    assert f"gpumem: {tmp_path / 'absent.sqlite'} cannot be read: No such file or directory" in done.stderr
    (profile,) = profiles_from_json(json.loads(done.stdout))
    assert (profile.name, profile.launches) == ("test_triad", 2)


def test_the_command_refuses_results_that_are_none(export: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("[1]")
    done = CliRunner().invoke(main, ["read", str(export), "--results", str(tmp_path / "results.json")])
    assert done.exit_code == 4
    assert "results.json: holds no results of this plugin; pytest --gpumem --benchmark-json=FILE writes them" in done.stderr


def test_a_report_that_needs_a_tool_is_named(tmp_path: Path) -> None:
    report = tmp_path / "a.nsys-rep"
    report.write_bytes(b"x")
    with pytest.raises(ToolMissing) as raised:
        read(report, {"GPUMEM_NSYS": str(tmp_path / "nowhere"), "PATH": ""})
    assert str(raised.value).startswith(f"{report}: GPUMEM_NSYS=")
