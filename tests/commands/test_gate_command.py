"""`gpumem gate`: mistakes are one line, before anything is run or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from committing import commit

from pytest_gpumem.cli import main
from pytest_gpumem.commands import gate


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit without files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    commit(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["gate", *arguments], prog_name="gpumem")


def contents(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if ".git" not in path.parts)
    return {path: path.read_bytes() for path in paths if path.is_file()}


@pytest.mark.parametrize(
    "output",
    [
        "link",
        "marked",
    ],
)
def test_a_folder_that_is_not_the_gates_is_refused_untouched(repository: Path, output: str) -> None:
    for name in ("mine", "marked", "ours"):
        (repository / name).mkdir()
    (repository / "link").symlink_to("mine")
    for name in (".gitignore", *gate.FILES):
        for folder in (repository, repository / "mine"):
            (folder / name).write_text("mine")
    (repository / "marked" / gate.RESULTS).write_text("mine")
    before = contents(repository)
    result = run("main", "--output", output)
    assert result.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"gpumem: --output: {output} holds files that no gate wrote; accepted is"
    )
    assert contents(repository) == before


def test_a_base_that_git_does_not_know_touches_nothing(repository: Path) -> None:
    result = run("nope")
    assert result.exit_code == 4
    assert result.stderr.startswith("gpumem: BASE nope is no revision of ")
    assert "accepted is a git revision such as main" in result.stderr
    assert contents(repository) == {}


def test_a_folder_outside_of_git_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("main")
    assert result.exit_code == 4
    assert result.stderr == f"gpumem: {tmp_path} is in no git repository\n"


def test_mistakes_are_one_line(repository: Path) -> None:
    for arguments, words in [
        (
            ["--", "--benchmark-json=x"],
            "--benchmark-json=x among pytest's arguments: the gate writes into gpumem-results",
        ),
        (["--", "--gpumem-save"], "a gate saves nothing into a baseline"),
        (["--max-regression", "2"], "--max-regression: '2'"),
        (["--output", "calls"], "--output"),
        (["--base-python", "none/python"], f"--base-python {repository}/none/python: No such file"),
    ]:
        (repository / "calls").write_text("a file")
        result = run("main", *arguments)
        assert result.exit_code == 4, arguments
        lines = [
            line for line in result.stderr.splitlines() if not line.startswith("gpumem gate: ")
        ]
        assert len(lines) == 1, arguments
        assert words in lines[0], arguments
