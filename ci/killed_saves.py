"""Ends `pytest --gpumem --gpumem-save` at exact and at random moments, by SIGKILL and SIGINT, and looks at what is left.

    python ci/killed_saves.py [--seed N] [--cases N]

After each end the baseline must load, hold every run that was reported as stored, and hold no half file; reports must be whole, or those of
an earlier run; and now and then a run that nobody ends must be stored. Exact moments are those before each file is opened for writing,
renamed or removed; random ones are shortly after these, and by the clock. Needs no GPU. The last line says how many cases passed and
failed; the exit status is 1 if one failed.
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
from typing import Any

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
def test_write(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
"""
QUIET = (
    "-p",
    "no:cacheprovider",
    "-p",
    "no:randomly",
    "-p",
    "no:hypothesispytest",
    "-p",
    "no:codspeed",
)
RUN = (
    *(
        "-q",
        *QUIET,
        "--gpumem",
        "--gpumem-device=sim",
        "--gpumem-budget=5ms",
        "-o",
        "gpumem_placements=2",
    ),
    *("--gpumem-save", "--gpumem-processes=1", "--gpumem-report=out.html", "--benchmark-disable"),
)
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def run(
    folder: Path, number: int | None, moment: int | None, delay: float | None = None
) -> tuple[str, int]:
    """One run in a process of its own, which is ended by signal `number`.

    Args:
        folder: of the project.
        number: of the signal; None: none is sent.
        moment: number of the change to a file before which the process ends itself.
        delay: seconds after which it is ended from outside; with a `moment`, seconds from then on.

    Returns:
        What it printed, and how many changes to files it made or began.
    """
    log = folder / "log"
    reading, writing = os.pipe()
    # A fork, so that all is imported once.
    if (child := os.fork()) == 0:
        try:
            os.close(reading)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            _inside(folder, number, moment, delay, writing)
        finally:
            os._exit(99)
    os.close(writing)
    begun = time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        waited = time.monotonic() - begun
        if delay is not None and moment is None and number is not None and waited >= delay:
            os.kill(child, number)
            delay = None
        if waited > SECONDS:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"hangs for {SECONDS} s")
        time.sleep(0.002)
    with open(reading, "rb") as changes:
        return log.read_text(errors="replace"), len(changes.read())


def _inside(
    folder: Path, number: int | None, moment: int | None, delay: float | None, writing: int
) -> None:
    here, count = str(folder), 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        wanted = event in _CHANGES or (
            event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        )
        if (
            not wanted
            or not isinstance(arguments[0], (str, os.PathLike))
            or not os.path.abspath(arguments[0]).startswith(here)
        ):
            return
        count += 1
        os.write(writing, b".")
        if count == moment and number is not None:
            if delay is None:
                os.kill(os.getpid(), number)
            else:  # while the change is made: SIGALRM ends the process as SIGKILL does
                signal.setitimer(signal.ITIMER_REAL, delay)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.dont_write_bytecode = True
    os.chdir(folder)
    sys.addaudithook(hook)
    code = pytest.main(list(RUN))
    sys.stdout.flush()
    os._exit(int(code))


class Project:
    """A folder with tests, its baseline, and what was reported as stored in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = choose("sim").facts
        self.stored: set[Path] = set()  # files of the runs that were reported as stored
        self._before: set[Path] = set()
        (folder / "test_a.py").write_text(SUITE)
        (folder / "pytest.ini").write_text("[pytest]\n")

    def check(self, said: str) -> None:
        """Raises `AssertionError` where something is lost, or half there."""
        store = Store(self.folder / ".benchmarks", self.facts)
        baseline = store.load()  # raises where a file is half there
        there = set(store.folder.glob("*.json"))
        if "rows stored in" in said:
            assert there > self._before, "reported as stored, and not there"
            self.stored |= there - self._before
        self._before = there
        lost = self.stored - there
        assert not lost, f"reported as stored, and gone: {sorted(map(str, lost))}"
        assert baseline.processes == len(there), (
            f"{baseline.processes} processes in {len(there)} files"
        )
        report = self.folder / "out.html"
        if report.exists():
            assert report.read_text().rstrip().endswith("</html>"), "out.html is not whole"


def _import_all() -> None:
    """Import the modules of a run, so that forked processes need not."""
    here = os.getcwd()
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-killed-") as made,
        open(os.devnull, "w") as nothing,
        redirect_stdout(nothing),
    ):
        Path(made, "test_warm.py").write_text(SUITE)
        os.chdir(made)
        code = pytest.main(list(RUN))
        os.chdir(here)
    if code != 0:
        raise SystemExit(f"the first run ends with {code}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=20_241)
    parser.add_argument("--cases", type=int, default=70)
    asked = parser.parse_args()
    rng, begun, passed, failed, exact = random.Random(asked.seed), time.monotonic(), 0, 0, 0
    for name in [
        name
        for name in os.environ
        if name.startswith(("GPUMEM", "GITHUB_", "CI")) or name == "PYTEST_ADDOPTS"
    ]:
        del os.environ[name]
    _import_all()
    with tempfile.TemporaryDirectory(prefix="gpumem-killed-") as made:
        project = Project(Path(made).resolve())
        for _ in range(2):  # the second run finds all folders made
            before = time.monotonic()
            said, changes = run(project.folder, None, None)
            whole = time.monotonic() - before
            project.check(said)
        if len(project.stored) != 2 or changes == 0:
            raise SystemExit(f"nothing was stored: {said}")
        # Every moment by both signals, then moments by the clock.
        plan: list[tuple[int, int | None, float | None]] = [
            (number, moment, None)
            for moment in range(1, changes + 1)
            for number in (signal.SIGKILL, signal.SIGINT)
        ]
        exact = len(plan)
        while len(plan) < asked.cases:
            plan.append(
                (rng.choice((signal.SIGKILL, signal.SIGINT)), None, rng.uniform(0, 1.2 * whole))
            )
            plan.append((signal.SIGALRM, rng.randint(1, changes), rng.uniform(1e-6, 5e-4)))
        for case, (number, moment, delay) in enumerate(plan):
            try:
                said, _ = run(project.folder, number, moment, delay)
                project.check(said)
                if case % EVERY == EVERY - 1:
                    count = len(project.stored)
                    said, _ = run(project.folder, None, None)
                    project.check(said)
                    assert len(project.stored) == count + 1, (
                        f"a later run is not stored: {said[-500:]}"
                    )
                passed += 1
            except Exception as error:
                failed += 1
                when = " and ".join(
                    [
                        *([f"change {moment}"] if moment else []),
                        *([f"{delay:.6f} s"] if delay else []),
                    ]
                )
                print(
                    f"FAILED {signal.Signals(number).name} at {when}: {type(error).__name__}: {error}",
                    flush=True,
                )
    seconds = time.monotonic() - begun
    print(
        f"seed {asked.seed}, {exact} exact and {len(plan) - exact} random moments in {seconds:.0f} s: {passed} passed, {failed} failed"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
