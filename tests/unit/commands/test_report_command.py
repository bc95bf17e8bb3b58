"""`gpumem report`: a page from a result file, with the history that a folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from known_devices import H100
from msgspec.structs import replace
from result_files import Folder

from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.l2_sweep import OFF, Change, Point, Setting, Sweep
from pytest_gpumem.records.schema import SWEEPS_KEY, sweeps_from_json, sweeps_to_json

SWEEP = Sweep(
    "reset_data",
    "GPU",
    False,
    8 << 20,
    (Point(OFF, 2e-3, None), Point(Setting(4 << 20, 1.0), 1e-3, 1e-6)),
    51,
    Point(OFF, 2e-3, None),
    Point(Setting(4 << 20, 1.0), 1e-3, 1e-6),
    Change(1.0, 0.9, 1.1),
    (),
)


def report(folder: Folder, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *(a if a.startswith("-") else str(folder.path / a) for a in arguments)])


def page(folder: Folder, name: str = "now.html") -> str:
    return (folder.path / name).read_text()


def test_a_page_beside_the_results(folder: Folder) -> None:
    folder.write("now.json", [folder.row()], mode="hot")
    result = report(folder, "now.json")
    assert (result.exit_code, result.output) == (0, f"wrote {folder.path / 'now.html'}\n")
    for said in ("test_triad", "revision abc", "taken 2026-11-20T18:00:00+00:00", "mode hot"):
        assert said in page(folder)


def test_sweeps_are_drawn(folder: Folder) -> None:
    folder.write("now.json", [folder.row()])
    value = json.loads((folder.path / "now.json").read_text())
    assert sweeps_from_json(sweeps_to_json([("t.py::t", SWEEP)])) == (("t.py::t", SWEEP),)
    folder.put("now.json", {**value, SWEEPS_KEY: sweeps_to_json([("t.py::test_l2", SWEEP)])})
    assert report(folder, "now.json").exit_code == 0
    assert "test_l2: persisting L2 of reset_data" in page(folder)
    folder.put("now.json", {**value, SWEEPS_KEY: [{"nodeid": "t.py::t", "sweep": {"target": 1}}]})
    result = report(folder, "now.json")
    assert result.exit_code == 4
    assert f"$.{SWEEPS_KEY}[0].sweep" in result.output


def test_history_from_results_and_from_a_baseline(folder: Folder) -> None:
    (folder.path / "past").mkdir()
    rows = [folder.row(), folder.row(name="test_new"), folder.row(name="test_hot", mode="hot")]
    folder.write("now.json", rows)
    for index in range(3):
        folder.write(f"past/{index}.json", [folder.row(), folder.row(name="test_hot"), replace(folder.row(name="test_new"), failed=True)])
    Store(folder.path / "past", H100).save([folder.row()], "rev")
    result = report(folder, "now.json", "--history", "past")
    assert result.output.startswith(f"history of 4 files from {folder.path / 'past'}\n")
    text = page(folder)
    # Another mode and failed tests are no history.
    assert text.count("<figcaption>history: 3 files and 1 earlier process<") == 1
    assert "latency over 3 files and 1 earlier process, in" in text


def test_the_run_itself_and_what_does_not_compare_is_no_history(folder: Folder) -> None:
    folder.write("now.json", [folder.row()])
    folder.write("other.json", [folder.row()], facts=replace(H100, name="NVIDIA L4"))
    folder.stock("stock.json", {"tests/test_a.py::test_triad": 1.0})
    folder.put("list.json", [1, 2])
    result = report(folder, "now.json", "--history", "")
    assert result.output.splitlines()[0].endswith(
        f"; 1 file of other devices than {H100.key} left out; 2 files without results of this plugin left out"
    )
    assert result.output.startswith("history of 0 files from")
    assert "history: " not in page(folder)


def test_files_are_not_called_processes(folder: Folder) -> None:
    for name in ("now.json", "other.json"):
        folder.write(name, [folder.row()])
    assert report(folder, "now.json", "--history", "other.json").exit_code == 0
    assert "latency over 1 file, in" in page(folder)
    assert "earlier process" not in page(folder)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("now.json", "", "now.json: not JSON"),
        ("now.json", "[1]", "now.json: holds no results of this plugin"),
        ("now.json", '{"benchmarks": []}', "now.json: holds no results of this plugin"),
        ("now.json", '{"gpumem": {"schema": 99}}', "now.json: $.gpumem.schema: 99"),
        ("now.json", "[" * 100_000, "now.json: not JSON"),
        ("past/x.json", "{", "x.json: not JSON"),
        ("past/x.json", '{"gpumem": {"rows": 3}}', "x.json: "),
        ("past/x.json", '{"schema": 2}', "x.json: "),
    ],
)
def test_bad_files_are_one_line(folder: Folder, name: str, content: str, said: str) -> None:
    (folder.path / "past").mkdir()
    folder.write("now.json", [folder.row()])
    folder.put(name, content)
    result = report(folder, "now.json", "--history", "past")
    assert result.exit_code == 4
    assert len(result.output.splitlines()) == 1
    assert said in result.output
    assert not (folder.path / "now.html").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("none.json",), "none.json: No such file"),
        (("now.json", "-o", "no/x.html"), "there is no folder"),
        (("now.json", "-o", "past"), "it is a folder"),
        (("now.json", "-o", "now.json"), "is RESULTS itself"),
        (("now.json", "--history", "none"), "no such file or folder"),
        (("now.json", "--history", "past"), "a folder without a .json file"),
    ],
)
def test_bad_arguments_are_one_line(folder: Folder, arguments: tuple[str, ...], said: str) -> None:
    (folder.path / "past").mkdir()
    before = folder.write("now.json", [folder.row()])
    content = (folder.path / before).read_text()
    result = report(folder, *arguments)
    assert result.exit_code == 4
    assert len(result.output.splitlines()) == 1
    assert said in result.output
    assert (folder.path / "now.json").read_text() == content


@pytest.mark.parametrize("given", [".", "/", ".."])
def test_a_folder_is_no_result_file(given: str) -> None:
    done = CliRunner().invoke(main, ["report", given])
    assert (done.exit_code, done.output.count("\n")) == (4, 1)
    assert f"{given}: a folder" in done.output


@pytest.mark.parametrize(
    "arguments", [["read", "/dev/zero"], ["report", "/dev/zero", "-o", "x.html"], ["compare", "/dev/zero", "/dev/zero"]]
)
def test_a_device_is_not_read_without_end(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.output.count("\n")) == (4, 1)
    assert "/dev/zero: a device" in done.output


# Against other results


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
