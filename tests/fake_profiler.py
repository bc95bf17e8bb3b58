"""A stand-in for `nsys profile` and `ncu`: runs the child on the simulated device and writes what it saw as its report.

What it does is told by the variable FAKE_PROFILER, as JSON: `nvtx_library` and `nvtx_log` of the injection library that reads the child's
ranges. The report is JSON: the options that it was given, the child's command, and the paths of all ranges. Its figures are a page of ncu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import ncu_csv
from nvtx_injection import Trace


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[0] in ("stats", "--import"):
        assert "--nvtx" not in arguments, "ncu refuses it beside --import"
        report = next(word for word in arguments if word.endswith("-rep"))
        print(figures(json.loads(Path(report).read_text())["ranges"]))
        return 0
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


def figures(ranges: list[str]) -> str:
    """A page of ncu with a kernel in each range."""
    lines: list[tuple[object, ...]] = []
    for path in ranges:
        lines.append(
            ncu_csv.line(len(lines), "copy", ncu_csv.stack(*path.split("/")), ncu_csv.H200)
        )
    return ncu_csv.log(*lines)


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
