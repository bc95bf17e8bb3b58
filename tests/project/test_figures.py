"""Every table in the documents is what its record or its script gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import renew_tables

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ci" / "records" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


WITH_TABLES = [path for path in DOCUMENTS if "\n<!-- " in path.read_text()]


def test_tables_are_those_of_their_source() -> None:
    for document in WITH_TABLES:
        # Sessions take half a minute, and their figures follow every change of the simulated device: a test of their own looks at them.
        text = document.read_text().replace("<!-- session: ", "<!-- its own test: ")
        marked = sum(
            text.count(f"<!-- {kind}: ") for kind in ("record", "summary", "texts", "output")
        )
        assert len(renew_tables.BLOCK.findall(text)) == marked, document
        assert len(renew_tables.GENERATED.findall(text)) == text.count("<!-- generated: "), document
        assert renew_tables.renewed(text) == text, (
            f"python ci/renew_tables.py {document.relative_to(ROOT)}"
        )


def test_a_marker_without_a_table_is_an_error() -> None:
    with pytest.raises(KeyError):
        renew_tables.renewed("<!-- generated: nothing -->\n<!-- end of generated -->\n")
