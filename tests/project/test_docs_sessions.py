"""The sessions of docs/sessions.md: short, and as the plugin prints them today."""

from __future__ import annotations

import re
from pathlib import Path

import docs_sessions
import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")

ROOT = Path(__file__).parents[2]
SHOWN = dict(
    re.findall(
        r"<!-- session: (\w+) -->\n```text\n(.*?)^```$",
        (ROOT / "docs/sessions.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
)


TOLD = ("test_", "FAILED", "gpumem gate: red", "gpumem: SIMULATED")
"""Beginnings of the lines that a reader needs."""


def words(text: str) -> list[str]:
    """The words of these lines without figures, which follow every change of the simulated device."""
    lines = [line for line in text.splitlines() if line.startswith(TOLD) or " measured" in line]
    figures = re.sub(r"# to #", "#", re.sub(r"[+-]?[\d.]+", "#", "\n".join(lines)))
    return [word for word in re.split(r"[\s=\-]+", figures) if word]


def test_every_session_fits_on_a_screen() -> None:
    assert sorted(SHOWN) == ["failing", "gate"]
    for text in SHOWN.values():
        lines = text.splitlines()
        assert 0 < len(lines) <= docs_sessions.MOST
        # A line with a command is never broken.
        assert max(len(line) for line in lines if not re.search(": (gpumem|pytest) ", line)) <= 100


def test_sessions_are_shown_as_they_are(tmp_path: Path) -> None:
    for name in ("failing", "gate"):
        text = "\n".join(
            docs_sessions.shown(
                docs_sessions.SESSIONS[name](docs_sessions.Session(tmp_path)), tmp_path
            )
        )
        assert words(text) == words(SHOWN[name]), "python ci/renew_tables.py docs/sessions.md"
