"""The page in headless Chromium, where it and Playwright are installed: no errors, filter and
order work, it fits a telephone, light and dark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.row import Comparison, Past, Row
from pytest_gpumem.reporting.conclusion import Run
from pytest_gpumem.reporting.html import anchor
from pytest_gpumem.reporting.html import page as drawn

MakeRow = Callable[..., Row]
COMPARISON = Comparison(change=0.1234, reach=0.008, processes=5)
HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"
COLOUR = "getComputedStyle(document.body).backgroundColor"


def test_the_page_works(
    opened: Callable[[Path, int], Any], tmp_path: Path, facts: DeviceFacts, make_row: MakeRow
) -> None:
    rows = []
    for size in (1, 10, 2):
        rows.append(make_row("t.py::test_size", label=f"{size} MiB", placements=((size * 1e-4,),)))
    rows.append(make_row("t.py::test_slow", Outcome.FAIL, comparison=COMPARISON, mode="hot"))
    rows.append(make_row(f"t.py::test_{HOSTILE}", Outcome.UNDECIDED, comparison=COMPARISON))
    day = datetime(2026, 11, 20, tzinfo=timezone.utc)
    file = tmp_path / "page.html"
    facts = replace(facts, name=f"GPU {HOSTILE}", simulated=True)
    past = {rows[0].key: [Past(day, 1e-4), Past(day, 2e-4)]}
    file.write_text(drawn(Run(rows, facts, {}, utc="2026-11-21T12:00:00+00:00", past=past)))
    page = opened(file, 400)

    def shown() -> list[str]:
        return [str(name) for name in page.locator("#results tbody tr:visible a").all_inner_texts()]

    # Nothing of a name ran, nothing is wider than a telephone, and the system's theme is taken.
    assert "broken" not in page.title().removeprefix(f"gpumem: GPU {HOSTILE}")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    dark = page.evaluate(COLOUR)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(COLOUR) != dark

    assert len(shown()) == 5
    assert shown()[0] == "test_slow"
    latency = page.locator("th", has_text="latency")
    for first in ("test_size[10 MiB]", "test_size[1 MiB]"):  # the second click turns it round
        latency.click()
        assert shown()[0] == first
    assert latency.get_attribute("aria-sort") == "ascending"

    page.fill("#text", "SIZE 1")
    assert sorted(shown()) == ["test_size[1 MiB]", "test_size[10 MiB]"]
    assert page.locator("#tests details:visible").count() == 2
    page.fill("#text", "")
    page.select_option("#verdict", "FAIL")
    assert shown() == ["test_slow"]
    assert page.locator("#count").inner_text() == "1 of 5"

    # A link opens its section, also where the filter hides it.
    page.goto(f"{file.as_uri()}#{anchor(rows[0].key)}")
    section = page.locator("details[open]")
    assert section.get_attribute("id") == anchor(rows[0].key)
    assert section.locator("circle title").count() == 3
