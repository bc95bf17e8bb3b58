"""Plant a slow-down and see the gate catch it, twice: the second run must not have learnt the slower time.

Runs four sessions of pytest in processes of their own, on a copy kernel that moves some per cent more bytes when planted:
save a baseline, compare unchanged code with it, compare planted code with `--gpumem-save`, and once more. Prints one line each and
writes what was seen as JSON.

    python ci/bench/planted_regression.py [--device cuda|sim] [--slower 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEST = """
import os
import pytest
from pytest_gpumem import MiB

@pytest.mark.gpumem(max_regression="1%")
@pytest.mark.parametrize("mib", [32, 256])
def test_copy(gpu_benchmark, gpu_kernels, device_buffer, mib):
    nbytes = int(mib * MiB * (1 + float(os.environ["PLANTED"]) / 100)) // 4096 * 4096
    gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes, "f4"), device_buffer(nbytes, "f4"))
"""


def session(folder: Path, device: str, planted: float, *options: str) -> dict[str, Any]:
    """One run of pytest; its exit code, JUnit failures and rows."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--gpumem", "--gpumem-device", device, "-q", "-p", "no:cacheprovider"]
    command += [f"--benchmark-json={result}", *options, "test_planted.py"]
    run = subprocess.run(command, cwd=folder, env={**os.environ, "PLANTED": str(planted)}, capture_output=True, text=True, check=False)
    if not result.exists():
        sys.exit(f"pytest wrote no results (exit {run.returncode}):\n{run.stdout}{run.stderr}")
    document = json.loads(result.read_text())["gpumem"]
    rows = [
        {
            "test": row["nodeid"],
            "latency_s": row["measurement"]["latency"],
            "verdict": row["verdict"]["outcome"],
            "reason": row["verdict"]["reason"].replace(f"{folder}{os.sep}", ""),
            "delta": (row["verdict"]["comparison"] or {}).get("delta"),
        }
        for row in document["rows"]
    ]
    return {
        "planted_percent": planted,
        "options": list(options),
        "exit": run.returncode,
        "device": document["device"]["name"],
        "rows": rows,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slower", type=float, default=10.0, help="per cent more bytes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write what was seen")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_planted.py").write_text(TEST)
        (folder / "pytest.ini").write_text("[pytest]\n")
        plan = [
            ("baseline saved", 0.0, ("--gpumem-save",), 0),
            ("unchanged", 0.0, (), 0),
            ("planted, saving", arguments.slower, ("--gpumem-save",), 1),
            ("planted again", arguments.slower, (), 1),
        ]
        seen, wrong = [], 0
        for title, planted, options, expected in plan:
            outcome = {"step": title, **session(folder, arguments.device, planted, *options), "expected_exit": expected}
            seen.append(outcome)
            verdicts = ", ".join(
                f"{row['latency_s'] * 1e6:.2f} us {row['verdict']}" + (f" ({row['delta']:+.2%})" if row["delta"] is not None else "")
                for row in outcome["rows"]
            )
            ok = outcome["exit"] == expected
            wrong += not ok
            print(f"{title:16s} exit {outcome['exit']} ({'as expected' if ok else f'expected {expected}'}): {verdicts}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(seen, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
