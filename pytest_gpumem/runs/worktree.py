"""The two sides of a duet: where their tests run, and by which interpreter.

Base is a git revision, in a worktree that is removed at the end. Head is the working tree. Both run
in this environment, unless the caller names the interpreter of another one for base. In this one,
modules of the worktree come before installed ones, which are those of head.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.revisions import RevisionError, git
from pytest_gpumem.runs import RunError

PREFIX = "gpumem-duet-"  # of the names of temporary folders
SOURCES = (".py", ".pyx", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".toml", ".ini", ".cfg")
"""Endings of untracked files that belong to the state of a tree, unlike files that tests write."""
LAST_CHARACTERS = 1500  # of a failed command's output that are kept


class NoFolder(RunError):
    """A commit has no such folder as the one where the command was called."""


@dataclass(frozen=True)
class Side:
    """One side, ready to run."""

    title: str  # for people: "revision main (1a2b3c4d5e)"
    identity: str  # another state of the code has another identity
    folder: Path  # where pytest runs
    root: Path  # the tree around it, of which the other side may import nothing
    python: str  # the interpreter
    imports: tuple[Path, ...] = ()  # folders whose modules come before installed ones
    environment: Path | None = None  # None: this one


@contextmanager
def two_sides(base: str, here: Path, *, python: str | None = None) -> Iterator[tuple[Side, Side]]:
    """Base and head, ready to run.

    `base`: a git revision of the project around `here`, the folder of the call.
    `python`: the interpreter of base; None: this one.
    Raises `RunError`: a side does not exist or cannot be prepared.
    """
    here = here.resolve()
    commit = commit_of(base, here)
    head = working_tree(here)
    title = f"revision {base} ({commit[:10]})"
    with revision_side(commit, here, title, name=f"BASE {base}", python=python) as side:
        yield side, head


@contextmanager
def revision_side(
    commit: str, here: Path, title: str, *, name: str = "BASE", python: str | None = None
) -> Iterator[Side]:
    """A commit, ready to run in the folder that is `here` in the working tree.

    `name`: of the revision, for errors. `python`: as of `two_sides`.
    Raises `RunError`: it cannot be prepared.
    """
    top = _top(here)
    assert top is not None  # its commit was looked up
    below = here.resolve().relative_to(top)
    environment = None if python is None else _environment_of(python)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as temporary:
        tree = Path(temporary).resolve() / "tree"
        try:
            _git(top, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            folder = tree / below
            if not folder.is_dir():
                raise NoFolder(f"{name} has no folder {below}, where this was called")
            imports = (tree, tree / "src") if python is None else ()
            python = python or sys.executable
            yield Side(title, commit, folder, tree, python, imports, environment)
        finally:
            _git_if_any(top, "worktree", "remove", "--force", "--force", str(tree))


def working_tree(here: Path) -> Side:
    """The working tree as it is, in this environment."""
    here = here.resolve()
    title, identity = _state(here)
    return Side(title, identity, here, _top(here) or here, sys.executable)


# Git


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints. Raises `RunError`: it fails."""
    # A hook of the project's is no part of a checkout.
    words = ["-c", "core.hooksPath=/dev/null", *arguments]
    try:
        return git(folder, words, f"git {arguments[0]}", seconds=None)
    except RevisionError as error:
        raise RunError(str(error)) from None


def _git_if_any(folder: Path, *arguments: str) -> str:
    """Return what git prints; nothing if it fails."""
    try:
        return _git(folder, *arguments)
    except RunError:
        return ""


def _top(folder: Path) -> Path | None:
    """The working tree around a folder; None outside a repository."""
    path = _git_if_any(folder, "rev-parse", "--show-toplevel").rstrip("\n")
    return Path(path).resolve() if path else None


def commit_of(base: str, here: Path) -> str:
    """The commit of a revision. Raises `RunError`: it is none."""
    accepted = "accepted is a git revision such as main, v1.2 or HEAD~1"
    if not base:
        raise RunError(f"BASE is empty; {accepted}")
    reason = ""
    if not base.startswith("-"):
        commit = _git_if_any(here, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}")
        if commit:
            return commit.strip()
        try:
            _git(here, "rev-parse", "--show-toplevel")
        except RunError as error:  # such as "detected dubious ownership"
            reason = f" ({error})"
    raise RunError(f"BASE {base} is no revision of {here}{reason}; {accepted}")


def _state(folder: Path) -> tuple[str, str]:
    """A tree in words, and its identity: the commit and what differs from it."""
    top = _top(folder)
    if top is None:
        return f"folder {folder}", ""
    commit, changes = _git_if_any(top, "rev-parse", "--verify", "--quiet", "HEAD").strip(), ""
    if commit:
        changes = _git(top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    digest = hashlib.sha256(os.fsencode(changes))
    dirty = bool(changes)
    for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        path = top / name
        if path.suffix in SOURCES and path.is_file():
            digest.update(os.fsencode(f"{name}\0") + path.read_bytes() + b"\0")
            dirty = True
    title = f"working tree at {commit[:10] or 'no commit'}"
    if dirty:
        title += ", with uncommitted changes"
    return title, f"{commit}-{digest.hexdigest()}"


# Environments


def _environment_of(python: str) -> Path:
    """The environment of an interpreter that the caller names. Raises `RunError`: it is none."""
    # A caller's path is for its code, and an outer environment is not the new one.
    variables = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME"):
        variables.pop(name, None)
    command = [python, "-c", "import sys, pytest, pytest_gpumem; print(sys.prefix)"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=variables, check=False
        )
    except OSError as error:
        why = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return Path(done.stdout.strip())
        words = " ".join(done.stderr[-LAST_CHARACTERS:].split())
        why = words or f"exit status {done.returncode}"
    raise RunError(
        f"--base-python {python}: {why}; accepted is the interpreter of an environment with pytest "
        "and pytest-gpumem, such as base-venv/bin/python"
    )


# Paths of the other side


def moved_word(word: str, side: Side, tree: Side) -> str:
    """A word of a command line, in which a path inside `tree` becomes the same place of `side`."""
    option, equals, value = "", "", word
    if word.startswith("-"):
        option, equals, value = word.partition("=")
    if side.root == tree.root or not os.path.isabs(value):
        return word
    real = Path(os.path.realpath(value))
    if not real.is_relative_to(tree.root):
        return word
    return f"{option}{equals}{side.root / real.relative_to(tree.root)}"


def python_path(environment: Mapping[str, str], side: Side, others: Sequence[Side]) -> str | None:
    """PYTHONPATH for a side, with entries inside another tree at the same places of the side.

    None for no such variable.
    """
    written = environment.get("PYTHONPATH")
    entries = [str(folder) for folder in side.imports]
    for entry in (written or "").split(os.pathsep):
        moved = entry
        for other in others:
            moved = moved_word(moved, side, other)
        if moved:
            entries.append(moved)
    return os.pathsep.join(entries) if entries else written
