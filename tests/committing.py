"""git as somebody who can commit, whatever the settings of the machine's user are."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SETTINGS = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
AUTHOR = {
    f"GIT_{role}_{what}": text
    for role in ("AUTHOR", "COMMITTER")
    for what, text in (("NAME", "Ada"), ("EMAIL", "n@example.org"))
}


def git(folder: Path, *arguments: str) -> str:
    """What git prints in a folder. Raises `CalledProcessError` where it fails."""
    environment = {**os.environ, **SETTINGS, **AUTHOR}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


def commit(folder: Path, subject: str = "base") -> str:
    """Commit everything in a folder, which becomes a repository; gives the id."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", subject)
    return git(folder, "rev-parse", "HEAD")
