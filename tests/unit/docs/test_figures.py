"""Every table in the documents is drawn from its record."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_their_records(document: Path) -> None:
    spec = importlib.util.spec_from_file_location("show_record", ROOT / "ci" / "show_record.py")
    assert spec is not None
    assert spec.loader is not None
    show_record = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(show_record)
    text = document.read_text()
    assert text.count("<!-- record: ") == len(show_record.BLOCK.findall(text))
    assert show_record.renewed(text) == text


def test_the_readme_shows_a_record() -> None:
    assert "<!-- record: " in (ROOT / "README.md").read_text()
