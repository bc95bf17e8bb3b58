"""Time the waits of a user: the start of a process, a process with one test, and many small tests; of two installations beside each other.

    pip install --target BEFORE .      # in a checkout of the other revision
    python ci/bench/wall_time.py --before BEFORE --json ci/records/nvidia-h100/wall_time.json

Each part runs pytest in fresh processes, with no plugin but pytest-benchmark and this one. `start` is the time from the start of a process
to its first sample. `cold`: with empty caches of CuPy, of this package, of the driver, and of Python, which compiles each module that it
imports. `first`: with the byte code that pip writes, and the other caches empty. `warm`: with all of them. A process beforehand has the
system read the files. Before `warm` stand the times until pytest has read the conftest, has collected, and until the device is open and its
clocks are up. `pytest alone` is the time until it has collected without `--gpumem`, and `alone, cold` the same without byte code. `process`
is the whole of a process with one test, which is what one more process of `--gpumem-processes` and of a duet takes. `small` is a session of
kernels and callables on 1 to 32 MiB. The two installations take turns.

Prints the record with its targets. Exits with 1 where a target of this installation is missed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import chosen_device, device_of, head, record_parser, utc_now, write_record

REPEATS = 3
SMALL = 300
BEFORE_SHARE = 3
"""The other installation runs so many times fewer small tests."""
TARGETS = {"start, warm": 1.5, "start, cold": 3.0, "small": 40.0 / 300}
"""Most seconds; of `small`, for each test."""
TIMEOUT = 300.0

CONFTEST = '''
"""Writes when the process was how far."""

import os
import time
from pathlib import Path

import pytest


def reached(stage):
    with Path(os.environ["WALL_TIME_STAGES"]).open("a") as file:
        file.write(f"{time.time()!r} {stage}\\n")


def after(owner, name, stage, before=None):
    method = getattr(owner, name)

    def once(*arguments):
        if before:
            reached(before)
        result = method(*arguments)
        setattr(owner, name, method)
        reached(stage)
        return result

    setattr(owner, name, once)


reached("pytest ready")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    reached("collected")
    if session.config.option.gpumem:
        from pytest_gpumem.measuring.harness import Harness  # which the session has imported
        from pytest_gpumem.measuring.samplers import BlockedSampler

        after(Harness, "wake", "clocks up", "device open")
        after(BlockedSampler, "samples", "first sample")
'''
STAGES = ("pytest ready", "collected", "device open", "clocks up", "first sample")
"""In their order; each is a time since the start of the process."""
ONE = """
def test_one(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer("32 MiB", "f4") for _ in range(3)), 3.0)
"""
MANY = """
import pytest
from pytest_gpumem import MiB

COUNT = {count}
KERNELS = ["copy", "mul", "stream_add", "triad"]
SIZES = [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("number", range(COUNT))
def test_small(gpu_benchmark, gpu_kernels, device_buffer, number):
    kernel = getattr(gpu_kernels, KERNELS[number % 4])
    arrays = [device_buffer(SIZES[number % 6] * MiB, "f4") for _ in range(3 if number % 4 > 1 else 2)]
    if number % 5:
        gpu_benchmark(kernel, *arrays)
    else:
        gpu_benchmark(lambda *buffers: kernel(*buffers), *arrays)
"""


class Failed(Exception):
    """pytest failed; the message has its last words."""


def session(
    folder: Path, device: str, installation: Path | None, caches: Path, *, byte_code: Path | None = None, alone: bool = False
) -> dict[str, float]:
    """Run the tests of a folder in a fresh process: seconds to each of `STAGES` and to the end ("whole").

    Args:
        folder: has the tests and the conftest.
        device: as --gpumem-device.
        installation: a folder that pip installed into; None: this one.
        caches: has the caches of CuPy, of this package, of the driver, and the byte code of Python; may be empty.
        byte_code: has the byte code instead.
        alone: without --gpumem; until the tests are collected.
    """
    stages = folder / "stages"
    stages.unlink(missing_ok=True)
    environment = {**os.environ, "WALL_TIME_STAGES": str(stages), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if installation is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(installation), *filter(None, [environment.get("PYTHONPATH")])])
    # Some images of containers switch byte code off, which an installation by pip has: each process would compile all that it imports.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment |= {name: str(caches / name) for name in ("CUPY_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")}
    environment["PYTHONPYCACHEPREFIX"] = str((byte_code or caches) / "PYTHONPYCACHEPREFIX")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir=.", "."]
    command += ["-p", "benchmark", "-p", "gpumem"]
    command += [] if alone else ["--gpumem", "--gpumem-device", device]
    needed = {"pytest ready", "collected"} if alone else set(STAGES)
    begun = time.time()
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT)
    ended = time.time()
    reached = dict(line.split(" ", 1)[::-1] for line in stages.read_text().splitlines()) if stages.exists() else {}
    if done.returncode or not needed <= set(reached):
        raise Failed(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return {stage: float(seconds) - begun for stage, seconds in reached.items()} | {"whole": ended - begun}


def project(folder: Path, tests: str) -> Path:
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    return folder


def parts(asked: argparse.Namespace, folder: Path) -> Iterator[tuple[str, str, float]]:
    """Each reading: part, side, seconds."""
    one = project(folder / "one", ONE)
    sides: dict[str, Path | None] = {"after": None} if asked.before is None else {"before": asked.before.resolve(), "after": None}
    warm = folder / "caches"
    for installation in sides.values():
        session(one, asked.device, installation, warm)  # fills them
    for _ in range(asked.repeats):
        for side, installation in sides.items():
            with tempfile.TemporaryDirectory() as empty:
                yield "alone, cold", side, session(one, asked.device, installation, Path(empty), alone=True)["collected"]
            with tempfile.TemporaryDirectory() as empty:
                yield "start, cold", side, session(one, asked.device, installation, Path(empty))["first sample"]
            with tempfile.TemporaryDirectory() as empty:
                yield "start, first", side, session(one, asked.device, installation, Path(empty), byte_code=warm)["first sample"]
            yield "pytest alone", side, session(one, asked.device, installation, warm, alone=True)["collected"]
            taken = session(one, asked.device, installation, warm)
            for stage in STAGES[:-1]:
                yield stage, side, taken[stage]
            yield "start, warm", side, taken["first sample"]
            yield "process", side, taken["whole"]
    for side, installation in sides.items():
        count = asked.small if installation is None else max(1, asked.small // BEFORE_SHARE)
        many = project(folder / f"many_{side}", MANY.format(count=count))
        yield "small", side, session(many, asked.device, installation, warm)["whole"] / count


def main() -> int:
    """Run, print and record."""
    assert __doc__
    parser = record_parser(__doc__)
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="another installation, made by pip install --target FOLDER")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"warm processes of each installation (default {REPEATS})")
    parser.add_argument("--small", type=int, default=SMALL, help=f"small tests in one session (default {SMALL})")
    asked = parser.parse_args()
    facts = chosen_device(parser, asked.device).facts
    record: dict[str, Any] = {
        "kind": "wall_time",
        "device": device_of(facts),
        "small": asked.small,
        "targets_s": TARGETS,
        "readings_s": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            for part, side, seconds in parts(asked, Path(folder)):
                record["readings_s"].setdefault(part, {}).setdefault(side, []).append(seconds)
                record["ended"] = utc_now()
                if asked.json:
                    write_record(asked.json, record)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
    print(table(record))
    return int(bool(missed(record)))


def table(record: dict[str, Any]) -> str:
    """The record as text: the median of each part and side in seconds."""
    lines = [head(record), ""]
    lines.append(f"{'seconds':<14}{'before':>10}{'after':>10}{'at most':>10}")
    for part, sides in record["readings_s"].items():
        figures = [statistics.median(sides[side]) if side in sides else None for side in ("before", "after")]
        figures.append(record["targets_s"].get(part))
        lines.append(f"{part:<14}" + "".join(f"{'-' if x is None else f'{x:.3f}':>10}" for x in figures))
    lines += ["", "small: each of " + str(record["small"]) + " tests, the process's start included"]
    return "\n".join(lines)


def missed(record: dict[str, Any]) -> list[str]:
    """Parts whose median is above the target."""
    readings = record["readings_s"]
    return [part for part, most in record["targets_s"].items() if statistics.median(readings[part]["after"]) > most]


if __name__ == "__main__":
    raise SystemExit(main())
