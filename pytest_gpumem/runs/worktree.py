"""The two sides of a duet: where their tests run, and by which interpreter.

Base is a git revision, in a worktree that is removed at the end, and head the working tree.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.outcomes import UserError
from pytest_gpumem.revisions import RevisionError, commit_of, git, of_no_hook

PREFIX = "gpumem-duet-"  # of the names of temporary folders
SOURCES = (".py", ".pyx", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".toml", ".ini", ".cfg")
"""Endings of untracked files that belong to the state of a tree, unlike files that tests write."""
LAST_CHARACTERS = 1500  # of a failed command's output that are kept


@dataclass(frozen=True)
class Side:
    title: str  # for people: "revision main (1a2b3c4d5e)"
    identity: str  # another state of the code has another identity
    folder: Path  # where pytest runs
    root: Path  # the tree around it, of which the other side may import nothing
    python: str
    imports: tuple[Path, ...] = ()  # folders whose modules come before installed ones
    environment: Path | None = None  # None: this one


@contextmanager
def two_sides(base: str, here: Path, *, python: str | None = None) -> Iterator[tuple[Side, Side]]:
    """Base, a git revision of the project around `here`, and head, ready to run.

    `python`: the interpreter of base. Raises `UserError`: a side cannot be prepared.
    """
    commit = commit_of(base, here)
    head = working_tree(here)
    title = f"revision {base} ({commit[:10]})"
    with revision_side(commit, here, title, python=python) as side:
        yield side, head


@contextmanager
def revision_side(
    commit: str, here: Path, title: str, *, python: str | None = None
) -> Iterator[Side]:
    """A commit, ready to run in the folder that is `here` in the working tree.

    Arguments and errors as of `two_sides`.
    """
    top = _top(here)
    below = here.resolve().relative_to(top)
    environment = None if python is None else _environment_of(python)
    with tempfile.TemporaryDirectory(prefix=PREFIX) as temporary:
        tree = Path(temporary).resolve() / "tree"
        try:
            _git(top, "worktree", "add", "--detach", "--quiet", str(tree), commit)
            folder = tree / below
            folder.mkdir(parents=True, exist_ok=True)  # a new one has no tests in base
            imports = (tree, tree / "src") if python is None else ()
            python = python or sys.executable
            yield Side(title, commit, folder, tree, python, imports, environment)
        finally:
            with suppress(RevisionError):  # it was not made
                _git(top, "worktree", "remove", "--force", "--force", str(tree))


def working_tree(here: Path) -> Side:
    """The working tree as it is. Raises `RevisionError`: it is not within a repository of git."""
    here = here.resolve()
    top = _top(here)
    commit = _git(top, "rev-parse", "HEAD").strip()
    changes = _git(top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv")
    digest, dirty = hashlib.sha256(os.fsencode(changes)), bool(changes)
    for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").split("\0"):
        path = top / name
        if path.suffix in SOURCES and path.is_file():
            digest.update(os.fsencode(f"{name}\0") + path.read_bytes() + b"\0")
            dirty = True
    title = f"working tree at {commit[:10]}"
    if dirty:
        title += ", with uncommitted changes"
    return Side(title, f"{commit}-{digest.hexdigest()}", here, top, sys.executable)


# Git


def _git(folder: Path, *arguments: str) -> str:
    """Return what git prints. Raises `RevisionError`: it fails."""
    # A hook of the project's is no part of a checkout.
    words = ["-c", "core.hooksPath=/dev/null", *arguments]
    return git(folder, words, f"git {arguments[0]}", seconds=None)


def _top(folder: Path) -> Path:
    return Path(_git(folder, "rev-parse", "--show-toplevel").rstrip("\n")).resolve()


# Environments


def _environment_of(python: str) -> Path:
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
    raise UserError(
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


def environment_of(
    side: Side, others: Sequence[Side], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return variables of a process that measures a side and sees no other one."""
    entries = [str(folder) for folder in side.imports]
    for entry in environment.get("PYTHONPATH", "").split(os.pathsep):
        moved = entry
        for other in others:
            moved = moved_word(moved, side, other)
        if moved:
            entries.append(moved)
    variables = of_no_hook(environment) if others else dict(environment)
    if entries:
        variables["PYTHONPATH"] = os.pathsep.join(entries)
    return variables
