"""The two sides: what BASE may be, what each side imports, and that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from committing import commit, git

from pytest_gpumem.outcomes import UserError
from pytest_gpumem.runs.worktree import (
    PREFIX,
    Side,
    environment_of,
    moved_word,
    two_sides,
    working_tree,
)

PROJECT = """
[project]
name = "mine"
version = "1.0"
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[tool.setuptools]
py-modules = ["mine"]
package-dir = {"" = "src"}
"""


def worktrees(folder: Path) -> int:
    return len(git(folder, "worktree", "list").splitlines())


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits of a module at the top: value 1, then 2."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    folder = tmp_path / "repository"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "keep").write_text("")
    (folder / ".gitignore").write_text("ignored.py\n__pycache__\n")
    for value in (1, 2):
        (folder / "mine.py").write_text(f"VALUE = {value}\n")
        commit(folder, str(value))
    return folder


def seen(side: Side, expression: str) -> str:
    """What an expression about the module gives where the side runs."""
    # Without the present folder, which -c puts on the path and no script does.
    paths = f"sys.path[:] = [{str(side.folder)!r}] + [entry for entry in sys.path if entry]"
    program = f"import sys; {paths}; import mine; print({expression})"
    done = subprocess.run(
        [side.python, "-c", program], cwd=side.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def temporary(repository: Path) -> list[Path]:
    return list(repository.parent.glob(f"{PREFIX}*"))


def test_a_revision_gets_a_worktree_that_is_gone_afterwards(repository: Path) -> None:
    (repository / "mine.py").write_text("VALUE = 3\n")
    with two_sides("HEAD~1", repository) as (base, head):
        assert (seen(base, "mine.VALUE"), seen(head, "mine.VALUE")) == ("1", "3")
        assert base.title.startswith("revision HEAD~1 (")
        assert head.title.endswith("with uncommitted changes")
        assert worktrees(repository) == 2
    assert worktrees(repository) == 1
    assert not temporary(repository)
    assert not list((repository / ".git" / "worktrees").glob("*"))


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt,
    ],
)
def test_so_it_is_after_an_error(repository: Path, error: type[BaseException]) -> None:
    def fail() -> None:
        with two_sides("main", repository) as (base, _):
            (base.folder / "untracked").write_text("")
            raise error

    with pytest.raises(error):
        fail()
    assert worktrees(repository) == 1
    assert not temporary(repository)


def test_called_in_a_folder_below_both_sides_run_there(repository: Path) -> None:
    with two_sides("main", repository / "sub") as (base, head):
        assert (base.folder.name, head.folder) == ("sub", repository / "sub")
        assert base.folder.parent == base.root
    (repository / "new").mkdir()
    with two_sides("main", repository / "new") as (base, _):
        assert list(base.folder.iterdir()) == []
    assert worktrees(repository) == 1


@pytest.mark.parametrize(
    "base",
    [
        "no-such-branch",
        "--upload-pack=x",
    ],
)
def test_a_base_that_is_nothing_is_named(repository: Path, base: str) -> None:
    with (
        pytest.raises(
            UserError, match=r"is no revision of .*; accepted is a git revision such as main"
        ) as error,
        two_sides(base, repository),
    ):
        pass
    assert f"BASE {base} " in str(error.value)
    assert worktrees(repository) == 1


def test_the_identity_follows_the_code_and_nothing_else(repository: Path) -> None:
    with two_sides("main", repository) as (_, head):
        (repository / "ignored.py").write_text("x")
        (repository / "result.json").write_text("x")
        assert working_tree(repository).identity == head.identity
        changes: list[Callable[[], object]] = [
            lambda: (repository / "new.cu").write_text("x"),
            lambda: (repository / "mine.py").write_text("VALUE = 7\n"),
            lambda: git(repository, "commit", "-qam", "7"),
        ]
        states = {head.identity}
        for change in changes:
            change()
            states.add(working_tree(repository).identity)
        assert len(states) == 4


@pytest.fixture
def project(repository: Path) -> Path:
    """The module moved into a project that has to be installed."""
    (repository / "src").mkdir()
    git(repository, "mv", "mine.py", "src/mine.py")
    (repository / "pyproject.toml").write_text(PROJECT)
    (repository / "src" / "mine.py").write_text("VALUE = 'base'\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "project")
    (repository / "src" / "mine.py").write_text("VALUE = 'head'\n")
    return repository


def test_modules_of_a_worktree_come_before_installed_ones(project: Path) -> None:
    """Such as those that are installed for editing, from the working tree."""
    with two_sides("main", project) as (base, head):
        assert base.python == head.python == sys.executable
        environment = {**os.environ, "PYTHONPATH": str(project / "src")}
        for side, other, value in ((base, head, "base"), (head, base, "head")):
            variables = environment_of(side, [other], environment)
            done = subprocess.run(
                [sys.executable, "-c", "import mine; print(mine.VALUE)"],
                cwd=side.folder,
                env=variables,
                capture_output=True,
                text=True,
            )
            assert done.stdout.strip() == value, done.stderr
        assert environment_of(head, [base], {}) == {}
    assert not temporary(project)


def test_a_path_of_head_becomes_the_same_place_of_base(project: Path) -> None:
    with two_sides("main", project, python=sys.executable) as (base, head):
        entries = [str(project / "src"), "/elsewhere", "rel"]
        variables = environment_of(base, [head], {"PYTHONPATH": os.pathsep.join(entries)})
        assert variables["PYTHONPATH"] == os.pathsep.join(
            [str(base.root / "src"), "/elsewhere", "rel"]
        )
        here = project.resolve()
        moved = moved_word(f"{here}/test_a.py::test[x/y]", base, head)
        assert moved == f"{base.root}/test_a.py::test[x/y]"
        assert moved_word(f"--rootdir={here}", base, head) == f"--rootdir={base.root}"
        for same in ("test_a.py::test", "/elsewhere/test_a.py", "-k", "--gpumem-mode=hot", "a=b"):
            assert moved_word(same, base, head) == same
        assert moved_word(f"{here}/test_a.py", head, head) == f"{here}/test_a.py"


def test_an_environment_that_the_caller_names_runs_base(project: Path) -> None:
    with two_sides("main", project, python=sys.executable) as (base, _):
        assert base.python == sys.executable
        assert base.environment == Path(sys.prefix)
        assert base.imports == ()
    for python, why in (("none/python", "No such file"), (shutil.which("false"), "exit status 1")):
        with (
            pytest.raises(UserError, match=rf"--base-python {python}: {why}.*; accepted is"),
            two_sides("main", project, python=python),
        ):
            pass
    assert worktrees(project) == 1
