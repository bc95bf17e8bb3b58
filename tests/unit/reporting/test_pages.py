"""The HTML page and the Markdown page of plain rows: figures, escaping, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Callable
from datetime import datetime, timezone
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Comparison, Past, Row
from pytest_gpumem.reporting import markdown
from pytest_gpumem.reporting.conclusion import Run
from pytest_gpumem.reporting.html import anchor, page

MakeRow = Callable[..., Row]
SLOWER = Comparison(0.1234, 0.008, processes=5, base=238.8e-6)
HOSTILE = [
    "</code></pre><script>alert(1)</script>",
    "a|b|c",
    "`@everyone` **bold** _x_ #1 ![x](https://example.org/x.png)",
    "a\n\n# heading\n<!-- ",
    "</details>\n</pre>\n@somebody",
    "\x1b[31m\u202e",
    "\ud800",
]


class Read(HTMLParser):
    """Collects tags and attributes, and sees that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    slow = make_row("t.py::test_slow", Outcome.FAIL, reason="slower: +12 %", comparison=SLOWER)
    sizes = []
    for size, half in ((1, None), (10, 1e-5), (2, 1e-6)):
        nodeid = f"t.py::test_size[{size} MiB]"
        sizes.append(make_row(nodeid, placements=((size * 1e-4,),), half_width=half))
    return [make_row("t.py::test_fine"), *sizes, replace(slow, failed=True)]


def test_the_page_has_every_row_with_its_figures_worst_first(
    facts: DeviceFacts, rows: list[Row]
) -> None:
    text = page(Run(rows, facts, {"mode": "hot"}, "2026-11-21T12:00:00+00:00", "a" * 40))
    names = re.findall(r'<td><a href="#(t-\w+)">([^<]*)</a></td>', text)
    assert names[0] == (anchor("t.py::test_slow"), "test_slow")
    assert len(names) == 5
    for target, _ in names:
        assert f'<details id="{target}">' in text
    for figure in ("268.3 us", "3002 GB/s", "89.5 %", "+12.3 %", "238.8 us"):
        assert f">{figure}</td>" in text
    assert f"taken 2026-11-21 12:00 UTC, revision {'a' * 40}<" in text
    assert "mode hot" in text


def test_parametrised_tests_and_saved_runs_have_a_chart(
    facts: DeviceFacts, rows: list[Row]
) -> None:
    day = datetime(2026, 11, 20, tzinfo=timezone.utc)
    past = {"t.py::test_slow": [Past(day, 2e-4, 1e-6, "abcdef0123"), Past(day, 3e-4)]}
    text = page(Run(rows, facts, {}, past=past))
    assert text.count("<svg") == 2
    (chart,) = re.findall(
        r"<figcaption>t.py::test_size: bandwidth</figcaption>\s*(<svg.*?</svg>)", text
    )
    # Over the number, not in the order of the rows.
    tips = re.findall(r"<title>(\d+ MiB): ", chart)
    assert tips == ["1 MiB", "2 MiB", "10 MiB"]
    assert chart.count('<path class="s0"') == 2  # of the intervals that are known
    assert "2 saved runs and this run" in text
    assert "<title>2026-11-20 abcdef0: 200.0 us</title>" in text


def test_nothing_comes_from_the_network_and_the_policy_names_what_runs(
    facts: DeviceFacts, rows: list[Row]
) -> None:
    text = page(Run(rows, replace(facts, simulated=True), {}))
    read = Read(text)
    assert not {"link", "img", "iframe"} & set(read.tags)
    assert all(str(value).startswith("#") for name, value in read.attributes if name == "href")
    assert not any(name == "src" or name.startswith("on") for name, _ in read.attributes)
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in html.unescape(text)
    assert "Simulated: no GPU was measured." in text


def test_a_hostile_name_is_text(make_row: MakeRow, facts: DeviceFacts) -> None:
    for hostile in HOSTILE:
        rows = [
            make_row(f"t.py::t[{hostile}]", Outcome.FAIL, reason=hostile, label=hostile),
            make_row(f"t.py::t[{hostile}2]"),
        ]
        run = Run(rows, replace(facts, name=hostile), {}, revision=hostile, remarks=[hostile])
        text = page(run)
        assert Read(text).tags.count("script") == 1, hostile
        text.encode()
        # In Markdown every element is ours, and every row of a table has as many cells.
        text = markdown.page(run)
        elements = {f"{slash}{tag}" for slash in ("<", "</") for tag in ("code", "pre", "details")}
        assert set(re.findall(r"</?\w+", text)) <= elements | {"<summary", "</summary"}, hostile
        assert "<!--" not in text, hostile
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1, hostile
        names = re.findall("<code>(.*?)</code>", text)
        assert names, hostile
        assert all(re.fullmatch(r"([^\W_]|[ .,]|&#\d+;)*", name) for name in names), hostile
        text.encode()


def test_markdown_has_all_rows_folded_and_fits_into_a_comment(
    make_row: MakeRow, facts: DeviceFacts, rows: list[Row]
) -> None:
    text = markdown.page(Run(rows, facts, {"mode": "clean-cold"}))
    assert text.startswith("### gpumem: NVIDIA H100 80GB HBM3\n")
    assert "**5 rows: 1 FAIL, 4 PASS**" in text
    first, folded = text.split("<details><summary>All rows (5)</summary>")
    assert "test&#95;fine" not in first
    assert (
        "| <code>test&#95;fine</code> | 268.3 us | 3002 GB&#47;s | 89.5 &#37; |  |  | PASS |"
    ) in folded
    many = []
    for number in range(400):
        nodeid = f"t.py::test_{number}[{'x' * 400}]"
        many.append(make_row(nodeid, Outcome.FAIL, reason="slower " * 90))
    text = markdown.page(Run(many, facts, {}))
    assert len(text) < markdown.LIMIT
    assert re.search(r"\d+ further rows did not fit\.", text)
    assert re.search(r"\d+ more did not fit\n</pre>", text)
    assert markdown.page(Run([], facts, {})).endswith("\n\nNothing was measured.\n")
