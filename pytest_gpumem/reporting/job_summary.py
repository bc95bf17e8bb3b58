"""The summary of a job of GitHub Actions: a file to which each step appends.

"Workflow commands for GitHub Actions", adding a job summary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_gpumem.files import append_whole

VARIABLE = "GITHUB_STEP_SUMMARY"
"""Names the file."""
LIMIT = 1 << 20
"""Bytes of that file: of a larger one GitHub shows nothing ("Workflow commands", step isolation and limits)."""


def summarise(text: str, environment: Mapping[str, str]) -> str | None:
    """Append to the summary, where there is one.

    Nobody asked for it in so many words, so where it cannot be written, the run goes on.

    Args:
        text: in Markdown.
        environment: all environment variables.

    Returns:
        Why it was not written, as a sentence; None where it was, or where there is no such file.
    """
    if not (name := environment.get(VARIABLE)):
        return None
    path, text = Path(name), f"{text}\n"
    try:
        there = path.stat().st_size if path.exists() else 0
        if there + len(text.encode()) > LIMIT:
            return f"{VARIABLE}: {path} is nearly full, nothing is added"
        append_whole(path, text)
    except OSError as error:
        return f"{VARIABLE}: cannot write {path}: {error.strerror or error}"
    return None
