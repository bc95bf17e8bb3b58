"""The Markdown summary: what it shows, and that names cannot break out of it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Comparison, Row
from pytest_gpumem.reporting.markdown import LIMIT, MOST, code, page, preformatted
from pytest_gpumem.reporting.run import Run

Make = Callable[..., Row]
HOSTILE = [
    "</code></pre><script>alert(1)</script>",
    "a|b|c",
    "`@everyone` **bold** _x_ #1 ![x](https://example.org/x.png)",
    "a\n\n# heading\n<!-- ",
    "</details>\n</pre>\n@somebody",
    "\x1b[31m\u202e",
    "\ud800",
]


def test_what_needs_a_look_comes_first_and_everything_is_there(
    make_row: Make, facts: DeviceFacts
) -> None:
    change = Comparison(0.031, 0.008, processes=5)
    rows = [
        make_row("t.py::test_fine"),
        make_row("t.py::test_slow", Outcome.FAIL, reason="slower: +3.10 %", comparison=change),
    ]
    text = page(Run(rows, facts, {"mode": "clean-cold"}))
    assert text.startswith("### gpumem: NVIDIA H100 80GB HBM3\n")
    assert "**2 rows: 1 FAIL, 1 PASS**" in text
    assert "<pre>\nFAIL t.py::test_slow: slower: +3.10 %\n</pre>" in text
    first, folded = text.split("<details><summary>All rows (2)</summary>")
    assert "test&#95;fine" not in first
    assert [line for line in folded.splitlines() if "fine" in line] == [
        "| <code>test&#95;fine</code> | 268.3 us | 3002 GB&#47;s | 89.5 &#37; | 0.100 &#37; |  | PASS |"
    ]
    assert "**FAIL**" in folded
    assert "mode clean-cold" in text


def test_a_passing_run_has_no_list_of_reasons(make_row: Make, facts: DeviceFacts) -> None:
    assert "within its limits" not in page(Run([make_row()], facts, {}))


def test_simulated_and_empty_runs_say_so(make_row: Make, facts: DeviceFacts) -> None:
    simulated = page(Run([make_row(simulated=True)], replace(facts, simulated=True), {}))
    assert simulated.startswith(
        "### gpumem: NVIDIA H100 80GB HBM3 (simulated)\n\n> **No GPU is measured:**"
    )
    assert page(Run([], facts, {})).endswith("\n\nNothing was measured.\n")


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_hostile_name_is_text(make_row: Make, facts: DeviceFacts, hostile: str) -> None:
    """Every row of a table has as many cells as its heading, every element that is opened is ours, and the name can be read."""
    text = page(Run([make_row(f"t.py::t[{hostile}]", Outcome.FAIL, reason=hostile)], facts, {}))
    assert set(re.findall(r"</?\w+", text)) <= {
        f"{s}{t}" for s in ("<", "</") for t in ("code", "pre", "details", "summary")
    }
    assert "<!--" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    for element in ("code", "pre", "details"):
        assert text.count(f"<{element}>") == text.count(f"</{element}>")
    assert text.count("\n#") == 0
    # Outside the preformatted part, where it means nothing, no character that means something to Markdown is left of the name.
    names = re.findall("<code>(.*?)</code>", text)
    assert names
    assert all(re.fullmatch(r"(\w|[ .,]|&#\d+;)*", name) and "_" not in name for name in names)
    text.encode()


def test_code_can_be_read_back() -> None:
    assert html.unescape(code("test_a[x|y]")) == "<code>test_a[x|y]</code>"


def test_a_page_fits_into_a_comment(make_row: Make, facts: DeviceFacts) -> None:
    rows = [
        make_row(f"t.py::test_{n}[{'x' * 400}]", Outcome.FAIL, reason="slower " * 90)
        for n in range(400)
    ]
    text = page(Run(rows, facts, {}))
    assert len(text) < LIMIT
    assert f"{400 - MOST} further rows need a look." in text
    assert re.search(r"\d+ further rows found no place here\.", text)
    assert re.search(r"\d+ more found no place here\n</pre>", text)


def test_preformatted_text_is_wrapped(make_row: Make) -> None:
    assert all(len(line) <= 100 for line in preformatted(["word " * 100]).splitlines())
