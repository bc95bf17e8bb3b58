"""What the plugin costs a session that does not use it, and how long one takes to start that uses it and measures nothing.

Runs an empty pytest session with the plugin installed but off, and with `-p no:gpumem`, in interleaved pairs whose order alternates, so
that drift of the machine cancels. Prints the median ratio of the wall times with its bootstrap interval.

    python ci/bench/inert_cost.py --pairs 60 --json inert_cost.json

With --gpumem, the shortest of the sessions counts: what else the machine does only adds to it. Where Python may write no byte code, they
run once more: then nothing may be compiled that pip has compiled already.

Exits with 1 when the interval's lower end is above the limit of 3 %, or the shortest session with --gpumem takes more than 0.6 s: then the
plugin is too slow beyond doubt.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

LIMIT = 1.03
LIMIT_ACTIVE = 0.6
"""Seconds of a session with --gpumem that measures nothing."""
ACTIVE_SESSIONS = 15
NO_TESTS = 5
"""pytest's exit code for a session without tests."""
RESAMPLES = 10_000

COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
WITHOUT = ["-p", "no:gpumem"]
ACTIVE = ["--gpumem", "--gpumem-device", "sim"]


@dataclass(frozen=True)
class Cost:
    wall: float
    """Seconds from start to exit."""
    cpu: float
    """User and system seconds."""


@dataclass(frozen=True)
class Ratio:
    median: float
    low: float
    high: float
    """95 % interval of the median."""


def session(arguments: list[str], folder: Path, **variables: str) -> Cost:
    """Run one empty session in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "PYTEST_"))} | variables
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    finished = subprocess.run([*COMMAND, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - start
    if finished.returncode != NO_TESTS:
        sys.exit(f"inert_cost: the empty session exited with {finished.returncode}:\n{finished.stdout}{finished.stderr}")
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Cost(wall, now.ru_utime - used.ru_utime + now.ru_stime - used.ru_stime)


def check_that_the_sides_differ(folder: Path) -> None:
    """Both would cost the same, and prove nothing, if the plugin were not installed or could not be switched off."""
    shown = [
        "--gpumem-mode" in subprocess.run([*COMMAND, *side, "--help"], cwd=folder, capture_output=True, text=True, check=True).stdout
        for side in ([], WITHOUT)
    ]
    if shown != [True, False]:
        sys.exit("inert_cost: the plugin is not installed for this Python, or -p no:gpumem does not switch it off")


def ratio(numerators: list[float], denominators: list[float]) -> Ratio:
    """Median of the pairs' ratios, with the percentile bootstrap of the pairs."""
    ratios = np.asarray(numerators) / np.asarray(denominators)
    drawn = np.random.default_rng(0).choice(ratios, size=(RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of sessions (default 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all times and the ratio to FILE")
    chosen = parser.parse_args()
    if chosen.pairs < 10:
        parser.error(f"--pairs {chosen.pairs}: an interval of the median needs at least 10")

    on: list[Cost] = []
    off: list[Cost] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "test_empty.py").write_text("")
        check_that_the_sides_differ(folder)
        for _ in range(2):  # byte code and the page cache
            session([], folder), session(WITHOUT, folder)
        for pair in range(chosen.pairs):
            for side in (0, 1) if pair % 2 else (1, 0):
                (off if side else on).append(session(WITHOUT if side else [], folder))
        active = {
            name: [session(ACTIVE, folder, **variables).wall for _ in range(ACTIVE_SESSIONS)]
            for name, variables in (("seconds_active", {}), ("seconds_active_no_bytecode", {"PYTHONDONTWRITEBYTECODE": "1"}))
        }

    wall = ratio([cost.wall for cost in on], [cost.wall for cost in off])
    cpu = ratio([cost.cpu for cost in on], [cost.cpu for cost in off])
    median_ms = 1e3 * float(np.median([cost.wall for cost in off]))
    for what, figure in (("wall", wall), ("CPU", cpu)):
        print(f"{what:<4} time with the plugin off / without it: {figure.median:.4f} (95 % interval {figure.low:.4f} to {figure.high:.4f})")
    print(f"{chosen.pairs} pairs of empty sessions of {median_ms:.0f} ms; limit {LIMIT}")
    for name, seconds in active.items():
        print(f"{name}: {min(seconds):.2f} s, the shortest of {len(seconds)}; limit {LIMIT_ACTIVE} s")
    if chosen.json is not None:
        record = {
            "limit": LIMIT,
            "limit_active": LIMIT_ACTIVE,
            "pairs": chosen.pairs,
            "wall": vars(wall),
            "cpu": vars(cpu),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("pytest", "pytest-benchmark", "pytest-gpumem")},
            "seconds_off": [cost.wall for cost in on],
            "seconds_without": [cost.wall for cost in off],
            **active,
        }
        partial = chosen.json.with_name(chosen.json.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(chosen.json)
    if wall.low > LIMIT:
        print(f"inert_cost: the plugin costs an unused session more than {LIMIT - 1:.0%}", file=sys.stderr)
        return 1
    if any(min(seconds) > LIMIT_ACTIVE for seconds in active.values()):
        print(f"inert_cost: a session with --gpumem that measures nothing takes more than {LIMIT_ACTIVE} s", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
