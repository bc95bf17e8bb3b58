"""The documentation and its site: a complete reference, links into the repository, a complete navigation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import docs_hooks
import yaml
from document_blocks import PAGES, ROOT

from pytest_gpumem import cli
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.options import MARKER_KEYWORDS, OPTIONS
from pytest_gpumem.outcomes import EXIT_CODES

DOCS = ROOT / "docs"


def listed(entry: Any) -> list[str]:
    """All pages below an entry of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [
        page
        for below in (entry.values() if isinstance(entry, dict) else entry)
        for page in listed(below)
    ]


def test_every_page_is_in_the_navigation_once() -> None:
    pages = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(pages) == sorted(
        str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)
    )


def test_the_reference_is_complete() -> None:
    for page, wanted in [
        (
            "reference/options",
            [
                *(one.key for one in OPTIONS if one.ini_only),
                *(one.flag for one in OPTIONS if not one.ini_only),
                *MARKER_KEYWORDS,
            ],
        ),
        ("reference/kernels", [f"- `{name}(" for name in CATALOGUE]),
        (
            "reference/fixtures",
            ["`gpu_benchmark`", "`device_buffer`", "`persisting_stream`", "`memory_kind`"],
        ),
        (
            "reference/schema",
            [
                "## Row",
                "## Measurement",
                "array of array of number",
                "`UNDECIDED`",
                "[Verdict](#verdict)",
            ],
        ),
        (
            "reference/api",
            [
                "### GpuBenchmark",
                "- `latency`: Seconds of one launch",
                "#### Works.together",
                "- `label`: ",
            ],
        ),
        (
            "reference/commands",
            [f"## `gpumem {name}`" for name in cli.main.commands] + ["## `gpumem profile ncu`"],
        ),
        (
            "outputs",
            [
                "| `pytest --gpumem` | 1 |",
                *(f"| `gpumem {name}` | " for name in EXIT_CODES if " " not in name),
            ],
        ),
    ]:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        assert [name for name in wanted if name not in text] == [], page


def test_links_into_the_repository() -> None:
    for text, repository, expected in [
        ("see [the README](../README.md#options).", None, "see the README."),
        (
            "[see](../README.md).",
            "https://example.org/x/",
            "[see](https://example.org/x/blob/main/README.md).",
        ),
        (
            "[see](../README.md#a).",
            "https://example.org/x/",
            "[see](https://example.org/x/blob/main/README.md#a).",
        ),
        (
            "[a page](gate.md) ![a picture](../docs/images/peers.svg)",
            None,
            "[a page](gate.md) ![a picture](../docs/images/peers.svg)",
        ),
        ("```python\n[x](../README.md)\n```\n", None, "```python\n[x](../README.md)\n```\n"),
    ]:
        assert docs_hooks.inside(text, DOCS, DOCS, repository) == expected, text


def test_links_lead_somewhere() -> None:
    """Also without building the site, which needs its own packages, and in the repository, where no site is."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "ci" / "records" / "README.md"]:
        prose = re.sub(
            r"^```.*?^```$|`[^`\n]*`",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.DOTALL | re.MULTILINE,
        )
        for target, place in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", prose):
            file = page.parent / Path(target) if target else page
            assert file.exists(), f"{page.name}: {target}"
            assert not place or place in places(file), f"{page.name}: {target}#{place}"


def places(page: Path) -> set[str]:
    """The anchors of a page's headings, which are the same in the site and where a repository is shown."""
    text = re.sub(
        r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        .strip()
        .lower()
        .replace(" ", "-")
        for heading in headings
    }
