"""Benchmarks of pytest-benchmark that `--gpumem-existing=adopt` measures, beside the timers of PyTorch, CuPy and Triton, in one session.

    python ci/bench/adopted_times.py --json adopted_times.json

Hot, `torch.utils.benchmark` and `cupyx.profiler.benchmark`; with a dirty cache, `triton.testing.do_bench`, which fills the cache with zeros
before each call. Prints each operation's time here and there, and pytest-benchmark's own. A timer of the host's clock measures the launch
where that takes longer than the work. Exits with 1 if an operation was not measured.
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
OPTIONS = ("-q", "-p", "no:cacheprovider", "--gpumem", "--gpumem-existing=adopt", "--benchmark-max-time=0.1", "--benchmark-min-rounds=3")


def session(device: str) -> dict[str, Any]:
    """What pytest-benchmark stores of the suite."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results.json")
        arguments = [*OPTIONS, f"--gpumem-device={device}", f"--benchmark-json={results}", str(SUITE)]
        done = subprocess.run([sys.executable, "-m", "pytest", *arguments], capture_output=True, text=True, check=False, cwd=folder)
        if not results.exists():
            sys.exit(f"adopted_times: the session ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
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


def main() -> int:
    """Run, print and record."""
    options = record_parser(__doc__).parse_args()
    document = session(options.device)
    found = rows(document)
    for row in found:
        here = "not measured" if row["seconds"] is None else f"{row['seconds'] * 1e6:10.2f} us {100 * row['difference']:+7.1f} %"
        host = "" if row["host_seconds"] is None else f", pytest-benchmark {row['host_seconds'] * 1e6:.2f} us"
        print(f"{row['test']:<28}{here}  {row['peer']} {row['peer_seconds'] * 1e6:.2f} us{host}")
    if options.json:
        versions = installed("pytest-gpumem", "pytest-benchmark", "torch", "triton")
        record = {"kind": "adopted_times", "device": document["gpumem"]["device"], "rows": found, "versions": versions}
        write_record(options.json, record, indent=1)
    return 1 if any(row["seconds"] is None for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
