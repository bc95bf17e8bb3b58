"""A stand-in for `nsys profile` and `ncu`: runs the child on the simulated device and writes what it saw as its report.

What it does is told by the variable FAKE_PROFILER, as JSON: `nvtx_library` and `nvtx_log` of the injection library that reads the child's
ranges. The report is JSON: the options that it was given, the child's command, and the paths of all ranges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from nvtx_injection import Trace


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        print("NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0")
        return 0
    arguments = sys.argv[1:]
    begin = arguments.index(sys.executable)
    options, child = arguments[:begin], arguments[begin:]
    told = json.loads(os.environ["FAKE_PROFILER"])
    trace = Trace(Path(told["nvtx_library"]), Path(told["nvtx_log"]))
    on_model = ["sim:h100" if argument == "cuda" else argument for argument in child]
    command = [*on_model, "--gpumem-budget", "20 ms", "-p", "no:cacheprovider"]
    done = subprocess.run(command, env={**os.environ, **trace.environment}, check=False)
    Path(output(options)).write_text(
        json.dumps({"options": options, "child": child, "ranges": trace.ranges()})
    )
    return done.returncode


def output(options: list[str]) -> str:
    """The file that the options name."""
    for position, option in enumerate(options):
        if option == "--export":
            return options[position + 1]
        if option.startswith("--output="):
            return option.partition("=")[2]
    raise SystemExit(f"no output among {options}")


if __name__ == "__main__":
    sys.exit(main())
