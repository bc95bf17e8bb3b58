"""The page in headless Chromium, where it and Playwright are installed: no errors, filter and order work, it fits a telephone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Comparison, Past, Row
from pytest_gpumem.reporting.html import anchor
from pytest_gpumem.reporting.html import page as drawn
from pytest_gpumem.reporting.run import Run

MakeRow = Callable[..., Row]
COMPARISON = Comparison(delta=0.1234, reach=0.008, processes=5)
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


def test_the_page_works(
    opened: Callable[[Path, int], Any], tmp_path: Path, facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = [
        make_row("t.py::test_size", label=f"{size} MiB", placements=((size * 1e-4,),))
        for size in (1, 10, 2)
    ]
    rows += [
        make_row("t.py::test_slow", Outcome.FAIL, comparison=COMPARISON, mode="hot"),
        replace(
            make_row(
                f"t.py::test_{HOSTILE}",
                Outcome.UNDECIDED,
                comparison=COMPARISON,
                placements=((1.5e-4,),),
            ),
            failed=True,
        ),
    ]
    past = [
        Past(datetime(2026, 11, day, tzinfo=timezone.utc), day * 1e-4, None, of)
        for day, of in ((1, None), (2, "abcdef012"))
    ]
    file = tmp_path / "page.html"
    file.write_text(
        drawn(
            Run(
                rows,
                replace(facts, name=f"GPU {HOSTILE}", simulated=True),
                {},
                utc="2026-11-21T12:00:00+00:00",
                past={rows[0].key: past},
            )
        )
    )
    page = opened(file, 400)

    def shown() -> list[str]:
        return [str(name) for name in page.locator("#results tbody tr:visible a").all_inner_texts()]

    # Nothing of a name ran, nothing is wider than a telephone, and the system's theme is taken.
    assert "broken" not in page.title().removeprefix(f"gpumem: GPU {HOSTILE}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    assert len(shown()) == 5

    page.select_option("#order", "0")
    assert shown()[:3] == ["test_size[10 MiB]", "test_slow", "test_size[2 MiB]"]
    page.select_option("#order", "name")
    assert [name for name in shown() if "size" in name] == [
        "test_size[1 MiB]",
        "test_size[2 MiB]",
        "test_size[10 MiB]",
    ]
    page.select_option("#order", "")
    assert shown()[0] == "test_slow"
    page.set_viewport_size({"width": 1000, "height": 800})
    height = "(cell) => { const text = document.createRange(); text.selectNodeContents(cell); return text.getBoundingClientRect().height }"
    assert (
        max(page.evaluate(f"Array.from(document.querySelectorAll('td:last-child'), {height})")) < 30
    )  # a verdict is one line
    for expected in (
        "test_size[10 MiB]",
        "test_size[1 MiB]",
    ):  # slowest first, and at the second click last
        page.click("th[data-order='0']")
        assert shown()[0] == expected
    assert page.locator("th[aria-sort]").inner_text() == "latency"

    page.fill("#text", "SIZE 1")
    assert sorted(shown()) == ["test_size[1 MiB]", "test_size[10 MiB]"]
    assert page.locator("#tests details:visible").count() == 2
    page.fill("#text", "")
    page.select_option("#verdict", "FAIL")
    assert shown() == ["test_slow"]
    page.select_option("#verdict", "")
    page.select_option("#kind", "L2")
    assert shown() == ["test_slow"]
    assert page.locator("#count").inner_text() == "1 of 5"

    # A link opens its section, also where the filter hides it; where the pointer rests, points of earlier runs say what they are.
    page.goto(f"{file.as_uri()}#{anchor(rows[0].key)}")
    assert page.locator("details[open]").get_attribute("id") == anchor(rows[0].key)
    tips = page.locator("details[open] circle.tip title")
    tips.last.wait_for(state="attached")
    assert tips.all_text_contents() == ["11-01 100.0 us", "11-02 abcdef0 200.0 us"]
