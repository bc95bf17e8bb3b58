from __future__ import annotations

import csv
import json
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import UNSET
from msgspec.structs import replace
from result_files import H100, Folder

from pytest_gpumem.cli import main
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.reporting.exports import figures


def test_csv_has_a_line_for_each_row_in_si_units(folder: Folder) -> None:
    folder.write("a.json", [folder.row(name="test_x"), folder.row(name="test_y", label="=1+1"), folder.row(measurement=None, failed=True)])
    result = CliRunner().invoke(main, ["export", "csv", "a.json"])
    assert result.exit_code == 0
    lines = list(csv.DictReader(result.stdout.splitlines()))
    assert len(lines) == 3
    assert float(lines[0]["latency_s"]) == pytest.approx(268e-6, rel=0.01)
    assert lines[1]["label"] == "'=1+1"  # no formula of a spreadsheet
    assert (lines[2]["latency_s"], lines[2]["failed"]) == ("", "True")


def exported(format: str) -> Any:
    result = CliRunner().invoke(main, ["export", format, "a.json"])
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_names_for_charts_tell_cards_apart_and_have_intervals_and_bandwidth(folder: Folder) -> None:
    folder.write("a.json", [folder.row(name="test_x"), folder.row(name="test_y", profiled=True), folder.row(measurement=None, failed=True)])
    ((name, metrics),) = exported("bmf").items()
    assert name.endswith(f"::test_x @ {H100.key}")
    latency, bandwidth = metrics["latency"], metrics["bandwidth"]
    assert latency["value"] == pytest.approx(268e3, rel=0.01)  # ns
    assert latency["upper_value"] - latency["lower_value"] == pytest.approx(20.0)
    assert bandwidth["value"] == pytest.approx((3 << 28) / 268e-6, rel=0.01)
    assert bandwidth["lower_value"] < bandwidth["value"] < bandwidth["upper_value"]
    (entry,) = exported("github-action-benchmark")
    assert (entry["name"], entry["unit"]) == (name, "us")
    assert entry["value"] == pytest.approx(268, rel=0.01)


def test_a_row_of_another_model_has_its_own_card(folder: Folder) -> None:
    other = replace(H100, name="NVIDIA H200")
    folder.write("a.json", [folder.row(), folder.row(134e-6, device=other)])
    latency = {name.partition(" @ ")[2]: metrics["latency"]["value"] for name, metrics in exported("bmf").items()}
    assert latency == {H100.key: pytest.approx(268e3, rel=0.01), other.key: pytest.approx(134e3, rel=0.01)}
    lines = list(csv.DictReader(CliRunner().invoke(main, ["export", "csv", "a.json"]).stdout.splitlines()))
    assert [line["device"] for line in lines] == [H100.key, other.key]
    assert [figures(folder.row(device=device), H100)["device"] for device in (UNSET, other)] == [H100.key, other.key]


def test_memory_that_was_not_watched_is_no_figure(folder: Folder) -> None:
    unseen, seen = Footprint(0, not_watched=("no GPU is measured",)), Footprint(4096, watched=("fixtures",))
    assert "peak_bytes" not in figures(replace(folder.row(), footprint=unseen), H100)
    assert figures(replace(folder.row(), footprint=seen), H100)["peak_bytes"] == 4096


def test_what_is_no_file_of_results_is_one_line(folder: Folder) -> None:
    result = CliRunner().invoke(main, ["export", "csv", "nothing.json"])
    assert result.exit_code == 4
    assert result.stderr.startswith("gpumem: nothing.json: ")
