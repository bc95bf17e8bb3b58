"""The sessions of docs/sessions.md: short, and as the plugin prints them today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHOWN = dict(re.findall(r"<!-- session: (\w+) -->\n```text\n(.*?)^```$", (ROOT / "docs/sessions.md").read_text(), re.DOTALL | re.MULTILINE))


TOLD = ("test_", "UNDECIDED", "NEW", "FAILED", "gpumem gate: red", "gpumem gate: step", "gpumem: SIMULATED")
"""Beginnings of the lines that a reader needs."""


def words(text: str) -> list[str]:
    """The words of these lines without figures, which follow every change of the simulated device."""
    lines = [line for line in text.splitlines() if line.startswith(TOLD) or " measured" in line]
    figures = re.sub(r"# to #", "#", re.sub(r"[+-]?[\d.]+", "#", "\n".join(lines)))
    return [word for word in re.split(r"[\s=\-]+", figures) if word]


def test_every_session_fits_on_a_screen() -> None:
    assert sorted(SHOWN) == ["failing", "gate", "main", "undecided"]
    for text in SHOWN.values():
        lines = text.splitlines()
        assert 0 < len(lines) <= 40
        assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("name", ["failing", "undecided", "gate"])
def test_a_session_is_shown_as_it_is(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "ci/docs_sessions.py", name], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr  # a loaded machine may need a line more, of a row that is measured again
    assert words(done.stdout) == words(SHOWN[name]), "python ci/renew_tables.py docs/sessions.md"
