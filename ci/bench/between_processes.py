"""How far does each row of a test selection spread between processes?

The selection runs in fresh pytest processes, one after another, by the command that users have: `pytest --gpumem`. Of every measurement the
latency of each process, or its latency per access where it has one, is kept; printed are mean, standard deviation over mean, and the
distance of the largest value from the smallest.

    python ci/bench/between_processes.py --json ci/records/nvidia-h200/latency_between_processes.json -- tests/memory/test_latency.py

The record is written after every process. Exits with 1 if a process failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import within
from record_file import head, write_record

from pytest_gpumem.records.schema import document_from_json

PYTEST = (sys.executable, "-m", "pytest", "--gpumem", "-q", "-p", "no:cacheprovider")


def readings(results: dict[str, Any]) -> dict[str, float]:
    """Seconds by test and label, out of one process's pytest-benchmark JSON: per access where accesses were counted."""
    return {
        row.key: row.measurement.latency_per_access or row.measurement.latency
        for row in document_from_json(results["gpumem"]).rows
        if row.measurement is not None
    }


def summary(runs: list[dict[str, float]]) -> list[dict[str, Any]]:
    """For each row that every process has: mean in seconds, standard deviation (n - 1) and whole range, both over the mean."""
    found = []
    for name in runs[0] if len(runs) > 1 else ():
        if all(name in run for run in runs):
            values = np.array([run[name] for run in runs])
            mean = float(values.mean())
            found.append(
                {
                    "row": name,
                    "processes": len(values),
                    "mean": mean,
                    "spread": float(values.std(ddof=1)) / mean,
                    "range": float(np.ptp(values)) / mean,
                }
            )
    return found


def table(record: dict[str, Any]) -> str:
    """The summary as text, with the device and the date."""
    lines = [head(record), ""]
    rows = record["summary"]
    width = max((len(row["row"]) for row in rows), default=3)
    lines.append(f"{'row':<{width}}  processes      mean ns  spread %  largest less smallest %")
    lines += [
        f"{row['row']:<{width}}{row['processes']:>11}{row['mean'] * 1e9:>13.2f}{100 * row['spread']:>10.3f}{100 * row['range']:>25.3f}"
        for row in rows
    ]
    return "\n".join(lines)


def _run(selection: list[str], device: str) -> dict[str, Any]:
    """One process's results.

    Raises:
        RuntimeError: pytest failed; its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [*PYTEST, "--gpumem-device", device, f"--benchmark-json={file}", *selection]
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace")
        if done.returncode or not file.exists():
            raise RuntimeError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        results: dict[str, Any] = json.loads(file.read_text())
        return results


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=6, help="fresh processes, at least 2 (default 6)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="as --gpumem-device (default cuda)")
    parser.add_argument("--seconds", type=float, default=300, help="begin no process that would end after this long (default 300)")
    parser.add_argument("selection", nargs="+", help="arguments for pytest: files, tests, -k ...")
    options = parser.parse_args()
    if options.processes < 2:
        parser.error(f"--processes {options.processes}: at least 2 are needed")
    runs: list[dict[str, float]] = []
    record: dict[str, Any] = {}
    for _number in within(range(1, options.processes + 1), options.seconds, "process"):
        try:
            results = _run(options.selection, options.device)
        except RuntimeError as error:
            print(error)
            return 1
        runs.append(readings(results))
        record = {
            "kind": "between_processes",
            "device": results["gpumem"]["device"],
            "selection": options.selection,
            "runs": runs,
            "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "summary": summary(runs),
        }
        if options.json:
            write_record(options.json, record, indent=1)
    print(table(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
