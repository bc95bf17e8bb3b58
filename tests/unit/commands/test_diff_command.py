"""`gpumem diff`: two runs side by side."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from result_files import Folder

from pytest_gpumem.cli import main
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran

KERNEL = Step(StepKind.KERNEL, "triad", code="aa", grid=(64, 1, 1), block=(256, 1, 1), registers=32, local=0, stream=7)
COPY = Step(StepKind.COPY, "host to device", nbytes=4096, source="pinned", memory="device", stream=7)

Diff = Callable[..., Result]


@pytest.fixture
def diff(monkeypatch: pytest.MonkeyPatch) -> Diff:
    monkeypatch.setenv("COLUMNS", "160")
    return lambda *arguments: CliRunner().invoke(main, ["diff", "base.json", "head.json", *arguments])


def with_steps(row: Row, *steps: Step, not_watched: str | None = None) -> Row:
    assert row.measurement is not None
    return replace(row, measurement=replace(row.measurement, what_ran=what_ran(steps, {}, not_watched=not_watched)))


def with_peak(row: Row, nbytes: int) -> Row:
    return replace(row, footprint=Footprint(nbytes, (MemoryUse("CuPy", "device", peak=nbytes, allocations=2, largest=nbytes),)))


def figures(diff: Diff) -> dict[str, dict[str, tuple[Any, Any]]]:
    rows = json.loads(diff("--json", "-").stdout)["rows"]
    return {row["row"]: {name: (one["base"], one["head"]) for name, one in row["figures"].items()} for row in rows}


def test_counts_bytes_and_code_side_by_side(folder: Folder, diff: Diff) -> None:
    row = folder.row()
    folder.write("base.json", [with_peak(with_steps(row, KERNEL, COPY), 1 << 20)])
    faster = replace(KERNEL, code="bb", block=(128, 1, 1), registers=40)
    folder.write("head.json", [with_peak(with_steps(row, faster, COPY, COPY), 3 << 20)])
    (found,) = figures(diff).values()
    changed = {name: pair for name, pair in found.items() if pair[0] != pair[1] and name != "ran"}
    assert changed == {
        "copies": (1, 2),
        "copied_bytes": (4096, 8192),
        "registers": (32, 40),
        "peak_bytes": (1 << 20, 3 << 20),
        "largest_allocation_bytes": (1 << 20, 3 << 20),
    }
    assert found["kernels"] == (1, 1)
    assert found["ran"][0] != found["ran"][1]
    result = diff()
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for expected in ("copies 1 2 +100 %", "registers 32 40 +25.0 %", "peak 1 MiB 3 MiB +200 %"):
        assert expected in lines
    assert any("block 256" in line and "128" in line for line in lines)
    assert not any(line.startswith("kernels ") for line in lines)
    assert any(line.startswith("kernels 1 1") for line in [" ".join(line.split()) for line in diff("--all").stdout.splitlines()])


def test_what_is_equal_is_counted_and_what_one_side_lacks_is_named(folder: Folder, diff: Diff) -> None:
    same, gone, new = (folder.row(name=f"test_{name}") for name in ("same", "gone", "new"))
    folder.write("base.json", [with_steps(same, KERNEL), gone])
    folder.write("head.json", [with_steps(folder.row(270e-6, name="test_same"), KERNEL), new])
    last = diff().stdout.splitlines()[-3:]
    assert last == [
        "1 row on both sides, 1 with the same counts, bytes and code",
        "only in base: tests/test_a.py::test_gone",
        "only in head: tests/test_a.py::test_new",
    ]


def test_what_a_side_did_not_watch_is_no_difference(folder: Folder, diff: Diff) -> None:
    row = folder.row()
    folder.write("base.json", [with_steps(row, KERNEL, COPY)])
    folder.write("head.json", [with_steps(row, not_watched="cupti-python is not installed")])
    (found,) = figures(diff).values()
    assert (found["kernels"], found["copies"]) == ((1, None), (1, None))
    assert json.loads(diff("--json", "-").stdout)["rows"][0]["ran_differently"] == []
    unknown = replace(KERNEL, code=None)
    folder.write("head.json", [with_steps(row, unknown, COPY, not_watched="the machine code of triad")])
    assert diff().stdout.splitlines()[-1] == "1 row on both sides, 1 with the same counts, bytes and code"


def test_csv_has_a_line_for_each_figure(folder: Folder, diff: Diff) -> None:
    row = folder.row(label="=big")
    folder.write("base.json", [with_steps(row, KERNEL)])
    folder.write("head.json", [with_steps(row, KERNEL, KERNEL), folder.row(name="test_new")])
    lines = list(csv.DictReader(diff("--csv", "-").stdout.splitlines()))
    by_figure = {line["figure"]: (line["base"], line["head"]) for line in lines if line["row"] == row.key}
    assert by_figure["kernels"] == ("1", "2")
    assert float(by_figure["latency_s"][0]) == pytest.approx(268e-6, rel=0.01)
    assert ("row", "False", "True") in [(line["figure"], line["base"], line["head"]) for line in lines]


def test_a_row_without_a_measurement(folder: Folder, diff: Diff) -> None:
    row = replace(folder.row(), measurement=None)
    folder.write("base.json", [with_peak(row, 1 << 20)])
    folder.write("head.json", [with_peak(row, 2 << 20)])
    (found,) = figures(diff).values()
    assert "latency_s" not in found
    assert found["peak_bytes"] == (1 << 20, 2 << 20)
    assert "  peak" in diff().stdout


def test_what_is_no_file_of_results_is_one_line(folder: Folder, diff: Diff) -> None:
    folder.write("base.json", [folder.row()])
    result = diff()
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("gpumem: head.json: ")
