"""The memory suite, run again and again: how each run ends, its time and the outcomes of its rows.

    python ci/bench/suite_runs.py --runs 2 --json suite_runs.json

Runs `pytest --gpumem` in this checkout. Exits with 1 if a test of a run fails, or a run has no row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import ROOT, chosen_device, device_of, record_parser, utc_now, write_record


def suite(device: str, words: list[str]) -> dict[str, Any]:
    """One run. `words`: further arguments of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        results, junit = Path(folder, "results.json"), Path(folder, "junit.xml")
        own = (f"--gpumem-device={device}", f"--benchmark-json={results}", f"--junitxml={junit}")
        begun = time.perf_counter()
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--gpumem", *own, *words], cwd=ROOT, check=False
        ).returncode
        seconds = time.perf_counter() - begun
        counts = ElementTree.parse(junit).getroot()[0].attrib
        rows = json.loads(results.read_text())["gpumem"]["rows"] if results.exists() else []
    found = {name: int(counts[name]) for name in ("tests", "failures", "errors", "skipped")}
    return {
        "exit": code,
        "seconds": seconds,
        **found,
        "rows": Counter(row["verdict"]["outcome"] for row in rows),
    }


def main() -> int:
    """Run, print and record."""
    parser = record_parser(__doc__)
    parser.add_argument("--runs", type=int, default=2, help="of the suite (default: %(default)s)")
    parser.add_argument("words", nargs="*", help="further arguments of pytest")
    options = parser.parse_args()
    device = device_of(chosen_device(parser, options.device).facts)
    record: dict[str, Any] = {
        "kind": "suite_runs",
        "begun": utc_now(),
        "ended": None,
        "device": device,
        "runs": [],
    }
    for number in range(options.runs):
        record["runs"].append(suite(options.device, options.words))
        record["ended"] = utc_now()
        if options.json:
            write_record(options.json, record, indent=1)
        print(f"run {number + 1}: {record['runs'][-1]}", flush=True)
    return int(any(one["exit"] or not one["rows"] for one in record["runs"]))


if __name__ == "__main__":
    sys.exit(main())
