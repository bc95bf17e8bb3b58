"""The two sides: what BASE may be, what each side imports, and that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from committing import git
from filelock import FileLock

from pytest_gpumem.runs import RunError
from pytest_gpumem.runs.worktree import (
    LOCK,
    PREFIX,
    Side,
    moved_path,
    moved_word,
    remove_leftovers,
    two_sides,
)

ROOT = Path(__file__).parents[3]
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
    git(folder, "init", "-q", "-b", "main")
    (folder / "sub" / "keep").write_text("")
    (folder / ".gitignore").write_text("ignored.py\n__pycache__\n")
    for value in (1, 2):
        (folder / "mine.py").write_text(f"VALUE = {value}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", str(value))
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


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
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
    with (
        pytest.raises(RunError, match="BASE main has no folder new"),
        two_sides("main", repository / "new"),
    ):
        pass
    assert worktrees(repository) == 1


@pytest.mark.parametrize("base", ["no-such-branch", "../nowhere", "--upload-pack=x", "HEAD~9"])
def test_a_base_that_is_nothing_is_named(repository: Path, base: str) -> None:
    with (
        pytest.raises(
            RunError, match=r"is no revision of .*; accepted is a git revision such as main"
        ) as error,
        two_sides(base, repository),
    ):
        pass
    assert f"BASE {base} " in str(error.value)
    assert worktrees(repository) == 1


def test_gits_own_words_say_why_it_is_no_revision(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match=r"BASE main is no revision of .*fatal: not a git repository"),
        two_sides("main", tmp_path),
    ):
        pass


def test_the_identity_follows_the_code_and_nothing_else(repository: Path) -> None:
    journal = repository / "journal.toml"
    with two_sides("main", repository, [journal]) as (_, head):
        journal.write_text("x")
        (repository / "ignored.py").write_text("x")
        (repository / "result.json").write_text("x")
        assert head.current() == head.identity
        changes: list[Callable[[], object]] = [
            lambda: (repository / "new.cu").write_text("x"),
            lambda: (repository / "mine.py").write_text("VALUE = 7\n"),
            lambda: git(repository, "commit", "-qam", "7"),
        ]
        states = {head.identity}
        for change in changes:
            change()
            states.add(head.current())
        assert len(states) == 4


def test_what_a_killed_duet_left_is_removed_and_what_a_running_one_has_is_not(
    repository: Path,
) -> None:
    program = (
        "import os, sys; from pathlib import Path; from pytest_gpumem.runs.worktree import two_sides\n"
        "with two_sides('main', Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(repository)], cwd=ROOT)
    assert done.returncode == -9
    assert worktrees(repository) == 2
    with two_sides("main", repository) as (base, _):
        assert worktrees(repository) == 2
        assert len(temporary(repository)) == 1
        remove_leftovers(repository)
        assert base.folder.is_dir()
    assert worktrees(repository) == 1


def test_a_program_that_outlives_a_killed_duet_keeps_its_folder_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else git or pip would write a part of the folder again after its removal, and nobody would know whose it is."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    program = (
        "from contextlib import ExitStack; from pytest_gpumem.runs import worktree\n"
        "with ExitStack() as stack: worktree.temporary_folder(stack); worktree._run(['sh', '-c', 'kill -9 $PPID; cat'])"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE)
    assert killed.wait() == -9
    (folder,) = tmp_path.glob(f"{PREFIX}*")
    remove_leftovers()
    assert folder.is_dir()
    assert killed.stdin is not None
    killed.stdin.close()
    with FileLock(folder / LOCK, timeout=30):
        pass
    remove_leftovers()
    assert not folder.exists()


def test_folders_of_killed_duets_are_removed_where_git_knows_of_none(repository: Path) -> None:
    """Such as the results of a process."""
    program = (
        "import os; from contextlib import ExitStack\n"
        "from pytest_gpumem.runs.worktree import temporary_folder\n"
        "with ExitStack() as stack:\n"
        "    (temporary_folder(stack) / 'process-1').mkdir(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == -9
    # A link of somebody's is no folder of a duet's: nothing is written behind it.
    link = repository.parent / f"{PREFIX}link"
    link.symlink_to(repository / "sub")
    killed = set(temporary(repository)) - {link}
    with two_sides("main", repository):
        (running,) = set(temporary(repository)) - {link}
        assert running not in killed
        with two_sides("main", repository):
            assert len(set(temporary(repository)) - {link}) == 2
    assert temporary(repository) == [link]
    assert [path.name for path in (repository / "sub").iterdir()] == ["keep"]


@pytest.mark.parametrize("place", ["home", "."])
def test_a_folder_of_the_users_is_left_alone_whatever_its_name(
    repository: Path, place: str
) -> None:
    """A worktree with work in it, in a folder that is called as those of duets are: elsewhere, and among temporary files."""
    mine = repository.parent / place / f"{PREFIX}experiments"
    (mine / "one").mkdir(parents=True)
    git(repository, "worktree", "add", "-q", str(mine / "one" / "tree"), "-b", "work")
    for file in (mine / "one" / "tree" / "work.py", mine / "notes.md"):
        file.write_text("not committed")
    before = sorted(mine.rglob("*"))
    with two_sides("main", repository):
        pass
    assert sorted(mine.rglob("*")) == before
    assert worktrees(repository) == 2


def test_a_copy_of_a_killed_duets_folder_is_the_users(repository: Path) -> None:
    with two_sides("main", repository):
        (made,) = temporary(repository)
        copy = made.with_name(f"{PREFIX}copy")
        shutil.copytree(made, copy)
    with two_sides("main", repository):
        pass
    assert copy.is_dir()


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


def test_a_project_is_installed_into_an_environment_of_its_own(project: Path) -> None:
    with two_sides("main", project) as (base, head):
        assert head.python == sys.executable
        assert base.names == ("mine",)
        assert seen(base, "mine.VALUE") == "base"
        # Everything else is this environment's, and comes after the project's own.
        done = subprocess.run(
            [base.python, "-c", "import pytest, numpy, rich; print(numpy.__file__)"],
            capture_output=True,
            text=True,
        )
        import numpy as np

        assert done.stdout.strip() == np.__file__, done.stderr
        # An absolute path into head becomes the same place in base.
        moved = moved_path(
            {"PYTHONPATH": os.pathsep.join([str(project / "src"), "/elsewhere", "rel"])},
            base,
            head.root,
        )
        assert moved == os.pathsep.join([str(base.root / "src"), "/elsewhere", "rel"])
        here = project.resolve()
        assert (
            moved_word(f"{here}/test_a.py::test[x/y]", base, head)
            == f"{base.root}/test_a.py::test[x/y]"
        )
        assert moved_word(f"--rootdir={here}", base, head) == f"--rootdir={base.root}"
        for same in ("test_a.py::test", "/elsewhere/test_a.py", "-k", "--gpumem-mode=hot", "a=b"):
            assert moved_word(same, base, head) == same
        assert moved_word(f"{here}/test_a.py", head, head) == f"{here}/test_a.py"
    assert not temporary(project)


def test_an_environment_that_the_caller_names_runs_base(project: Path) -> None:
    """Nothing is installed then."""
    with two_sides("main", project, python=sys.executable) as (base, _):
        assert base.python == sys.executable
        assert base.environment == Path(sys.prefix)
        assert base.names == ()
    for python, why in (("none/python", "No such file"), (shutil.which("false"), "exit status 1")):
        with (
            pytest.raises(RunError, match=rf"--base-python {python}: {why}.*; accepted is"),
            two_sides("main", project, python=python),
        ):
            pass
    assert worktrees(project) == 1


def test_a_project_that_cannot_be_installed_is_an_error_with_pips_words(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (project / "pyproject.toml").write_text(PROJECT + "packages = 1\n")
    git(project, "commit", "-qam", "broken")
    with (
        pytest.raises(RunError, match=r"BASE main cannot be installed: .*packages"),
        two_sides("main", project),
    ):
        pass
    assert worktrees(project) == 1


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs this project's own repository")
def test_this_projects_base_takes_its_own_kernels() -> None:
    program = "from pytest_gpumem.kernels import sources; import pytest_gpumem; print(sources.folder(), pytest_gpumem.__file__)"
    with two_sides("HEAD", ROOT) as (base, _):
        for above in (
            [],
            [str(base.folder)],
        ):  # installed, and from the tree as python -m pytest has it
            code = f"import sys; sys.path[:0] = {above!r}; {program}"
            done = subprocess.run(
                [base.python, "-I", "-c", code], capture_output=True, text=True, cwd="/"
            )
            assert done.returncode == 0, done.stderr
            assert all(
                Path(path).is_relative_to(base.folder.parent) for path in done.stdout.split()
            ), done.stdout
