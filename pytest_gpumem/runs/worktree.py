"""The two sides of a duet: where their tests run, by which interpreter, and the identity of a state of its code.

A side is a git revision (a worktree of its own, removed at the end), a folder, or a wheel. A revision, a wheel, and a folder that is not
the working tree get an environment of their own if they hold a project that can be installed: a virtual environment that sees the
packages of this one, and the project on top. The working tree runs in this environment, as its tests always do.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import site
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from pytest_gpumem.revisions import of_no_hook
from pytest_gpumem.runs import RunError

PREFIX = "gpumem-duet-"  # of the names of temporary folders; `_ours` tells them from folders of users that are called alike
LOCK = "lock"  # in a temporary folder: the file that its owner locks
OWNER = "made-by-gpumem-duet"  # in a temporary folder: the file that names the folder, written once the lock is held
TREE = Path("base", "tree")  # in a temporary folder: the worktree of a revision
SOURCES = (".py", ".pyx", ".cu", ".cuh", ".c", ".cc", ".cpp", ".h", ".hpp", ".toml", ".ini", ".cfg")
"""Endings of untracked files that belong to the state of a tree: code and settings, not files that tests write."""
LAST_CHARACTERS = 1500  # of a failed command's output that are kept
_LOCKS: list[
    int
] = []  # locks of this process's temporary folders. git and pip inherit them, because they outlive a duet that is killed.


class NoFolder(RunError):
    """A commit has no such folder as the one where the command was called."""


@dataclass(frozen=True)
class Side:
    """One side, ready to run."""

    title: str  # for people: "revision main (1a2b3c4d5e)", "working tree at 1a2b3c4d5e, with uncommitted changes"
    identity: str  # another state of the code has another identity
    folder: Path  # where pytest runs
    root: Path  # the tree around it, of which the other side may import nothing
    python: str  # the interpreter
    current: Callable[[], str]  # the identity now
    names: tuple[str, ...] = ()  # top-level modules that its environment brings
    environment: Path | None = None  # its own environment; None: this one
    path_from_cwd: bool = True
    """Modules of `folder` can be imported, as with `python -m pytest`; not of a wheel, whose package they would hide."""


@contextmanager
def two_sides(
    base: str, head: str | None, here: Path, ignored: Iterable[Path] = ()
) -> Iterator[tuple[Side, Side]]:
    """Base and head, ready to run. All that is made for them is removed at the end, whatever ends it.
    `base`: a git revision of the project around `here`, a folder, or a wheel.
    `head`: a folder or a wheel; None: the working tree.
    `here`: the folder in which the command was called.
    `ignored`: files whose content is no part of a tree's state, such as the journal.
    Raises `RunError`: a side that does not exist or cannot be prepared.
    """
    here, left_out = here.resolve(), tuple(path.resolve() for path in ignored)
    with ExitStack() as stack:
        try:
            sides = _sides(base, head, here, left_out, stack)
        except OSError as error:  # such as a file that may not be read
            raise RunError(f"base and head cannot be prepared: {error}") from None
        yield sides


def _sides(
    base: str, head: str | None, here: Path, left_out: tuple[Path, ...], stack: ExitStack
) -> tuple[Side, Side]:
    temporary = held_folder(stack)
    tree = _tree(here, left_out)

    def installed(written: str, place: Path) -> Side:
        path = Path(here, written)
        return (
            _wheel(path, tree, place)
            if written.endswith(".whl")
            else _folder(path.resolve(), place, left_out)
        )

    if head is None or Path(here, head).resolve() == here:
        head_side = tree
    elif Path(here, head).is_dir() or head.endswith(".whl"):
        head_side = installed(head, temporary / "head")
    else:
        raise RunError(
            f"--head {head}: there is no such folder or wheel; accepted is a path, such as . or dist/mine-1.0-py3-none-any.whl"
        )
    kind = _kind(base, here)
    place = temporary / "base"
    base_side = (
        installed(base, place)
        if kind in ("wheel", "folder")
        else _revision(base, kind, here, temporary, stack)
    )
    remove_leftovers()
    return base_side, head_side


@contextmanager
def commit_side(commit: str, here: Path, title: str) -> Iterator[Side]:
    """A commit, ready to run in the folder that is `here` in the working tree; what is made for it is removed at the end.
    `title`: what it is, for messages.
    Raises `RunError`: it cannot be prepared.
    """
    with ExitStack() as stack:
        try:
            side = _revision(
                commit[:10], commit, here.resolve(), held_folder(stack), stack, who=title
            )
        except OSError as error:
            raise RunError(f"{title} {commit[:10]} cannot be prepared: {error}") from None
        yield replace(side, title=f"{title} {commit[:10]}")


def in_this_environment(folder: Path, title: str = "working tree") -> Side:
    """A side that is measured alone, as it is: its code has no identity."""
    return Side(title, "", folder, folder, sys.executable, str)


def working_tree(here: Path, ignored: Iterable[Path] = ()) -> Side:
    """The working tree as it is, in this environment. `ignored`: as for `two_sides`."""
    remove_leftovers()
    return _tree(here.resolve(), tuple(path.resolve() for path in ignored))


def held_folder(stack: ExitStack) -> Path:
    """A temporary folder that is removed at the end. It is locked while its owner, or a program that writes into it for its owner, runs."""
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


def _ours(folder: Path) -> bool:
    """Whether a duet of this user made a folder: a file in it names this very place. No other folder of such a name has it, nor a copy."""
    try:
        about = folder.lstat()
        mine = (
            stat.S_ISDIR(about.st_mode)
            and about.st_uid == os.getuid()
            and folder.parent == _temporary()
        )
        return mine and (folder / OWNER).read_bytes() == os.fsencode(folder)
    except OSError:
        return False


def _temporary() -> Path:
    return Path(tempfile.gettempdir()).resolve()


def _abandoned(folder: Path) -> bool:
    """True if a duet made a folder, and no process has its lock any more."""
    if not _ours(folder):
        return False
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return False
    lock.release()
    return True


def remove_leftovers(top: Path | None = None) -> None:
    """Remove the temporary folders of duets that were killed; of the repository at `top`, also git's entries of their worktrees."""
    for folder in _temporary().glob(f"{PREFIX}*"):
        if _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    listed = (
        _git(top, "worktree", "list", "--porcelain", "-z").stdout.split(b"\0")
        if top is not None
        else []
    )
    for entry in (entry for entry in listed if entry.startswith(b"worktree ")):
        tree = Path(os.fsdecode(entry.removeprefix(b"worktree ")))
        owner = tree.parent.parent
        ours = (
            tree == owner / TREE and owner.parent == _temporary() and owner.name.startswith(PREFIX)
        )
        if top is not None and ours and not os.path.lexists(owner):
            _remove(top, tree)


# Git


def _git(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    # A hook of the project's is no part of a checkout.
    command = ["git", "-c", "core.hooksPath=/dev/null", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, env=of_no_hook(os.environ), pass_fds=_LOCKS, check=False
        )
    except FileNotFoundError:
        raise RunError("git is not installed; without it BASE is a folder or a wheel") from None
    if check and done.returncode:
        raise RunError(
            f"git {' '.join(arguments)}: {done.stderr.decode(errors='replace').strip()[-LAST_CHARACTERS:]}"
        )
    return done


def _top(folder: Path) -> Path | None:
    """The working tree around a folder; None outside a repository."""
    if shutil.which("git") is None:
        return None
    done = _git(folder, "rev-parse", "--show-toplevel", check=False)
    return (
        Path(os.fsdecode(done.stdout.rstrip(b"\n"))).resolve()
        if done.returncode == 0 and done.stdout.strip()
        else None
    )


def _kind(base: str, here: Path) -> str:
    """ "wheel", "folder", or the commit of a revision."""
    path = Path(here, base)
    if base.endswith(".whl"):
        return "wheel"
    if not base:  # as a path, it would be the working directory
        raise RunError("BASE is empty; accepted is such as main, HEAD~1, ../old or old.whl")
    commit = None
    if not base.startswith("-") and _top(here) is not None:
        commit = (
            _git(here, "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", check=False)
            .stdout.decode()
            .strip()
            or None
        )
    if commit is not None and path.is_dir() and not _written_as_path(base):
        raise RunError(
            f"BASE {base} is a revision and a folder: say ./{base} for the folder, or refs/heads/{base} for the branch"
        )
    if path.is_dir() and (commit is None or _written_as_path(base)):
        return "folder"
    if commit is None:
        # Git's own words, such as "detected dubious ownership" where the folder is another user's.
        words = (
            _git(here, "rev-parse", "--show-toplevel", check=False)
            .stderr.decode(errors="replace")
            .strip()
            .partition("\n")[0]
        )
        reason = f" ({words})" if words else ""
        raise RunError(
            f"BASE {base} is no revision of {here}{reason}, no folder and no wheel; accepted is such as main, HEAD~1, ../old or old.whl"
        )
    return commit


def _written_as_path(text: str) -> bool:
    return text.startswith((".", os.sep)) or text.endswith(os.sep)


def _revision(
    name: str, commit: str, here: Path, temporary: Path, stack: ExitStack, who: str = "BASE"
) -> Side:
    tree, folder = _worktree(name, commit, here, temporary, stack, who)
    python, environment, names = _environment(_project(folder, tree), temporary / "base", who)
    return Side(
        f"revision {name} ({commit[:10]})",
        commit,
        folder,
        tree,
        python,
        lambda: commit,
        names,
        environment,
    )


def _worktree(
    name: str, commit: str, here: Path, temporary: Path, stack: ExitStack, who: str = "BASE"
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
        raise NoFolder(f"{who} {name} has no folder {here.relative_to(top)}, where this was called")
    return tree, folder


def _remove(top: Path, tree: Path) -> None:
    """Remove a worktree, entry and folder, if it exists."""
    _git(top, "worktree", "remove", "--force", "--force", str(tree), check=False)
    shutil.rmtree(tree, ignore_errors=True)


# Trees


def _tree(here: Path, ignored: tuple[Path, ...]) -> Side:
    """The working tree, in this environment."""
    root = _top(here) or here
    title, identity = _state(here, ignored)
    return Side(title, identity, here, root, sys.executable, lambda: _state(here, ignored)[1])


def _folder(folder: Path, place: Path, ignored: tuple[Path, ...]) -> Side:
    project = _project(folder, folder)
    if project is not None:
        # A build writes beside its sources.
        copy = place / "source"
        shutil.copytree(
            project,
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".git", ".venv", "venv", "__pycache__"),
        )
        project = copy
    python, environment, names = _environment(project, place, str(folder))
    _, identity = _state(folder, ignored)
    return Side(
        f"folder {folder}",
        identity,
        folder,
        folder,
        python,
        lambda: _state(folder, ignored)[1],
        names,
        environment,
    )


def _wheel(file: Path, tree: Side, place: Path) -> Side:
    try:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise RunError(f"{file}: {error.strerror or error}") from None
    python, environment, names = _environment(file, place, str(file))
    assert environment is not None
    return Side(
        f"wheel {file.name}",
        digest,
        tree.folder,
        environment,
        python,
        lambda: digest,
        names,
        environment,
        path_from_cwd=False,
    )


def _state(folder: Path, ignored: tuple[Path, ...]) -> tuple[str, str]:
    """A tree in words, and its identity: the commit and what differs from it; outside git, names, sizes and times of its sources."""
    top = _top(folder)
    digest = hashlib.sha256()
    if top is None:
        for path in sorted(_sources(folder)):
            found = path.stat()
            digest.update(
                os.fsencode(path.relative_to(folder))
                + f"\0{found.st_size}\0{found.st_mtime_ns}\0".encode()
            )
        return f"folder {folder}", digest.hexdigest()
    commit = (
        _git(top, "rev-parse", "--verify", "--quiet", "HEAD", check=False).stdout.decode().strip()
    )
    changes = (
        _git(top, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv").stdout
        if commit
        else b""
    )
    digest.update(changes)
    untracked = False
    for name in _git(top, "ls-files", "--others", "--exclude-standard", "-z").stdout.split(b"\0"):
        path = top / os.fsdecode(name)
        if name and path.suffix in SOURCES and path not in ignored and path.is_file():
            digest.update(name + b"\0" + path.read_bytes() + b"\0")
            untracked = True
    dirty = ", with uncommitted changes" if changes or untracked else ""
    return f"working tree at {commit[:10] or 'no commit'}{dirty}", f"{commit}-{digest.hexdigest()}"


def _sources(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".") and name not in ("__pycache__", "venv", "build")
        ]
        yield from (
            path
            for name in files
            if name.endswith(SOURCES) and (path := Path(where, name)).is_file()
        )


# Environments


def _project(folder: Path, top: Path) -> Path | None:
    """The project that can be installed: `folder` or the nearest one above it, up to `top`; None if there is none."""
    for candidate in (folder, *folder.parents):
        if (candidate / "setup.py").is_file():
            return candidate
        with suppress(OSError):
            text = (candidate / "pyproject.toml").read_text(encoding="utf-8", errors="replace")
            if re.search(r"^\[\s*(project|build-system)\s*\]", text, re.MULTILINE):
                return candidate
        if candidate == top:
            break
    return None


def _environment(
    project: Path | None, place: Path, who: str
) -> tuple[str, Path | None, tuple[str, ...]]:
    """An environment with a project in it: its interpreter, its folder, and the modules that it brings. This one for no project."""
    if project is None:
        return sys.executable, None, ()
    folder = place / "environment"
    place.mkdir(exist_ok=True)
    _checked(
        _run(
            [sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", str(folder)]
        ),
        f"{who}: no virtual environment",
    )
    python = str(folder / "bin" / "python")
    packages = Path(
        _checked(
            _run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]),
            f"{who}: no interpreter",
        ).strip()
    )
    # "System" means the interpreter behind this environment, if this is a virtual one: its own packages are seen by this file. They come
    # after the project's own, and their .pth files are read, by which other projects are installed for editing.
    seen = (
        [path for path in site.getsitepackages() if Path(path).is_dir()]
        if sys.prefix != sys.base_prefix
        else []
    )
    lines = [f"import site; site.addsitedir({path!r})" for path in seen]
    (packages / "_gpumem_parent.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if _run([python, "-c", "import pip"]).returncode:
        _checked(_run([python, "-m", "ensurepip"]), f"{who}: no pip")
    before = set(packages.iterdir())
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--ignore-installed",
        "--no-input",
    ]
    done = _run([*install, "--no-build-isolation", str(project)])
    if done.returncode and project.suffix != ".whl":  # its build backend is not installed here
        alone, done = done, _run([*install, str(project)])
        if done.returncode:
            raise RunError(
                f"{who} cannot be installed: {_words(alone)}; in isolation: {_words(done)}"
            )
    _checked(done, f"{who} cannot be installed")
    found = (
        path
        for path in set(packages.iterdir()) - before
        if path.suffix not in (".dist-info", ".egg-info", ".pth")
    )
    names = (path.name.partition(".")[0] for path in found)
    return python, folder, tuple(sorted(name for name in names if not name.startswith("__")))


def spared() -> list[str]:
    """Folders of this environment's packages, which both sides see, even if the environment lies inside a tree."""
    return [
        *site.getsitepackages(),
        *([site.getusersitepackages()] if site.ENABLE_USER_SITE else []),
    ]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    # A caller's path is for its own code, and an outer environment is not the new one.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "PIP_REQUIRE_VIRTUALENV")
    }
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


def _checked(done: subprocess.CompletedProcess[str], failure: str) -> str:
    if done.returncode:
        raise RunError(f"{failure}: {_words(done)}")
    return done.stdout


def moved_word(word: str, side: Side, tree: Side) -> str:
    """A word of a command line for a side: an absolute path inside another tree becomes the same place of its own."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    if side.root == tree.root or not side.path_from_cwd or not os.path.isabs(value):
        return word
    real = Path(os.path.realpath(value))
    return (
        f"{option}{equals}{side.root / real.relative_to(tree.root)}"
        if real.is_relative_to(tree.root)
        else word
    )


def moved_path(environment: Mapping[str, str], side: Side, other: Path) -> str | None:
    """PYTHONPATH for a side: entries inside the other tree become the same places of its own."""
    written = environment.get("PYTHONPATH")
    if not written or side.root == other:
        return written
    entries = []
    for entry in written.split(os.pathsep):
        absolute = Path(entry).resolve() if os.path.isabs(entry) else None
        moved = absolute is not None and absolute.is_relative_to(other)
        entries.append(
            str(side.root / absolute.relative_to(other))
            if moved and absolute is not None
            else entry
        )
    return os.pathsep.join(entries)
