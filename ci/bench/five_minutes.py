"""Follow the README's first five minutes, and take the time: a test, a baseline, a red gate.

    python ci/bench/five_minutes.py --json ci/records/nvidia-h100/five_minutes.json
    GPUMEM_DEVICE=sim python ci/bench/five_minutes.py --install --json ci/records/no-gpu/five_minutes.json

The test and the commands are those of the README. With --install the package is installed into a
new environment first. Exits with 1 if the unchanged test is red, the gate of the slowed-down test is
green, or all steps take more than `MOST` seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import record_parser, write_record

ROOT = Path(__file__).resolve().parents[2]
MOST = 300.0
"""Seconds."""
STEP = re.compile(r"^<!-- five minutes: ([^\n]+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def steps() -> dict[str, str]:
    """The README's blocks, by the name in their marker."""
    return dict(STEP.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def followed(folder: Path, *, install: bool, python: str = sys.executable) -> dict[str, Any]:
    """The record: seconds and exit code of each command, and what the gate says of the test.

    `folder` is empty. `python` has the commands of the README in its folder.
    """
    blocks = steps()
    runs = []
    if install:
        environment = folder.with_name(folder.name + "-env")
        venv = [sys.executable, "-m", "venv", str(environment)]
        runs.append(run(venv, folder, "create an environment"))
        python = str(environment / "bin" / "python")
        pip = [python, "-m", "pip", "install", "-q", str(ROOT)]
        runs.append(run(pip, folder, "install pytest-gpumem"))
    (folder / "test_scale.py").write_text(blocks["test_scale.py"], encoding="utf-8")
    for name in ("save", "slow down"):
        for line in blocks[name].splitlines():
            runs.append(run(["bash", "-c", line], folder, line, first=Path(python).parent))
    device, failed = "", None
    for step in runs:
        for line in step.pop("output").splitlines():
            if line.startswith("gpumem: ") and not device:
                device = line.removeprefix("gpumem: ")
            if line.startswith("FAIL") and "test_scale.py::test_scale" in line:
                failed = line
    return {
        "kind": "five_minutes",
        "device": device,
        "steps": runs,
        "seconds": sum(step["seconds"] for step in runs),
        "failed": failed,
    }


def run(command: list[str], folder: Path, what: str, first: Path | None = None) -> dict[str, Any]:
    """One step, to its end; with the programs of the folder `first` before all others."""
    environment = dict(os.environ)
    if first is not None:
        environment["PATH"] = f"{first}{os.pathsep}{environment['PATH']}"
    begun = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return {
        "step": what,
        "seconds": time.monotonic() - begun,
        "exit": done.returncode,
        "output": done.stdout,
    }


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    lines = [record["device"], ""]
    lines += [f"{one['seconds']:6.1f} s  {one['step']}" for one in record["steps"]]
    return "\n".join(
        [*lines, f"{record['seconds']:6.1f} s  in all", record["failed"] or "nothing failed"]
    )


def missed(record: dict[str, Any]) -> list[str]:
    """The promises that it breaks."""
    *before, last = record["steps"]
    broken = [f"{one['step']}: exit code {one['exit']}" for one in before if one["exit"]]
    broken += (
        ["the gate of the slow-down is not red"]
        if last["exit"] != 1 or record["failed"] is None
        else []
    )
    broken += (
        [f"{record['seconds']:.0f} s are more than {MOST:.0f}"] if record["seconds"] > MOST else []
    )
    return broken


def main() -> int:
    parser = record_parser(__doc__, device=None)
    parser.add_argument(
        "--install", action="store_true", help="into a new environment; needs a package index"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = followed(Path(folder), install=given.install)
    print(table(record))
    if given.json is not None:
        write_record(given.json, record, indent=1)
    for one in missed(record):
        print(f"missed: {one}")
    return 1 if missed(record) else 0


if __name__ == "__main__":
    sys.exit(main())
