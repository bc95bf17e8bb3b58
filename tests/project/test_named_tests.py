"""Every test that the tables of pages name is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_every_test_is_there() -> None:
    for page in PAGES:
        tests = named(page)
        assert len(tests) >= 5, page
        missing = []
        for file, test in tests:
            path = ROOT / (file if "/" in file else f"tests/memory/{file}")
            if not path.exists() or (test and f"def {test}(" not in path.read_text()):
                missing.append((file, test))
        assert missing == [], page


def test_the_page_of_the_texts_names_tests_that_are_there() -> None:
    everything = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "seeds-experiments.md").read_text()))
    assert len(names) >= 20
    assert [one for one in sorted(names) if f"def {one}(" not in everything] == []
