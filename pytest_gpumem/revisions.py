"""Which stored revisions are part of the history that a change is built on: asked of git, in four calls however many there are.

The only module besides `duet` and `nsight` that starts a process: neither is there in a plain session, and git is the authority on its
own history.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

DIRTY = "-dirty"
"""What a revision ends in where uncommitted changes were measured: no commit says what that code was."""
_COMMIT = re.compile(r"[0-9a-f]{7,64}")
_SECONDS = 60
"""After which git is taken to hang, such as on a file system that is gone."""


class RevisionError(Exception):
    """A revision that cannot be used, or no git to ask; one line."""


@dataclass(frozen=True)
class Ancestry:
    """Where stored revisions stand to the commit that is tested and to the one that it is compared with."""

    merge_base: str
    """The commit where the tested one left the history that it is compared with."""
    base: frozenset[str]
    """Those that `merge_base` has in its history, itself included."""
    head: frozenset[str]
    """Those that the tested commit has in its history, itself included."""
    unknown: frozenset[str]
    """Those that the repository does not hold: another repository's, cut off in a shallow clone, or no commits at all."""


def ancestry(of: str, revisions: Collection[str], folder: Path) -> Ancestry:
    """Sort revisions by the history that holds them.

    Args:
        of: branch, tag or commit that HEAD is to be merged into.
        revisions: stored ones; what is no commit id is unknown.
        folder: inside the repository.

    Raises:
        RevisionError: git is missing or fails, there is no repository, `of` is no commit of it, or it shares no history with HEAD.
    """
    commit = _git(folder, ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{of}^{{commit}}"], f"{of!r} is no commit of {folder}")
    shallow = _git(folder, ["rev-parse", "--is-shallow-repository"]).strip() == "true"
    hint = " (this clone is shallow: fetch its history)" if shallow else ""
    merge_base = _git(folder, ["merge-base", "HEAD", commit.strip()], f"HEAD and {of!r} have no history in common{hint}").strip()
    # Stored text goes to git by its standard input and only where it cannot be an option or an expression.
    asked = sorted(r for r in set(revisions) if _COMMIT.fullmatch(r))
    answers = _git(folder, ["cat-file", "--batch-check=%(objecttype)"], given=asked).splitlines() if asked else []
    known = [revision for revision, answer in zip(asked, answers, strict=True) if answer == "commit"]
    unknown = frozenset(revisions) - frozenset(known)
    return Ancestry(merge_base, _within(folder, known, merge_base), _within(folder, known, "HEAD"), unknown)


def head(folder: Path) -> str | None:
    """Commit id of HEAD, with `DIRTY` where tracked files are changed; None outside a repository or without git."""
    try:
        commit = _git(folder, ["rev-parse", "--verify", "HEAD"]).strip()
        changed = _git(folder, ["status", "--porcelain", "--untracked-files=no"]).strip()
    except RevisionError:
        return None
    return commit + DIRTY if changed else commit


def _within(folder: Path, known: Sequence[str], commit: str) -> frozenset[str]:
    """Those of `known` that are `commit` or come before it."""
    if not known:
        return frozenset()
    # What is reachable from them and not from the commit: a list as long as the branches, not as the project's history.
    outside = _git(folder, ["rev-list", "--stdin"], given=[*known, f"^{commit}"]).split()
    # A stored id may be an abbreviation.
    return frozenset(revision for revision in known if not any(full.startswith(revision) for full in outside))


def _git(folder: Path, arguments: Sequence[str], sentence: str = "", *, given: Sequence[str] = ()) -> str:
    """What git prints; `sentence` is the error where it says no without a word of its own."""
    text = "".join(f"{line}\n" for line in given)
    try:
        run = subprocess.run(
            ["git", *arguments], cwd=folder, input=text, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except FileNotFoundError:
        raise RevisionError(f"git is not to be found (or {folder} is not)") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RevisionError(f"git cannot be asked: {error}") from None
    if run.returncode != 0:
        said = " ".join(run.stderr.split())
        raise RevisionError(": ".join(part for part in (sentence, said) if part) or f"git {arguments[0]} failed with {run.returncode}")
    return run.stdout
