"""Every set of extras that a user may choose resolves, and none downloads more than it has to.

    python ci/extras.py

Asks pip for a solution for this Python in an empty environment, and installs nothing. Exits with 1 where there is none, or where it is too
large.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlparse

ROOT = Path(__file__).parents[1]
SETS = (
    *("", "cuda12", "cuda13", "plots", "test", "dev", "docs"),
    *("cuda12,cupti12", "cuda13,cupti13", "cuda12,cupti12,plots", "cuda13,cupti13,plots,dev,docs"),
)
LIMIT_MB = 400
"""Of one set. CuPy's extra `ctk` alone has 1200."""


def size(url: str) -> int:
    """Bytes of an archive; 0 where the server does not say."""
    parts = urlparse(url)
    if parts.scheme == "file":
        path = Path(unquote(parts.path))
        return path.stat().st_size if path.is_file() else 0
    with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=60) as answer:
        return int(answer.headers.get("Content-Length") or 0)


def resolve(extras: str) -> list[dict[str, dict[str, str]]]:
    """The packages that pip would install.

    Raises:
        subprocess.CalledProcessError: there is no solution.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip = ["-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report"]
        command = [sys.executable, *pip, str(report)]
        subprocess.run([*command, f"{ROOT}[{extras}]" if extras else str(ROOT)], check=True)
        found: list[dict[str, dict[str, str]]] = json.loads(report.read_text())["install"]
        return found


def main() -> int:
    wrong = 0
    for extras in SETS:
        try:
            found = resolve(extras)
        except subprocess.CalledProcessError:
            print(f"[{extras}]: there is no solution")
            wrong += 1
            continue
        megabytes = sum(size(one["download_info"]["url"]) for one in found) / 1e6
        print(f"[{extras}]: {len(found)} packages, {megabytes:.0f} MB")
        wrong += megabytes > LIMIT_MB
    print(f"extras: {len(SETS) - wrong} of {len(SETS)} resolve within {LIMIT_MB} MB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
