"""Draw the pictures of docs/report.md and docs/how-to/history.md, in headless Chromium: the HTML report of a recorded run, and the page of
a history of generated values.

    python ci/report_pictures.py ci/records/nvidia-h200/suite.json docs/images

Needs Playwright for Python and an installed Chromium, and Pillow, which makes the pictures small.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest_gpumem.history.data import History

SHOTS = {
    "report-results.png": ("report", "light", 1100, 760, "document.body"),
    "report-plots.png": ("report", "dark", 1100, 1010, "document.getElementById('plots')"),
    "history.png": ("history", "light", 1100, 880, "document.body"),
    "history-test.png": ("history", "dark", 1100, 560, "document.querySelector('details[open]')"),
}
"""File: page, theme, width and height of the window, and what is at its top."""
COLOURS = {"report": 64, "history": 160}  # of a picture; red and green of a few characters need more


NEWEST = datetime(2026, 11, 22, tzinfo=timezone.utc)
RUNS = 240
PLANTED = {
    (7, "latency"): (228, 1.031, ""),
    (7, "peak"): (228, 1.25, ""),
    (3, "latency"): (214, 1.018, "ann"),
    (11, "latency"): (215, 0.94, ""),
}
"""Test and metric: the first run after the change, its factor, and who accepted it."""


def generated() -> History:
    """24 tests over 240 days on a simulated card, with noise of 0.3 % and four changes."""
    import numpy as np

    from pytest_gpumem.history.data import Change, History, Run, Series

    draw, name = np.random.default_rng(0), "NVIDIA H100 80GB HBM3"
    days = [NEWEST - timedelta(days=RUNS - 1 - run) for run in range(RUNS)]
    runs = tuple(Run(day, hashlib.sha1(str(day).encode()).hexdigest(), "simulated", name, True, True) for day in days)
    series: list[Series] = []
    changes: list[Change] = []
    for test in range(24):
        kind = ("triad", "copy", "scatter", "reduce")[test % 4]
        level = {"latency": 1e-5 * (1 + test), "peak": 2.0 ** (26 + test % 6), "kernels": 1.0, "kept": 0.0}
        for metric, unit in (("latency", "s"), ("peak", "B"), ("kernels", ""), ("kept", "B")):
            noise = draw.normal(0, 0.003, RUNS) if metric == "latency" else np.zeros(RUNS)
            values = level[metric] * np.exp(noise)
            if found := PLANTED.get((test, metric)):
                at, factor, who = found
                values[at:] *= factor
                before, why = level[metric], "rounds to nearest now" if who else ""
                changes.append(Change(len(series), at, at - 1, at, before, before * factor, factor - 1, bool(who), who, why))
            key = f"tests/test_stream.py::test_{kind}[{2 ** (test // 4 + 4)} MiB]"
            series.append(Series(key, metric, unit, "simulated", None, np.arange(RUNS, dtype=np.int32), values))
    return History(runs, tuple(series), tuple(changes))


def main() -> int:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    from pytest_gpumem.history.page import page as history_page

    results, folder = Path(sys.argv[1]), Path(sys.argv[2])
    chromium = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if chromium is None:
        sys.exit("report_pictures: no Chromium is installed")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        page = Path(name, "report.html")
        Path(name, "history.html").write_text(history_page(generated(), NEWEST - timedelta(days=30)))
        command = [sys.executable, "-c", "from pytest_gpumem.cli import main; main()", "report", str(results), "-o", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for file, (shown, theme, width, height, top) in SHOTS.items():
            window = browser.new_page(viewport={"width": width, "height": height}, color_scheme=theme)
            window.goto(Path(name, f"{shown}.html").as_uri())
            if "details" in top:
                window.locator("#list summary").first.click()
                window.locator("details[open] figure").first.wait_for()
            window.evaluate(f"{top}.scrollIntoView()")
            picture = Image.open(io.BytesIO(window.screenshot())).convert("RGB").quantize(COLOURS[shown])
            picture.save(folder / file, optimize=True)
            print(f"wrote {folder / file}, {(folder / file).stat().st_size // 1000} kB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
