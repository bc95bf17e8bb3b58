from __future__ import annotations

import csv

import pytest
from click.testing import CliRunner
from result_files import Folder

from pytest_gpumem.cli import main


def test_csv_has_a_line_for_each_row_in_si_units(folder: Folder) -> None:
    folder.write("a.json", [folder.row(name="test_x"), folder.row(name="test_y", label="=1+1"), folder.row(measurement=None, failed=True)])
    result = CliRunner().invoke(main, ["export", "csv", "a.json"])
    assert result.exit_code == 0
    lines = list(csv.DictReader(result.stdout.splitlines()))
    assert len(lines) == 3
    assert float(lines[0]["latency_s"]) == pytest.approx(268e-6, rel=0.01)
    assert lines[1]["label"] == "'=1+1"  # no formula of a spreadsheet
    assert (lines[2]["latency_s"], lines[2]["failed"]) == ("", "True")


def test_what_is_no_file_of_results_is_one_line(folder: Folder) -> None:
    result = CliRunner().invoke(main, ["export", "csv", "nothing.json"])
    assert result.exit_code == 4
    assert result.stderr.startswith("gpumem: nothing.json: ")
