"""`gpumem report`: a page from a result file, and files for other programs."""

from __future__ import annotations

from click.testing import CliRunner, Result
from result_files import Folder

from pytest_gpumem.cli import main
from pytest_gpumem.records.row import LOST, Omission


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


def test_a_page_has_what_was_not_judged(folder: Folder) -> None:
    lost = Omission("tests/test_a.py::test_gone", "", LOST, "it is no longer collected")
    folder.write("now.json", [folder.row()], missing=[lost])
    assert report(folder, "now.json").exit_code == 0
    assert "lost: tests/test_a.py::test_gone: it is no longer collected" in page(folder)


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


def test_bad_files_are_one_line(folder: Folder) -> None:
    for name, content, said in [
        ("now.json", "", "now.json: not JSON"),
        ("now.json", '{"gpumem": {"schema": 99}}', "now.json: $.gpumem.schema: 99"),
        ("now.json", '{"gpumem": {"rows": 3}}', "now.json: "),
    ]:
        folder.write("now.json", [folder.row()])
        folder.put(name, content)
        result = report(folder, "now.json")
        assert result.exit_code == 4
        assert len(result.output.splitlines()) == 1
        assert said in result.output
        assert not (folder.path / "now.html").exists()


def test_bad_arguments_are_one_line(folder: Folder) -> None:
    for arguments, said in [
        (("none.json",), "none.json: No such file"),
        (("now.json", "-o", "no/x.html"), "there is no folder"),
        (("now.json", "-o", "now.json"), "is RESULTS itself"),
        (("now.json", "--csv", "x", "--json", "x"), "x: is the file of --csv"),
    ]:
        before = folder.write("now.json", [folder.row()])
        content = (folder.path / before).read_text()
        result = report(folder, *arguments)
        assert result.exit_code == 4
        assert len(result.output.splitlines()) == 1
        assert said in result.output
        assert (folder.path / "now.json").read_text() == content


def test_a_device_is_not_read_without_end() -> None:
    done = CliRunner().invoke(main, ["report", "/dev/zero", "-o", "page.html"])
    assert (done.exit_code, done.output.count("\n")) == (4, 1)
    assert "/dev/zero: a device" in done.output
