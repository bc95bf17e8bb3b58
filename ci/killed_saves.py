"""End `pytest --gpumem --gpumem-save` at chosen moments, by SIGKILL and SIGINT, and look at what is left.

    python ci/killed_saves.py [--cases N]

After each end the baseline loads, holds every run that was reported as stored, and holds no half
file; the report is whole or that of an earlier run. Now and then a run that nobody ends is stored.
A moment is the one before a file is opened for writing, renamed or removed, or one by the clock.
Needs no GPU. The last line says how many cases
passed and failed; the exit status is 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_gpumem.baselines.store import Store
from pytest_gpumem.devices.opening import choose

SECONDS = 60
"""After which a run that was not ended hangs."""
EVERY = 10
"""Cases after which a run is left to its end."""
SUITE = """
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(1 << 20), device_buffer(1 << 20))
"""
RUN = (
    "-q -p no:cacheprovider -p no:randomly -p no:hypothesispytest -p no:codspeed"
    " --gpumem --gpumem-device=sim --gpumem-budget=5ms -o gpumem_placements=2"
    " --gpumem-save --gpumem-processes=1 --gpumem-report=out.html --benchmark-disable"
)
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


class End(NamedTuple):
    """How a run ends; without a signal by itself."""

    number: int | None = None  # of the signal
    change: int | None = None  # number of the change to a file before which it comes
    delay: float | None = None  # seconds after the start

    def __str__(self) -> str:
        name = signal.Signals(self.number).name if self.number else "no signal"
        return f"{name} at change {self.change}, {self.delay} s"


def run(folder: Path, end: End) -> tuple[str, int]:
    """What a run in a process of its own prints, and how many changes to files it begins."""
    log = folder / "log"
    reading, writing = os.pipe()
    # A fork, so that all is imported once.
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            run_here(folder, end, writing)
        finally:
            os._exit(99)
    os.close(writing)
    begun = time.monotonic()
    by_clock = end.number is not None and end.change is None
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        waited = time.monotonic() - begun
        if by_clock and waited >= (end.delay or 0.0):
            os.kill(child, end.number or 0)
            by_clock = False
        if waited > SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"hangs for {SECONDS} s")
        time.sleep(0.002)
    with open(reading, "rb") as changes:
        return log.read_text(errors="replace"), len(changes.read())


def run_here(folder: Path, end: End, writing: int) -> None:
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        opens = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if not (opens or event in CHANGES) or not isinstance(arguments[0], (str, os.PathLike)):
            return
        if not os.path.abspath(arguments[0]).startswith(str(folder)):
            return
        count += 1
        os.write(writing, b".")
        if count != end.change or end.number is None:
            return
        os.kill(os.getpid(), end.number)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = True
    os.chdir(folder)
    sys.addaudithook(hook)
    code = pytest.main(RUN.split())
    sys.stdout.flush()
    os._exit(int(code))


class Project:
    """A folder with tests, its baseline, and what was reported as stored in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store(folder / ".benchmarks", choose("sim").facts)
        self.stored: set[Path] = set()  # files of the runs that were reported as stored
        self.before: set[Path] = set()
        (folder / "test_a.py").write_text(SUITE)
        (folder / "pytest.ini").write_text("[pytest]\n")

    def run(self, end: End) -> int:
        """Run to this end and check what is left; give the number of changes.

        Raises:
            AssertionError: something is lost, or half there.
        """
        printed, changes = run(self.folder, end)
        baseline = self.store.load()  # raises where a file is half there
        files = set(self.store.folder.glob("*.json"))
        if "rows stored in" in printed or "row stored in" in printed:
            assert files > self.before, "reported as stored, and not there"
            self.stored |= files - self.before
        elif end.number is None:
            raise AssertionError(f"nothing is stored: {printed[-500:]}")
        self.before = files
        lost = self.stored - files
        assert not lost, f"reported as stored, and gone: {sorted(map(str, lost))}"
        assert baseline.processes == len(files), f"{baseline.processes} of {len(files)} files"
        report = self.folder / "out.html"
        if report.exists():
            assert report.read_text().rstrip().endswith("</html>"), "out.html is not whole"
        return changes


def import_all() -> None:
    """Import the modules of a run, so that forked processes need not."""
    before = os.getcwd()
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-killed-") as folder,
        open(os.devnull, "w") as nothing,
        redirect_stdout(nothing),
    ):
        Path(folder, "test_warm.py").write_text(SUITE)
        os.chdir(folder)
        code = pytest.main(RUN.split())
        os.chdir(before)
    if code != 0:
        raise SystemExit(f"the first run ends with {code}")


def planned(cases: int, changes: int, seconds: float) -> list[End]:
    """Exact moments by both signals in a random order, then moments by the clock."""
    rng, numbers = random.Random(20_241), (signal.SIGKILL, signal.SIGINT)
    ends = [End(number, change) for number in numbers for change in range(1, changes + 1)]
    rng.shuffle(ends)
    while len(ends) < cases:
        ends.append(End(rng.choice(numbers), None, rng.uniform(0, 1.2 * seconds)))
    return ends[:cases]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=70)
    given = parser.parse_args()
    for name in list(os.environ):
        if name.startswith(("GPUMEM", "GITHUB_", "CI")) or name == "PYTEST_ADDOPTS":
            del os.environ[name]
    begun = time.monotonic()
    failed = 0
    import_all()
    with tempfile.TemporaryDirectory(prefix="gpumem-killed-") as folder:
        project = Project(Path(folder).resolve())
        project.run(End())
        before = time.monotonic()
        changes = project.run(End())  # it finds all folders made
        ends = planned(given.cases, changes, time.monotonic() - before)
        for number, end in enumerate(ends, 1):
            try:
                project.run(end)
                if number % EVERY == 0:
                    project.run(End())
            except Exception as error:
                failed += 1
                print(f"FAILED {end}: {type(error).__name__}: {error}", flush=True)
    print(
        f"{changes} changes in a run, {time.monotonic() - begun:.0f} s:"
        f" {len(ends) - failed} passed, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
