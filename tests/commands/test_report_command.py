"""`gpumem report`: a page from a result file, also against earlier runs."""

from __future__ import annotations

import csv
import re

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace
from result_files import Folder

from pytest_gpumem.cli import main


def report(folder: Folder, *arguments: str) -> Result:
    return CliRunner().invoke(
        main, ["report", *(a if a.startswith("-") else str(folder.path / a) for a in arguments)]
    )


def page(folder: Folder, name: str = "now.html") -> str:
    return (folder.path / name).read_text()


def test_a_page_beside_the_results(folder: Folder) -> None:
    folder.write("now.json", [folder.row()], mode="hot")
    result = report(folder, "now.json")
    assert (result.exit_code, result.output) == (0, f"wrote {folder.path / 'now.html'}\n")
    for said in ("test_triad", "revision abc", "taken 2026-11-20 18:00 UTC", "mode hot"):
        assert said in page(folder)


def test_the_files_for_other_programs(folder: Folder) -> None:
    for option in ["--csv", "--json"]:
        folder.write("now.json", [folder.row()])
        written = report(folder, "now.json", option, "out.txt")
        assert (written.exit_code, written.output) == (0, f"wrote {folder.path / 'out.txt'}\n"), (
            option
        )
        assert not (folder.path / "now.html").exists(), option
        printed = CliRunner().invoke(main, ["report", str(folder.path / "now.json"), option, "-"])
        assert (printed.exit_code, printed.stdout) == (0, (folder.path / "out.txt").read_text()), (
            option
        )
        both = report(folder, "now.json", option, "out.txt", "-o", "page.html")
        assert both.output.splitlines() == [
            f"wrote {folder.path / name}" for name in ("out.txt", "page.html")
        ], option


def test_the_files_have_the_changes_against_the_base(folder: Folder) -> None:
    folder.write("base.json", [folder.row()])
    folder.write("now.json", [folder.row(300e-6)])
    assert report(folder, "now.json", "--base", "base.json", "--csv", "out.csv").exit_code == 0
    (line,) = csv.DictReader((folder.path / "out.csv").read_text().splitlines())
    assert float(line["change"]) == pytest.approx(300 / 268 - 1, abs=0.01)


def test_rows_are_drawn_over_the_runs_of_the_base(folder: Folder) -> None:
    (folder.path / "past").mkdir(exist_ok=True)
    folder.write(
        "now.json",
        [folder.row(), folder.row(name="test_new"), folder.row(name="test_hot", mode="hot")],
    )
    for index in range(3):
        broken = replace(folder.row(name="test_new"), test_error=True)
        folder.write(f"past/{index}.json", [folder.row(), folder.row(name="test_hot"), broken])
    assert report(folder, "now.json", "--base", "past").exit_code == 0
    # Another mode and failed tests are no earlier runs.
    assert page(folder).count("<figcaption>3 saved runs and this run<") == 1


def test_bad_files_are_one_line(folder: Folder) -> None:
    for name, content, said in [
        ("now.json", "", "now.json: not JSON"),
        ("now.json", '{"gpumem": {"schema": 99}}', "now.json: $.gpumem.schema: 99"),
        ("past/x.json", '{"gpumem": {"rows": 3}}', "x.json: "),
    ]:
        (folder.path / "past").mkdir(exist_ok=True)
        folder.write("now.json", [folder.row()])
        folder.put(name, content)
        result = report(folder, "now.json", "--base", "past")
        assert result.exit_code == 4
        assert len(result.output.splitlines()) == 1
        assert said in result.output
        assert not (folder.path / "now.html").exists()


def test_bad_arguments_are_one_line(folder: Folder) -> None:
    for arguments, said in [
        (("none.json",), "none.json: No such file"),
        (("now.json", "-o", "no/x.html"), "there is no folder"),
        (("now.json", "-o", "now.json"), "is RESULTS itself"),
        (("now.json", "--base", "none"), "no such file, folder or pattern"),
    ]:
        (folder.path / "past").mkdir(exist_ok=True)
        before = folder.write("now.json", [folder.row()])
        content = (folder.path / before).read_text()
        result = report(folder, *arguments)
        assert result.exit_code == 4
        assert len(result.output.splitlines()) == 1
        assert said in result.output
        assert (folder.path / "now.json").read_text() == content


def test_a_device_is_not_read_without_end() -> None:
    done = CliRunner().invoke(main, ["compare", "/dev/zero", "/dev/zero"])
    assert (done.exit_code, done.output.count("\n")) == (4, 1)
    assert "/dev/zero: a device" in done.output


# Against other results


def test_a_report_against_other_results_has_their_latencies_and_changes(folder: Folder) -> None:
    folder.write("base.json", [folder.row(name="test_a"), folder.row(name="test_gone")])
    folder.write("head.json", [folder.row(300e-6, name="test_a")])
    done = CliRunner().invoke(main, ["report", "head.json", "--base", "base.json"])
    assert done.exit_code == 0, done.output
    text = (folder.path / "head.html").read_text()
    assert re.search(r">268\.\d us</td>.*>\+1\d\.\d %</td>", text)
    assert "test_gone" in text
    assert "not in head.json" in text
