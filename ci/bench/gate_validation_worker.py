"""One process of the gate's validation: a session of pytest with the shipped plugin, which waits until it may use the GPU.

`python gate_validation_worker.py JSON`: number, device, rows, slow, slopes, results. The process runs pytest on this
file: one test for each row, in an order drawn for the process. It collects them, imports its libraries, reports that it is ready, and waits
(`fresh_processes`).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import pytest

from pytest_gpumem import GpuBenchmark
from pytest_gpumem.measuring.bound import Kernels

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import GO, READY
from gate_validation_rows import ARRAYS, BY_NAME, CHASE_NODES, work_of

JOB: dict[str, Any] = json.loads(sys.argv[1])
TAKEN_AWAY = ("PYTEST_ADDOPTS", "PYTEST_XDIST_", "GPUMEM_")
"""Variables that would change what is measured begin so."""


# The tests

Launch = Callable[[str, int], None]


@pytest.fixture
def launch(gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any) -> Launch:
    """Measure a kernel on arrays of a size, or a chase of so many steps."""

    def measure(kernel: str, work: int) -> None:
        if kernel == "chase":
            gpu_benchmark(
                gpu_kernels.chase, device_buffer(CHASE_NODES, "i4"), device_buffer((1,), "i4"), work
            )
            return
        kernel, _, dtype = kernel.partition(":")
        arrays = [device_buffer(work, dtype or "f4") for _ in range(ARRAYS.get(kernel, 2))]
        if kernel == "dot":
            arrays.append(device_buffer(max(work // (32 * 1024) * 4, 4096), "f4"))
        offset = (1,) if kernel == "offset_copy" else ()
        gpu_benchmark(getattr(gpu_kernels, kernel), *arrays, *offset)

    return measure


@pytest.mark.parametrize("name", JOB["rows"])
def test_row(launch: Launch, device_buffer: Any, name: str) -> None:
    row = BY_NAME[name]
    unrelated = device_buffer(row.unrelated, "u1") if row.unrelated else None
    launch(row.kernel, work_of(row, JOB["slopes"], slow=name in JOB["slow"]))
    del unrelated


# The process


class Hold:
    """A pytest plugin that waits before the first test, and ends the process once the results are written."""

    def __init__(self, told: IO[str], answers: IO[str]) -> None:
        self._told = told
        self._answers = answers
        self.begun: str | None = None
        """When it got the GPU, ISO 8601."""

    def leave(self, code: int) -> None:
        """Answer and end the process, not through the libraries' own clean-up, which costs GPU time: the driver frees what it held."""
        self._answers.write(
            json.dumps({"pid": os.getpid(), "utc": self.begun, "exit": code}) + "\n"
        )
        self._answers.flush()
        sys.stderr.flush()
        os._exit(0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        session.config.pluginmanager.register(
            _Leaving(self)
        )  # as late as can be: its hook is to be the last of those that come last

    @pytest.hookimpl(tryfirst=True)
    def pytest_benchmark_generate_machine_info(self) -> dict[str, Any]:
        return {}  # nobody reads it, and py-cpuinfo starts a process for it, which takes a second

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        session.config.stash[
            importlib.import_module("pytest_gpumem.plugin.state").SESSION
        ].chosen.prepare()
        self._answers.write(READY + "\n")
        self._answers.flush()
        if self._told.readline().strip() != GO:
            os._exit(0)
        self.begun = datetime.now(timezone.utc).isoformat(timespec="milliseconds")


class _Leaving:
    """The summary is for nobody, and the next process waits meanwhile."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._hold.begun is not None:
            self._hold.leave(int(session.exitstatus))


def arguments() -> list[str]:
    """Those of pytest. `--gpumem-save` has the plugin read its controls, into a baseline that nobody looks at."""
    results, folder = Path(JOB["results"]), Path(__file__).resolve().parent
    return [
        *("-q", "-c", str(results.parent / "pytest.ini"), f"--rootdir={folder}"),
        *("-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"),
        *(
            "--gpumem",
            f"--gpumem-device={JOB['device']}",
            "--gpumem-save",
            f"--gpumem-baseline={results.with_suffix('')}",
        ),
        f"--benchmark-json={results}",
        __file__,
    ]


def main() -> None:
    """Measure once; ends the process."""
    # pytest takes standard input and output for itself.
    told, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in [name for name in os.environ if name.startswith(TAKEN_AWAY)]:
        del os.environ[name]
    hold = Hold(told, answers)
    code = pytest.main(arguments(), plugins=[hold])
    if hold.begun is None:  # arguments or a device that cannot be used
        sys.exit(int(code) or 1)
    hold.leave(int(code))


if __name__ == "__main__":
    main()
