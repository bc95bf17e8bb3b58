"""Profile one test's measure range with Nsight Compute and see that only that test's kernel was profiled.

    python ci/bench/nvtx_filter.py [--json FILE]

Needs a GPU, `ncu` on the PATH, and the permission to read counters. Clocks are left alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

SUITE = "tests/memory/test_stream.py"
TEST, KERNEL = "test_triad", "triad"
METRICS = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    arguments = parser.parse_args()
    ncu = shutil.which("ncu")
    if ncu is None:
        sys.exit("ncu is not on the PATH; it comes with Nsight Compute")
    command = ["ncu", "--clock-control", "none", "--nvtx", "--nvtx-include", f"gpumem@{TEST}.measure/", "--csv", "--page", "raw"]
    command += ["--metrics", ",".join(METRICS), "--print-units", "base"]
    command += [
        "python3",
        "-m",
        "pytest",
        "--gpumem",
        "--gpumem-device",
        "cuda",
        SUITE,
        "-q",
        "-p",
        "no:cacheprovider",
        "--benchmark-quiet",
    ]
    run = subprocess.run([ncu, *command[1:]], capture_output=True, text=True, check=False)
    lines = [line for line in run.stdout.splitlines() if line.startswith('"')]
    if run.returncode or len(lines) < 3:
        sys.exit(f"ncu profiled nothing (exit {run.returncode}):\n{run.stdout[-2000:]}{run.stderr[-2000:]}")
    heading, _units, *profiled = list(csv.reader(lines))
    rows = [dict(zip(heading, line, strict=False)) for line in profiled]
    kernels = Counter(row["Kernel Name"].split("<")[0].removeprefix("void ").split("(")[0] for row in rows)
    outside = [row for row in rows if f"{TEST}.measure" not in row[next(h for h in heading if h.startswith("thread Domain"))]]
    seen = {
        "command": " ".join(command),
        "suite": SUITE,
        "profiled_kernels": dict(kernels),
        "launches": [{"kernel": row["Kernel Name"], **{m: float(row[m].replace(",", "")) for m in METRICS}} for row in rows],
    }
    print(json.dumps(seen["profiled_kernels"]), f"profiled in {TEST}'s measure range out of a session of {SUITE}")
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n")
    return 1 if set(kernels) != {KERNEL} or outside else 0


if __name__ == "__main__":
    sys.exit(main())
