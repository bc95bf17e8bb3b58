"""Run every kernel of the catalogue under each tool of compute-sanitizer.

    python ci/bench/sanitize.py [--json FILE]

Needs a GPU and `compute-sanitizer` on the PATH. Exits with 1 if a tool finds anything or a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "initcheck", "racecheck", "synccheck")
TARGET = Path(__file__).with_name("launch_every_kernel.py")
FOUND = 9
"""Exit code that the sanitizer gives for a finding."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    arguments = parser.parse_args()
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        sys.exit("compute-sanitizer is not on the PATH; it comes with the CUDA Toolkit")
    seen = {}
    for tool in TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, str(TARGET), "cuda"]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        said = [line.strip("= ") for line in run.stdout.splitlines() if "SUMMARY" in line or "every result right" in line]
        seen[tool] = {"exit": run.returncode, "said": said}
        print(f"{tool:10s} exit {run.returncode}: {'; '.join(said)}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n")
    return int(any(result["exit"] for result in seen.values()))


if __name__ == "__main__":
    sys.exit(main())
