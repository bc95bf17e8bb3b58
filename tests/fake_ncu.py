"""A stand-in for Nsight Compute: runs the child on the simulated device and counts what it is told to count.

The child's NVTX ranges are real, read through the injection library; the kernels in them are made up, with the figures of the
variable FAKE_NCU. The simulated device is written into the results as if it were a GPU with a tiny L2, since there is nothing to
count on a simulated one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ncu_csv import line, log, stack
from nvtx_injection import Trace

L2_BYTES = 256 * 1024


def main() -> int:
    arguments = sys.argv[1:]
    told = json.loads(os.environ["FAKE_NCU"])
    where = arguments.index("--log-file") + 1
    file, child = Path(arguments[where]), arguments[where + 1 :]
    child = ["sim:h100" if argument == "cuda" else argument for argument in child]
    nvtx = Path(told["nvtx_log"])
    trace = Trace(Path(told["nvtx_library"]), nvtx)
    environment = {**os.environ, **(trace.environment if told.get("attach", True) else {})}
    done = subprocess.run(
        [*child, "--gpumem-budget", "20 ms", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"],
        env=environment,
        check=False,
    )
    results = Path(next(a for a in child if a.startswith("--benchmark-json=")).partition("=")[2])
    if not told.get("simulated") and results.exists() and results.stat().st_size:
        results.write_text(json.dumps(as_a_gpu(json.loads(results.read_text()))))
    file.write_text(told.get("says") or table(trace, told["figures"]))
    return done.returncode


def as_a_gpu(results: dict[str, object]) -> dict[str, object]:
    """The child's results as if a GPU had taken them."""
    document = results["gpumem"]
    assert isinstance(document, dict)
    document["simulated"] = document["device"]["simulated"] = False
    document["device"]["l2_bytes"] = L2_BYTES
    for row in document["rows"]:
        row["verdict"]["simulated"] = False
    return results


def table(trace: Trace, figures: dict[str, list[int]]) -> str:
    """The CSV: a kernel for each measured launch and each flush, with the figures of the innermost range that has some."""
    lines: list[tuple[object, ...]] = []
    for path in trace.ranges():
        names = path.split("/")
        if names[-1].endswith((".launch", ".flush")) and (
            found := [figures[name] for name in names if name in figures]
        ):
            lines.append(line(len(lines), "work(float *)", stack(*names), tuple(found[-1])))
    return log(*lines) if lines else "==WARNING== No kernels were profiled.\n"


if __name__ == "__main__":
    sys.exit(main())
