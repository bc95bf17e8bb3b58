"""Every table in the documents is what its record or its script gives."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCUMENTS = [ROOT / "README.md", ROOT / "ci" / "records" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_are_those_of_their_source(document: Path) -> None:
    spec = importlib.util.spec_from_file_location("renew_tables", ROOT / "ci" / "renew_tables.py")
    assert spec is not None
    assert spec.loader is not None
    renew_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(renew_tables)
    # Sessions take half a minute, and their figures follow every change of the simulated device: a test of their own looks at them.
    # Nor is the fit of the simulated device drawn here, which runs the whole memory suite.
    text = document.read_text().replace("<!-- session: ", "<!-- its own test: ").replace("<!-- output: ci/bench/simulated_fit", "<!-- ")
    marked = sum(text.count(f"<!-- {kind}: ") for kind in ("record", "summary", "output"))
    assert len(renew_tables.BLOCK.findall(text)) == marked
    assert renew_tables.renewed(text) == text


def test_the_readme_shows_a_record() -> None:
    assert "<!-- record: ci/records/" in (ROOT / "README.md").read_text()
