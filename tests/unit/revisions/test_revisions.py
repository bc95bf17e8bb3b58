"""Ancestry of stored revisions, in a repository made for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from committing import git

from pytest_gpumem.revisions import RevisionError, ancestry, files_at, head, of_no_hook


class Repository:
    """A repository with commits that are named by their messages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> str:
        return git(self.folder, *arguments)

    def commit(self, message: str) -> str:
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def test_a_hook_of_another_repository(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git names its own repository in variables, for every folder."""
    other = Repository(tmp_path / "other")
    own, _ = repository.commit("one"), other.commit("other")
    (repository.folder / "tests").mkdir()
    for name, value in {
        "DIR": other.folder / ".git",
        "INDEX_FILE": other.folder / ".git" / "index.lock",
        "WORK_TREE": other.folder,
    }.items():
        monkeypatch.setenv(f"GIT_{name}", str(value))
    assert head(repository.folder / "tests") == own
    settings = {
        "GIT_CONFIG_COUNT": "1",
        "PREFIX": "/usr",
    }  # such as safe.directory, and what is not git's
    assert of_no_hook({"GIT_DIR": "a", **settings}) == settings


def test_only_what_the_merge_base_has_in_its_history_is_base(repository: Repository) -> None:
    first, fork = repository.commit("first"), repository.commit("fork")
    repository.git("checkout", "-q", "-b", "feature")
    own = repository.commit("own")
    repository.git("checkout", "-q", "main")
    later = repository.commit("later")
    repository.git("checkout", "-q", "feature")
    stored = {first, fork[:12], own, later, "0" * 40, "not a commit", "--output=x", "HEAD"}
    found = ancestry("main", stored, repository.folder)
    assert found.merge_base == fork
    assert found.base == {first, fork[:12]}
    assert found.unknown == {"0" * 40, "not a commit", "--output=x", "HEAD"}
    assert not (repository.folder / "x").exists()


def test_the_files_of_a_folder_that_are_as_in_a_commit(repository: Repository) -> None:
    folder = repository.folder / "below" / "kept"
    (folder / "deeper").mkdir(parents=True)
    for name in ("a.json", "\u00e9 \n.json", "deeper/c.json"):
        (folder / name).write_text("{}")
    repository.git("add", ".")
    with_files = repository.commit("files")
    (folder / "later.json").write_text("{}")
    (folder / "a.json").write_text("[]")
    names = {"\u00e9 \n.json"}
    assert names <= files_at(with_files, Path("kept"), folder.parent) <= {*names, "deeper"}
    assert files_at(with_files, Path("nowhere"), folder.parent) == frozenset()
    with pytest.raises(RevisionError):
        files_at("0" * 40, Path("kept"), folder.parent)


def test_a_shallow_clone_knows_less(repository: Repository, tmp_path: Path) -> None:
    first, second = repository.commit("first"), repository.commit("second")
    repository.git(
        "clone", "-q", "--depth", "1", repository.folder.as_uri(), str(tmp_path / "shallow")
    )
    found = ancestry("main", {first, second}, tmp_path / "shallow")
    assert (found.base, found.unknown) == (frozenset({second}), frozenset({first}))


def test_without_a_common_history_a_shallow_clone_is_said(
    repository: Repository, tmp_path: Path
) -> None:
    repository.commit("first")
    repository.git("checkout", "-q", "--orphan", "feature")
    repository.commit("other")
    with pytest.raises(RevisionError, match=r"^HEAD and 'main' have no history in common$"):
        ancestry("main", set(), repository.folder)
    shallow = ("--depth", "1", "--no-single-branch")
    repository.git("clone", "-q", *shallow, repository.folder.as_uri(), str(tmp_path / "shallow"))
    with pytest.raises(RevisionError, match=r"\(this clone is shallow: fetch its history\)$"):
        ancestry("origin/main", set(), tmp_path / "shallow")


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(RevisionError, match="is in no git repository"):
        ancestry("main", set(), tmp_path)
    assert head(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RevisionError, match="git is not installed"):
        ancestry("main", set(), tmp_path)


def test_head(repository: Repository) -> None:
    (repository.folder / "file").write_text("1")
    repository.git("add", "file")
    commit = repository.commit("first")
    assert head(repository.folder) == commit
    (repository.folder / "other").write_text("untracked")
    assert head(repository.folder) == commit
    (repository.folder / "file").write_text("2")
    assert head(repository.folder) == f"{commit}-dirty"
