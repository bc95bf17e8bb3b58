"""The two sides of a duet: where their tests run, and by which interpreter.

Base is a git revision, in a worktree that is removed at the end. Head is the working tree. Both run
in this environment, unless the caller names the interpreter of another one for base. In this one,
modules of the worktree come before installed ones, which are those of head.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_gpumem.revisions import of_no_hook
from pytest_gpumem.runs import RunError

PREFIX = "gpumem-duet-"  # of the names of temporary folders
LOCK = "lock"  # file of a temporary folder: its owner locks it
OWNER = "made-by-gpumem-duet"  # file of a temporary folder: the folder's path, written once locked
TREE = Path("base", "tree")  # in a temporary folder: the worktree of a revision
SOURCES = (".py", ".pyx", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".toml", ".ini", ".cfg")
"""Endings of untracked files that belong to the state of a tree, unlike files that tests write."""
LAST_CHARACTERS = 1500  # of a failed command's output that are kept
_LOCKS: list[int] = []
"""Locks of this process's temporary folders. git inherits them: it outlives a killed duet."""


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
    current: Callable[[], str]  # the identity now
    imports: tuple[Path, ...] = ()  # folders whose modules come before installed ones
    environment: Path | None = None  # its environment; None: this one


@contextmanager
def two_sides(
    base: str, here: Path, ignored: Iterable[Path] = (), *, python: str | None = None
) -> Iterator[tuple[Side, Side]]:
    """Base and head, ready to run. What is made for them is removed at the end.

    `base`: a git revision of the project around `here`, the folder of the call.
    `ignored`: files whose content is no part of the tree's state, such as an output.
    `python`: the interpreter of base; None: this one.
    Raises `RunError`: a side does not exist or cannot be prepared.
    """
    here = here.resolve()
    commit = commit_of(base, here)
    head = working_tree(here, ignored)
    title = f"revision {base} ({commit[:10]})"
    with revision_side(commit, here, title, name=f"BASE {base}", python=python) as side:
        yield side, head


@contextmanager
def revision_side(
    commit: str, here: Path, title: str, *, name: str = "BASE", python: str | None = None
) -> Iterator[Side]:
    """A commit, ready to run in the folder that is `here` in the working tree.

    `title`: of the side, for people. `name`: of the revision, for errors.
    `python`: as of `two_sides`.
    Raises `RunError`: it cannot be prepared.
    """
    with ExitStack() as stack:
        with _readable():
            temporary = temporary_folder(stack)
            tree, folder = _worktree(commit, here.resolve(), temporary, stack, name)
            imports: tuple[Path, ...] = (tree, tree / "src")
            environment = None
            if python is not None:
                imports, environment = (), _environment_of(python)
            remove_leftovers()
        yield Side(
            title,
            commit,
            folder,
            tree,
            python or sys.executable,
            lambda: commit,
            imports,
            environment,
        )


@contextmanager
def _readable() -> Iterator[None]:
    """Turn a file that cannot be read or written into a `RunError`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"base and head cannot be prepared: {error}") from None


def in_this_environment(folder: Path, title: str = "working tree") -> Side:
    """A side that is measured alone, as it is: its code has no identity."""
    return Side(title, "", folder, folder, sys.executable, str)


def working_tree(here: Path, ignored: Iterable[Path] = ()) -> Side:
    """The working tree as it is, in this environment. `ignored`: as of `two_sides`."""
    here = here.resolve()
    left_out = tuple(path.resolve() for path in ignored)
    root = _top(here) or here
    with _readable():
        title, identity = _state(here, left_out)
    return Side(title, identity, here, root, sys.executable, lambda: _state(here, left_out)[1])


# Temporary folders


def temporary_folder(stack: ExitStack) -> Path:
    """A folder that is removed at the end.

    It is locked while its owner, or a program that writes into it for its owner, runs.
    """
    folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _LOCKS.append(lock)
    stack.callback(os.close, lock)
    stack.callback(_LOCKS.remove, lock)
    # From here on, a free lock means that nobody uses the folder.
    (folder / OWNER).write_bytes(os.fsencode(folder))
    return folder


def remove_leftovers(top: Path | None = None) -> None:
    """Remove the temporary folders of killed duets.

    `top`: of a repository, of which git's entries for their worktrees are removed too.
    """
    temporary = Path(tempfile.gettempdir()).resolve()
    for folder in temporary.glob(f"{PREFIX}*"):
        if _abandoned(folder, temporary):
            shutil.rmtree(folder, ignore_errors=True)
    if top is None:
        return
    listed = _git(top, "worktree", "list", "--porcelain", "-z").stdout.split(b"\0")
    for entry in listed:
        if not entry.startswith(b"worktree "):
            continue
        tree = Path(os.fsdecode(entry.removeprefix(b"worktree ")))
        owner = tree.parent.parent
        made_by_us = owner.parent == temporary and owner.name.startswith(PREFIX)
        if made_by_us and tree == owner / TREE and not os.path.lexists(owner):
            _remove(top, tree)


def _abandoned(folder: Path, temporary: Path) -> bool:
    """True if a duet of this user made a folder, and no process has its lock any more."""
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            return False
        # A copy of such a folder names the place of the original: it is the user's.
        if folder.parent != temporary or (folder / OWNER).read_bytes() != os.fsencode(folder):
            return False
        lock = FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return False
    lock.release()
    return True


# Git


def _git(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    # A hook of the project's is no part of a checkout.
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, env=of_no_hook(os.environ), pass_fds=_LOCKS, check=False
        )
    except FileNotFoundError:
        raise RunError("git is not installed, and BASE is a git revision") from None
    if check and done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-LAST_CHARACTERS:]
        raise RunError(f"git {' '.join(arguments)}: {words}")
    return done


def _top(folder: Path) -> Path | None:
    """The working tree around a folder; None outside a repository."""
    if shutil.which("git") is None:
        return None
    done = _git(folder, "rev-parse", "--show-toplevel", check=False)
    path = os.fsdecode(done.stdout.rstrip(b"\n"))
    return Path(path).resolve() if done.returncode == 0 and path.strip() else None


def commit_of(base: str, here: Path) -> str:
    """The commit of a revision. Raises `RunError`: it is none."""
    accepted = "accepted is a git revision such as main, v1.2 or HEAD~1"
    if not base:
        raise RunError(f"BASE is empty; {accepted}")
    words = ""
    if not base.startswith("-"):
        done = _git(here, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", check=False)
        if done.returncode == 0:
            return done.stdout.decode().strip()
        # git's words, such as "detected dubious ownership" where the folder is another user's.
        top = _git(here, "rev-parse", "--show-toplevel", check=False)
        words = top.stderr.decode(errors="replace").strip().partition("\n")[0]
    reason = f" ({words})" if words else ""
    raise RunError(f"BASE {base} is no revision of {here}{reason}; {accepted}")


def _worktree(
    commit: str, here: Path, temporary: Path, stack: ExitStack, name: str
) -> tuple[Path, Path]:
    """A worktree of a commit, and the folder in it that is `here` in the working tree."""
    top = _top(here)
    assert top is not None
    remove_leftovers(top)
    tree = temporary / TREE
    tree.parent.mkdir()
    stack.callback(_remove, top, tree)
    _git(top, "worktree", "add", "--detach", "--quiet", str(tree), commit)
    folder = tree / here.relative_to(top)
    if not folder.is_dir():
        raise NoFolder(f"{name} has no folder {here.relative_to(top)}, where this was called")
    return tree, folder


def _remove(top: Path, tree: Path) -> None:
    """Remove a worktree, entry and folder, if it exists."""
    _git(top, "worktree", "remove", "--force", "--force", str(tree), check=False)
    shutil.rmtree(tree, ignore_errors=True)


def _state(folder: Path, ignored: tuple[Path, ...]) -> tuple[str, str]:
    """A tree in words, and its identity: the commit and what differs from it."""
    top = _top(folder)
    if top is None:
        return f"folder {folder}", ""
    head = _git(top, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    commit = head.stdout.decode().strip()
    changes = b""
    if commit:
        changes = _git(top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv").stdout
    digest = hashlib.sha256(changes)
    dirty = bool(changes)
    for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").stdout.split(b"\0"):
        path = top / os.fsdecode(name)
        if name and path.suffix in SOURCES and path not in ignored and path.is_file():
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
            dirty = True
    title = f"working tree at {commit[:10] or 'no commit'}"
    if dirty:
        title += ", with uncommitted changes"
    return title, f"{commit}-{digest.hexdigest()}"


# Environments


def _environment_of(python: str) -> Path:
    """The environment of an interpreter that the caller names. Raises `RunError`: it is none."""
    program = "import sys, pytest, pytest_gpumem; print(sys.prefix)"
    try:
        done = _run([python, "-c", program])
    except OSError as error:
        why = error.strerror or str(error)
    else:
        if done.returncode == 0:
            return Path(done.stdout.strip())
        why = _words(done)
    raise RunError(
        f"--base-python {python}: {why}; accepted is the interpreter of an environment with pytest "
        "and pytest-gpumem, such as base-venv/bin/python"
    )


def spared() -> list[str]:
    """Folders of this environment's packages, which both sides see, also inside of a tree."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return folders


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # A caller's path is for its code, and an outer environment is not the new one.
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV"):
        environment.pop(name, None)
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
        pass_fds=_LOCKS,
        check=False,
    )


def _words(done: subprocess.CompletedProcess[str]) -> str:
    output = (done.stderr.strip() or done.stdout.strip())[-LAST_CHARACTERS:]
    return " ".join(output.split()) or f"exit status {done.returncode}"


# Paths of the other side


def moved_word(word: str, side: Side, tree: Side) -> str:
    """A word of a command line for a side: a path inside `tree` becomes the same place of the
    side."""
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
    """PYTHONPATH for a side beside others; None for no such variable.

    Entries inside another tree become the same places of the side.
    """
    written = environment.get("PYTHONPATH")
    roots = {other.root for other in others} - {side.root}
    entries = [str(folder) for folder in side.imports]
    if not entries and not (written and roots):
        return written
    for entry in (written or "").split(os.pathsep):
        absolute = Path(entry).resolve()
        moved = entry
        for root in roots:
            if os.path.isabs(entry) and absolute.is_relative_to(root):
                moved = str(side.root / absolute.relative_to(root))
        if moved:
            entries.append(moved)
    return os.pathsep.join(entries)
