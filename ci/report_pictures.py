"""Draw the pictures of docs/report.md: the HTML report of a recorded run, in headless Chromium.

    python ci/report_pictures.py ci/records/nvidia-h200/suite.json docs/images

Needs Playwright for Python and an installed Chromium, and Pillow, which makes the pictures small.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SHOTS = {
    "report-results.png": ("light", 1100, 760, "document.body"),
    "report-plots.png": ("dark", 1100, 1010, "document.getElementById('plots')"),
}
"""File: theme, width and height of the window, and what is at its top."""
COLOURS = 256


def main() -> int:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    results, folder = Path(sys.argv[1]), Path(sys.argv[2])
    chromium = next(
        (
            found
            for name in ("chromium", "chromium-browser", "google-chrome")
            if (found := shutil.which(name))
        ),
        None,
    )
    if chromium is None:
        sys.exit("report_pictures: no Chromium is installed")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        page = Path(name, "report.html")
        command = [
            sys.executable,
            "-c",
            "from pytest_gpumem.cli import main; main()",
            "report",
            str(results),
            "-o",
            str(page),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for file, (theme, width, height, top) in SHOTS.items():
            window = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=theme
            )
            window.goto(page.as_uri())
            window.evaluate(f"{top}.scrollIntoView()")
            picture = Image.open(io.BytesIO(window.screenshot())).convert("RGB").quantize(COLOURS)
            picture.save(folder / file, optimize=True)
            print(f"wrote {folder / file}, {(folder / file).stat().st_size // 1000} kB")
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
