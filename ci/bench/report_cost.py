"""What a report costs: the time of `gpumem report` and the size of its page, for many tests with a history.

Writes a result file and one more for each earlier process, with every sample, as sessions do, and runs the command as a user does, start
of Python included.

    python ci/bench/report_cost.py --json ci/records/no-gpu/report_cost.json

Exits with 1 where the median of the runs takes more than 3 s, or the page more than 2 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Traffic
from pytest_gpumem.records.row import Comparison, Row, Verdict
from pytest_gpumem.records.schema import document
from pytest_gpumem.units import MiB

SECONDS = 3.0
BYTES = 2_000_000
PLACEMENTS, SAMPLES = 8, 40
"""Of each measurement: 320 samples, twice what a page draws of one."""
CONDITIONS = Conditions(1.98e9, 2.6e9, 41.0, 310.0)


def rows(tests: int, random_: random.Random) -> list[Row]:
    """Rows of tests that are parametrised over ten sizes each, with all that a real row has."""
    made = []
    for index in range(tests):
        latency = 1e-4 * (1 + index % 10) * random_.lognormvariate(0, 0.002)
        placements = tuple(tuple(latency * random_.lognormvariate(0, 0.003) for _ in range(SAMPLES)) for _ in range(PLACEMENTS))
        delta = random_.gauss(0, 0.005)
        comparison = Comparison(delta, delta - 0.004, delta + 0.003, 0.008, 20)
        outcome = Outcome.FAIL if delta > 0.01 else Outcome.PASS
        measurement = Measurement(
            label="",
            target="triad",
            mode="clean-cold",
            sampler="blocked",
            sampler_reason="one launch at a time behind a held stream reads the steadiest",
            placements=placements,
            half_width=latency * 1e-3,
            traffic=Traffic(2 * MiB * (1 + index % 10), MiB * (1 + index % 10)),
            footprint=3 * MiB * (1 + index % 10),
            floor=1.3e-6,
            conditions=(CONDITIONS, CONDITIONS),
            during=CONDITIONS,
            notes=("not as precise as wanted: 8 placements leave a half-width of 0.151 % > 0.100 %",),
            sectors_per_request=4.0,
        )
        verdict = Verdict(
            outcome, "+0.312 % against 20 processes, between -0.100 % and +0.712 %; 1 % is allowed", comparison, simulated=True
        )
        nodeid = f"tests/memory/test_file_{index // 50}.py::test_something_of_some_length_{index // 10}[{1 + index % 10}MiB]"
        made.append(Row(nodeid, Limits(max_regression="1%"), verdict, measurement))
    return made


def write(path: Path, made: list[Row], utc: datetime) -> None:
    """A result file as pytest-benchmark writes it."""
    value = {
        "datetime": utc.isoformat(),
        "commit_info": {"id": f"{abs(hash(utc)):040x}", "dirty": False},
        "benchmarks": [],
        "gpumem": document(DATASHEETS["h100"].facts(), made, {"mode": "clean-cold"}),
    }
    path.write_text(json.dumps(value, indent=4))


def measure(tests: int, processes: int, runs: int) -> tuple[list[float], list[float], int]:
    """Seconds of each run from start to exit, seconds of the processor that it took, and bytes of the page."""
    random_ = random.Random(20)
    now = datetime(2026, 11, 21, tzinfo=timezone.utc)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "history").mkdir()
        for index in range(processes):
            write(folder / "history" / f"{index}.json", rows(tests, random_), now - timedelta(days=processes - index))
        write(folder / "now.json", rows(tests, random_), now)
        command = [
            sys.executable,
            "-c",
            "from pytest_gpumem.cli import main; main()",
            "report",
            "now.json",
            "-o",
            "page.html",
            "--history",
            "history",
        ]
        seconds, cpu = [], []
        for _ in range(runs):
            begun, used = time.perf_counter(), _used()
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
            seconds.append(time.perf_counter() - begun)
            cpu.append(_used() - used)
        return seconds, cpu, (folder / "page.html").stat().st_size


def _used() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tests", type=int, default=300)
    parser.add_argument("--processes", type=int, default=20, help="earlier processes (default 20)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to FILE")
    chosen = parser.parse_args()
    seconds, cpu, size = measure(chosen.tests, chosen.processes, chosen.runs)
    median = statistics.median(seconds)
    print(f"{chosen.tests} tests x {chosen.processes} processes: {median:.2f} s (median of {len(seconds)}), {size / 1e6:.2f} MB")
    if chosen.json is not None:
        record = {
            "kind": "report_cost",
            "tests": chosen.tests,
            "processes": chosen.processes,
            "samples_per_test": PLACEMENTS * SAMPLES,
            "seconds": seconds,
            "cpu_seconds": cpu,
            "median_seconds": median,
            "limit_seconds": SECONDS,
            "bytes": size,
            "limit_bytes": BYTES,
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "version": version("pytest-gpumem"),
        }
        write_record(chosen.json, record, indent=1)
    return int(median > SECONDS or size > BYTES)


if __name__ == "__main__":
    sys.exit(main())
