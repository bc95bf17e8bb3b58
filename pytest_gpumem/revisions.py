"""Sort stored revisions by the git history that contains them."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpumem.outcomes import UserError

DIRTY = "-dirty"  # suffix of a revision that was measured with uncommitted changes
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_OF_A_HOOK = re.compile(
    "GIT_(DIR|WORK_TREE|COMMON_DIR|INDEX_FILE|NAMESPACE|PREFIX"
    "|OBJECT_DIRECTORY|ALTERNATE_OBJECT_DIRECTORIES)"
)
"""Variables that name the repository and the index of the git that runs a hook."""
_SECONDS = 60  # time-out of a git call


class RevisionError(UserError):
    """The revision cannot be used, or git cannot run."""


@dataclass(frozen=True)
class Ancestry:
    """Stored revisions by the history of the merge base."""

    merge_base: str  # the newest commit that HEAD and the base have in common
    base: frozenset[str]  # revisions in the history of `merge_base`, itself included
    unknown: frozenset[str]
    """Revisions that the repository does not contain."""


def ancestry(of: str, revisions: Collection[str], folder: Path) -> Ancestry:
    """Sort stored revisions by the history that HEAD shares with `of`. Raises `RevisionError`:
    `of` is no commit, or shares no history with HEAD."""
    commit = commit_of(of, folder)
    hint = " (this clone is shallow: fetch its history)" if _is_shallow(folder) else ""
    why = f"HEAD and {of!r} have no history in common{hint}"
    merge_base = git(folder, ["merge-base", "HEAD", commit], why).strip()
    # Stored text reaches git by standard input only, and only if it cannot be an option.
    commits = sorted(revision for revision in set(revisions) if _COMMIT.fullmatch(revision))
    kinds = git(folder, ["cat-file", "--batch-check=%(objecttype)"], given=commits)
    pairs = zip(commits, kinds.splitlines(), strict=True)
    known = [revision for revision, kind in pairs if kind == "commit"]
    limits = [*known, f"^{merge_base}"]
    outside = git(folder, ["rev-list", "--stdin"], given=limits).split()
    within = set()
    for revision in known:
        # A stored id may be abbreviated.
        if not any(commit_id.startswith(revision) for commit_id in outside):
            within.add(revision)
    unknown = frozenset(revisions) - frozenset(known)
    return Ancestry(merge_base, frozenset(within), unknown)


def commit_of(base: str, here: Path) -> str:
    """The commit of a revision. Raises `UserError`: it is none."""
    accepted = "accepted is a git revision such as main, v1.2 or HEAD~1"
    if not base:
        raise UserError(f"BASE is empty; {accepted}")
    words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{base}^{{commit}}"]
    return git(here, words, f"BASE {base} is no revision of {here}; {accepted}").strip()


def files_at(commit: str, below: Path, folder: Path) -> set[str]:
    """Return the names of the files in a folder that are as in a commit."""

    def names(command: str) -> set[str]:
        words = [command, "-z", "--name-only", commit, "--", f"{below.as_posix()}/"]
        return {Path(path).name for path in git(folder, words).split("\0")}

    return names("ls-tree") - names("diff")


def _is_shallow(folder: Path) -> bool:
    return git(folder, ["rev-parse", "--is-shallow-repository"]).strip() == "true"


def trouble(folder: Path) -> str | None:
    """Return why the revisions of runs saved here are of no use to a gate, with the remedy."""
    try:
        if _is_shallow(folder):
            return (
                "this clone is shallow: a gate here does not know the history of saved runs; "
                "git fetch --unshallow, or fetch-depth: 0 of actions/checkout"
            )
    except RevisionError as error:
        if "dubious ownership" in str(error):
            return (
                f"git does not trust {folder} (dubious ownership): the run has no revision, and "
                f"counts in no gate; git config --global --add safe.directory {folder}"
            )
    return None


def head(folder: Path) -> str | None:
    """Return the commit of HEAD, with `DIRTY` if tracked files have changed; None without git."""
    try:
        commit = git(folder, ["rev-parse", "--verify", "HEAD"]).strip()
        changed = git(folder, ["status", "--porcelain", "--untracked-files=no"]).strip()
    except RevisionError:
        return None
    return commit + DIRTY if changed else commit


def of_no_hook(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not _OF_A_HOOK.fullmatch(name)}


def git(
    folder: Path,
    arguments: Sequence[str],
    error_text: str = "",
    *,
    given: Sequence[str] = (),
    seconds: float | None = _SECONDS,
) -> str:
    """Run git and return its standard output. Raises `RevisionError`: it fails.

    `given`: lines for its input. `error_text`: begins the message.
    """
    try:
        run = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=of_no_hook(os.environ),
            input="".join(f"{line}\n" for line in given).encode(),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except FileNotFoundError:
        raise RevisionError(f"git is not installed, or {folder} does not exist") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RevisionError(f"git cannot run: {error}") from None
    if run.returncode != 0:
        message = " ".join(run.stderr.decode(errors="replace").split())
        if "not a git repository" in message:
            raise RevisionError(f"{folder} is in no git repository")
        if error_text and message:
            message = f"{error_text}: {message}"
        failed = f"git {arguments[0]} failed with {run.returncode}"
        raise RevisionError(message or error_text or failed)
    return os.fsdecode(run.stdout)
