"""`gpumem report --base`: two runs on one page."""

from __future__ import annotations

from click.testing import CliRunner
from result_files import Folder

from pytest_gpumem.cli import main


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


def test_a_base_that_is_none_is_one_line(folder: Folder) -> None:
    folder.write("head.json", [folder.row()])
    done = CliRunner().invoke(main, ["report", "head.json", "--base", "nothing.json"])
    assert done.exit_code == 4
    assert done.stderr.startswith("gpumem: --base: nothing.json")
