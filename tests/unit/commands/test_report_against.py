"""`gpumem report --base`: two runs on one page."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from msgspec.structs import replace
from result_files import Folder

from pytest_gpumem.cli import main
from pytest_gpumem.records.footprint import Footprint


def test_a_report_against_other_results_has_their_latencies_and_changes(folder: Folder) -> None:
    folder.write("base.json", [folder.row(name="test_a"), folder.row(name="test_gone")])
    folder.write("head.json", [folder.row(300e-6, name="test_a")])
    done = CliRunner().invoke(main, ["report", "head.json", "--base", "base.json"])
    assert done.exit_code == 0, done.output
    text = (folder.path / "head.html").read_text()
    assert "changes against the baseline" in text
    assert "<small>from 268." in text
    assert "test_gone" in text
    assert "not in head.json" in text


@pytest.mark.parametrize("option", ["--base", "--history"])
def test_the_memory_of_tests_is_compared_too(folder: Folder, option: str) -> None:
    of_base, of_head = (Footprint(nbytes, watched=("fixtures",)) for nbytes in (2 << 20, 3 << 20))
    folder.write("base.json", [replace(folder.row(name="test_a"), footprint=of_base), folder.row(name="test_b")])
    folder.write("head.json", [replace(folder.row(name="test_a"), footprint=of_head), folder.row(name="test_b")])
    done = CliRunner().invoke(main, ["report", "head.json", option, "base.json"])
    assert done.exit_code == 0, done.output
    assert (folder.path / "head.html").read_text().count("peak memory 2 MiB -&gt; 3 MiB (+1 MiB)") == 1


def test_a_damaged_footprint_is_one_line(folder: Folder) -> None:
    folder.write("base.json", [replace(folder.row(name="test_a"), footprint=Footprint(2 << 20, watched=("fixtures",)))])
    folder.write("head.json", [folder.row(name="test_a")])
    path = folder.path / "base.json"
    path.write_text(path.read_text().replace(str(2 << 20), '"much"'))
    done = CliRunner().invoke(main, ["report", "head.json", "--history", "base.json"])
    assert done.exit_code == 4
    assert done.stderr.startswith("gpumem: the footprint of ")
    assert "peak" in done.stderr


def test_a_base_that_is_none_is_one_line(folder: Folder) -> None:
    folder.write("head.json", [folder.row()])
    done = CliRunner().invoke(main, ["report", "head.json", "--base", "nothing.json"])
    assert done.exit_code == 4
    assert done.stderr.startswith("gpumem: --base: nothing.json")
