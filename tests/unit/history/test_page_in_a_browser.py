"""The page of a history in headless Chromium, where it and Playwright are installed: filter, zoom, keys and links work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from histories import DEVICE, NEWEST, change, runs, series

from pytest_gpumem.history.data import History
from pytest_gpumem.history.page import page as drawn
from pytest_gpumem.reporting.web_page import anchor

HOSTILE = "<img src=x onerror=document.title='broken'><script>document.title='broken'</script>"


def many() -> History:
    """70 tests over 40 runs: the first is slower since the 30th run, the last one faster since the 20th, and one has a hostile name."""
    steps = np.repeat([100e-6, 102.5e-6], (30, 10)) + 1e-8 * (np.arange(40) % 3)
    lines = [series(f"t.py::test_{index}", 1e-4 + 1e-8 * (np.arange(40) % 5)) for index in range(68)]
    lines[0] = series("t.py::test_0", steps)
    lines += [series("t.py::test_0", [4096.0] * 40, metric="peak", unit="B"), series(f"t.py::{HOSTILE}", [2.0, *[1.0] * 39])]
    lines.append(series("t.py::test_last", [3.0] * 20 + [2.0] * 20, metric="kernels", unit="", variant="DRAM 700 ns"))
    changes = (change(0, 30, 100e-6, 102.5e-6), change(70, 20, 3.0, 2.0, who=HOSTILE, why="fused"))
    return History(tuple(runs(40)), tuple(lines), changes)


@pytest.fixture(scope="module")
def page(opened: Callable[[Path, int], Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = tmp_path_factory.mktemp("history") / "page.html"
    file.write_text(drawn(many(), NEWEST - timedelta(days=30)))
    made = opened(file, 390)
    yield made
    assert made.title() != "broken"


@pytest.fixture
def shown(page: Any) -> Iterator[Any]:
    yield page
    page.goto(page.url.partition("#")[0])


def names(page: Any) -> list[str]:
    return [str(name) for name in page.locator("#list summary .name").all_inner_texts()]


def test_the_worst_comes_first_and_the_list_grows(shown: Any) -> None:
    assert shown.evaluate("document.documentElement.scrollWidth") <= 390
    assert names(shown)[:2] == ["t.py::test_0", "t.py::test_last"]
    assert len(names(shown)) == 50
    shown.click("#more")
    assert len(names(shown)) == 70
    assert f"t.py::{HOSTILE}" in names(shown)
    assert not shown.locator("#more").is_visible()


def test_filters_hold_for_the_tables_and_the_list(shown: Any) -> None:
    shown.check("#changed")
    assert names(shown) == ["t.py::test_0", "t.py::test_last"]
    shown.select_option("#card", f"{DEVICE}, DRAM 700 ns")
    assert names(shown) == ["t.py::test_last"]
    assert shown.locator(".changes tbody tr:visible a").all_inner_texts() == ["t.py::test_last"]
    shown.select_option("#card", "")
    shown.uncheck("#changed")
    shown.fill("#text", "TEST_1 PY")
    assert names(shown) == ["t.py::test_1", *(f"t.py::test_{index}" for index in range(10, 20))]
    assert shown.locator(".changes tbody tr:visible").count() == 0
    shown.fill("#text", "")
    shown.select_option("#metric", "peak")
    assert names(shown) == ["t.py::test_0"]
    assert shown.locator("#count").inner_text() == "1 of 70 tests"


def test_a_link_opens_its_test_whatever_is_filtered(shown: Any) -> None:
    shown.fill("#text", "test_1")
    shown.evaluate(f"location.hash = '{anchor('t.py::test_last')}'")
    shown.locator("details[open] figure").wait_for()
    assert shown.locator("details[open]").get_attribute("id") == anchor("t.py::test_last")
    assert shown.locator("details[open] figcaption").all_inner_texts() == [f"kernels on {DEVICE}, DRAM 700 ns"]
    text = shown.locator("details[open] li").inner_text()
    assert "-33.3 % kernels 3 -> 2" in text
    assert f"accepted by {HOSTILE}: fused" in text


def test_keys_and_drags_read_and_zoom_a_line(shown: Any) -> None:
    shown.locator("#list summary").first.click()
    plot = shown.locator("details[open] .plot")
    # A line that never changed is a text; a plot says to a screen reader what it shows.
    assert plot.count() == 1
    assert "peak 4 KiB" in shown.locator("details[open] dd").inner_text()
    assert "40 runs" in plot.get_attribute("aria-label")
    assert "+2.50 % on 2026-11-13, commits 001cc0de..001fc0de, not accepted" in plot.get_attribute("aria-label")
    plot.focus()
    told = shown.locator("details[open] output")
    for key, expected in (("Home", "0000c0de, 100 us, accepted run"), ("ArrowRight", "0001c0de, 100 us, recorded run")):
        plot.press(key)
        assert expected in told.inner_text()
    for _ in range(29):
        plot.press("ArrowRight")
    assert "2026-11-13 12:00 UTC, 001ec0de, 102.5 us" in told.inner_text()
    assert "+2.50 %" in told.inner_text()

    def axis() -> str:
        return str(shown.locator("details[open] svg .unit").last.text_content())

    whole = axis()
    assert whole == "commits, 2026-10-14 to 2026-11-22"
    plot.press("+")
    assert axis() not in (whole, "commits, no run here")
    plot.press("0")
    assert axis() == whole
    box = plot.bounding_box()
    shown.mouse.move(box["x"] + 80, box["y"] + 90)
    shown.mouse.down()
    shown.mouse.move(box["x"] + 180, box["y"] + 90)
    shown.mouse.up()
    assert axis() != whole
    shown.get_by_role("button", name="all runs").click()
    assert axis() == whole
    shown.select_option("#axis", "day")
    assert axis() == "day (UTC)"
    shown.select_option("#axis", "")


def test_a_line_is_drawn_where_its_values_lie(shown: Any) -> None:
    """The level behind the change is 2.5 % above the one before it, and drawn above it."""
    shown.locator("#list summary").first.click()
    shown.locator("details[open] svg .level").first.wait_for(state="attached")
    before, after = (float(path.get_attribute("d").split()[1].split("H")[0]) for path in shown.locator("details[open] svg .level").all())
    assert after < before
    points = shown.locator("details[open] svg .value").get_attribute("d").removeprefix("M").split("L")
    heights = [float(point.split()[1]) for point in points]
    assert len(heights) == 40
    assert heights[0] == pytest.approx(before, abs=2)
    assert heights[-1] == pytest.approx(after, abs=2)
