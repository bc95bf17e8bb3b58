"""Benchmarks of pytest-benchmark that `--gpumem-existing=adopt` measures, beside the timers of PyTorch, CuPy and Triton, in one session.

    python ci/bench/adopted_times.py --json adopted_times.json

Hot, `torch.utils.benchmark` and `cupyx.profiler.benchmark`; with a dirty cache, `triton.testing.do_bench`, which fills the cache with zeros
before each call. Prints each operation's time here and there, pytest-benchmark's own, and the reason of a difference above 3 %. Exits with
1 if an operation was not measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import installed, record_parser, write_record

SUITE = Path(__file__).with_name("adopted_operations.py")
OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "--gpumem",
    "--gpumem-existing=adopt",
    "--benchmark-max-time=0.1",
    "--benchmark-min-rounds=3",
)


def session(device: str) -> dict[str, Any]:
    """What pytest-benchmark stores of the suite."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        arguments = [
            *OPTIONS,
            f"--gpumem-device={device}",
            f"--benchmark-json={results}",
            str(SUITE),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        if not results.exists():
            sys.exit(
                f"adopted_times: the session ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each operation and peer: seconds here, there, and by pytest-benchmark alone."""
    found = []
    for one in document["benchmarks"]:
        ours = one["extra_info"].get("gpumem")
        for peer, seconds in one["extra_info"]["peers"].items():
            latency = None if ours is None else ours["latency_s"]
            found.append(
                {
                    "test": one["name"],
                    "peer": peer,
                    "seconds": latency,
                    "peer_seconds": seconds,
                    "host_seconds": one["extra_info"].get("host s"),
                    "difference": None if latency is None else latency / seconds - 1,
                }
            )
    return found


CLOSE = 0.03
FILL = 60e-6  # seconds that `do_bench` takes to fill the cache, behind which a launch of the host hides


def reason(row: dict[str, Any]) -> str:
    """Why a row's times differ by more than 3 %."""
    if row["difference"] is None or abs(row["difference"]) <= CLOSE:
        return ""
    launch, name = row["host_seconds"], row["peer"]
    if name == "cupyx.profiler.benchmark":
        return "launch inside its events"
    if launch > (FILL if name == "triton.testing.do_bench" else row["seconds"]):
        return "launch outlasts the GPU"
    return "not explained"


def table(record: dict[str, Any]) -> str:
    """The record's rows as text, in microseconds."""
    device, lines = record["device"], []
    for row in record["rows"]:
        here = (
            f"{'not measured':>17}"
            if row["seconds"] is None
            else f"{row['seconds'] * 1e6:8.2f}{100 * row['difference']:+8.1f}%"
        )
        host = "" if row["host_seconds"] is None else f"{row['host_seconds'] * 1e6:.2f}"
        line = f"{row['test'].removeprefix('test_'):<22}{host:>7}{here}{row['peer_seconds'] * 1e6:9.2f}  {row['peer']:<25} {reason(row)}"
        lines.append(line.rstrip())
    names = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    first = f"{device['name']}, driver {device['driver']}, {names}"
    head = f"{'operation, us':<22}{'launch':>7}{'adopted':>8}{'':>9}{'timer':>9}  by"
    return "\n".join([first, "", head, *lines])


def main() -> int:
    """Run, print and record."""
    options = record_parser(__doc__).parse_args()
    document = session(options.device)
    found = rows(document)
    versions = installed("pytest-gpumem", "pytest-benchmark", "torch", "triton")
    record = {
        "kind": "adopted_times",
        "device": document["gpumem"]["device"],
        "rows": found,
        "versions": versions,
    }
    print(table(record))
    if options.json:
        write_record(options.json, record, indent=1)
    return 1 if any(row["seconds"] is None for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
