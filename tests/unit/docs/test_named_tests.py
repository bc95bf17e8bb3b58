"""Every test that the tables of pages name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ("managed-memory.md", "host-link.md", "trust.md")


def named(page: str) -> list[tuple[str, str | None]]:
    """Files of tests, each with the test that is named in it; a name without a file belongs to the file named last."""
    found: list[tuple[str, str | None]] = []
    for file, test, alone in re.findall(
        r"`((?:[\w/]+/)?test_\w+\.py)(?:::(test_\w+))?`|`(test_\w+)`",
        (ROOT / "docs" / page).read_text(),
    ):
        found.append((file or found[-1][0], test or alone or None))
    return found


@pytest.mark.parametrize(("file", "test"), [one for page in PAGES for one in named(page)])
def test_it_is_there(file: str, test: str | None) -> None:
    path = ROOT / (file if "/" in file else f"tests/memory/{file}")
    assert path.exists()
    assert test is None or f"def {test}(" in path.read_text()


def test_the_page_of_the_texts_names_tests_that_are_there() -> None:
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "seeds-experiments.md").read_text()))
    assert len(names) >= 20
    assert [one for one in sorted(names) if f"def {one}(" not in everything] == []


def test_each_page_names_some() -> None:
    assert all(len(named(page)) >= 5 for page in PAGES)
