"""Are rows of pytest-xdist's workers, one GPU each, equal to serial ones?

    python ci/bench/two_workers.py --json ci/records/nvidia-h200/two_workers.json

Runs one selection of tests serially on each of two GPUs, twice, with `-n 2`, twice, and with `-n 4`. Each row of workers is compared with
the serial rows of the same card, whose spread is the noise. The record is written after every run. Exits with 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import within
from record_file import write_record

from pytest_gpumem.outcomes import Code
from pytest_gpumem.records.schema import document_from_json

ROOT = Path(__file__).resolve().parents[2]
PYTEST = (sys.executable, "-m", "pytest", "--gpumem", "--gpumem-device", "cuda", "--gpumem-processes", "1", "-q", "-p", "no:cacheprovider")
SELECTION = ("tests/memory/test_stream.py", "tests/memory/test_access_pattern.py", "tests/memory/test_transpose.py")

TYPICAL = 0.002
"""Most that the median row of workers may differ from serial rows of its card."""
TIMES_NOISE = 4.0
"""Most that a row may differ, in half-ranges of the serial rows and in half-widths of both intervals, whichever is more."""
LEAST = 0.005
"""A row that differs by less is never counted: ranges of two runs are sometimes 0."""

Row = dict[str, Any]
"""Of one row: `card` (UUID), `latency` in seconds, `half_width` as a share of it, `spoilt` (the reason of a row that conditions spoil)."""


def rows_of(results: Mapping[str, Any]) -> dict[str, Row]:
    """The measured rows of one session's pytest-benchmark JSON, by test and label."""
    found: dict[str, Row] = {}
    for row in document_from_json(results["gpumem"]).rows:
        one = row.measurement
        if one is not None:
            spoilt = row.verdict.reason if row.verdict.code is Code.CONDITIONS else None
            card = None if one.provenance is None else one.provenance.card
            found[row.key] = {"card": card, "latency": one.latency, "half_width": one.noise or 0.0, "spoilt": spoilt}
    return found


def compared(serial: Sequence[Mapping[str, Row]], workers: Mapping[str, Row]) -> list[Row]:
    """Each row of workers beside the serial ones of its card: `difference` as a share, and `noise`, which it may be a few times of."""
    found = []
    for key, row in workers.items():
        alike = [run[key] for run in serial if key in run and run[key]["card"] == row["card"]]
        if not alike:
            found.append({"row": key, **row, "difference": None, "noise": None})
            continue
        latencies = [one["latency"] for one in alike]
        mean = statistics.fmean(latencies)
        noise = max((max(latencies) - min(latencies)) / 2 / mean, row["half_width"], *(one["half_width"] for one in alike))
        found.append({"row": key, **row, "difference": row["latency"] / mean - 1, "noise": noise})
    return found


def promises(record: Mapping[str, Any]) -> dict[str, bool]:
    """Each promise, and whether the record keeps it."""
    runs = [run for run in record["runs"] if run["workers"]]
    rows = [row for run in runs for row in run["compared"]]
    differences = [abs(row["difference"]) for row in rows if row["difference"] is not None]
    serial = {key for run in record["runs"] if not run["workers"] for key in run["rows"]}
    return {
        "every row is measured": bool(runs) and all(set(run["rows"]) == serial for run in runs),
        "every run uses both cards": bool(runs) and all(len({row["card"] for row in run["rows"].values()}) == 2 for run in runs),
        "no row is spoilt by conditions": bool(rows) and not any(row["spoilt"] for row in rows),
        f"the median row differs by at most {TYPICAL:.1%}": bool(differences) and statistics.median(differences) <= TYPICAL,
        f"every row differs by at most {TIMES_NOISE:g} times the noise": bool(differences)
        and all(abs(row["difference"]) <= max(LEAST, TIMES_NOISE * row["noise"]) for row in rows if row["difference"] is not None),
        "no run announces that benchmarks are disabled": not any(run["notice"] for run in runs),
    }


def table(record: Mapping[str, Any]) -> str:
    """The runs as text."""
    lines = [f"{record['device']['name']}, driver {record['device']['driver']}, {record['ended'][:10]}", ""]
    lines.append(f"{'workers':>7}{'GPUs':>6}{'rows':>6}{'seconds':>9}{'spoilt':>8}{'median difference %':>21}{'largest %':>11}")
    for run in record["runs"]:
        rows = list(run["rows"].values())
        differences = [abs(row["difference"]) for row in run["compared"] if row["difference"] is not None]
        shown = f"{100 * statistics.median(differences):>21.3f}{100 * max(differences):>11.3f}" if differences else ""
        spoilt = sum(row["spoilt"] is not None for row in rows)
        lines.append(
            f"{run['workers'] or 'none':>7}{len({row['card'] for row in rows}):>6}{len(rows):>6}{run['seconds']:>9.1f}{spoilt:>8}{shown}"
        )
    return "\n".join(lines)


def _run(workers: int, gpu: int | None, selection: Sequence[str]) -> dict[str, Any]:
    """One session's results, its seconds, and whether pytest-benchmark announced that it is disabled."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        command = [*PYTEST, *(("-n", str(workers)) if workers else ()), f"--benchmark-json={file}", *selection]
        environment = {**os.environ} if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        begun = time.monotonic()
        done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=environment, cwd=ROOT)
        seconds = time.monotonic() - begun
        printed = done.stdout + done.stderr
        if not file.exists() or not file.stat().st_size:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {printed[-2000:]}")
        results = json.loads(file.read_text())
        return {
            "workers": workers,
            "gpu": gpu,
            "code": done.returncode,
            "seconds": seconds,
            "notice": "automatically disabled" in printed,
            "device": results["gpumem"]["device"],
            "rows": rows_of(results),
        }


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--seconds", type=float, default=150, help="begin no run that would end after this long (default 150)")
    parser.add_argument("selection", nargs="*", default=SELECTION, help="arguments for pytest: files, tests, -k ...")
    options = parser.parse_args()
    plan = [(0, 0), (0, 1), (2, None), (0, 0), (0, 1), (2, None), (4, None)]
    runs: list[dict[str, Any]] = []
    for number in within(range(len(plan)), options.seconds, "run"):
        try:
            run = _run(*plan[number], options.selection)
        except RuntimeError as error:
            print(error)
            return 1
        runs.append(run)
        serial = [one["rows"] for one in runs if not one["workers"]]
        for one in runs:
            one["compared"] = compared(serial, one["rows"]) if one["workers"] else []
        record = {
            "kind": "two_workers",
            "device": run["device"],
            "selection": list(options.selection),
            "runs": [{name: value for name, value in one.items() if name != "device"} for one in runs],
            "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        }
        if options.json:
            write_record(options.json, record, indent=1)
    print(table(record))
    kept = promises(record)
    print(*(f"{'kept' if one else 'BROKEN'}: {promise}" for promise, one in kept.items()), sep="\n")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
