"""`gpumem profile` from end to end, with a stand-in for the tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from forked import COMMAND
from nvtx_injection import Trace

TESTS = Path(__file__).parents[1]

SUITE = """
import pytest

@pytest.mark.parametrize("mib", [1, 2])
def test_copy(gpu_benchmark, device_buffer, gpu_kernels, mib):
    gpu_benchmark(gpu_kernels.copy, device_buffer(mib << 20), device_buffer(mib << 20))

def test_other(gpu_benchmark, managed_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, managed_buffer(1 << 20), managed_buffer(1 << 20))
    assert False, "times under a profiler are no times"
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def gpumem_command(
    pytester: pytest.Pytester, nvtx_trace: Trace, tmp_path: Path, programs: Path
) -> Run:
    """Runs `gpumem` on the suite with the stand-in as both tools."""
    pytester.makepyfile(test_suite=SUITE)
    tool = tmp_path / "bin" / "tool"
    tool.parent.mkdir()
    tool.write_text(
        f'#!/bin/sh\nPYTHONPATH={TESTS}:$PYTHONPATH exec {programs / "python"} {TESTS / "fake_profiler.py"} "$@"\n'
    )
    tool.chmod(0o755)
    nvtx = nvtx_trace.environment
    told = {"nvtx_library": nvtx["NVTX_INJECTION64_PATH"], "nvtx_log": nvtx["NVTX_LOG"]}
    environment = {
        **os.environ,
        "GPUMEM_NSYS": str(tool),
        "GPUMEM_NCU": str(tool),
        "FAKE_PROFILER": json.dumps(told),
    }

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", COMMAND, *arguments]
        return subprocess.run(
            command,
            cwd=pytester.path,
            env={**environment, **variables},
            capture_output=True,
            text=True,
        )

    return run


def test_one_test_is_recorded_by_its_range_and_no_other_runs(
    gpumem_command: Run, pytester: pytest.Pytester
) -> None:
    # A strict project with a limit, whose tests run in three processes: none of that hinders.
    words = "profile nsys --test test_suite.py::test_copy[2] -- test_suite.py --gpumem-max-kept=0B"
    done = gpumem_command(*words.split(), GPUMEM_STRICT="1", GPUMEM_PROCESSES="3")
    assert done.returncode == 0, done.stderr
    file = pytester.path / "test_copy_2.nsys-rep"
    report: dict[str, Any] = json.loads(file.read_text())
    options = report["options"]
    assert options[0] == "profile"
    assert {
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
    } < set(options)
    assert {"--capture-range=nvtx", "--capture-range-end=stop"} < set(options)
    (captured,) = (
        option.partition("=")[2] for option in options if option.startswith("--nvtx-capture=")
    )
    name, _, domain = captured.partition("@")
    assert domain == "gpumem"
    # The range that is to be recorded is there, once, and holds everything that ran.
    assert report["ranges"].count(name) == 1
    assert {path.split("/")[0] for path in report["ranges"]} == {name}
    assert report["ranges"].count(f"{name}/{name}.measure/{name}.launch") == 5
    assert not any("um" in option for option in options if option.startswith("--cuda-um"))
    assert f"wrote {file}: test_suite.py::test_copy[2], by " in done.stdout
    assert f"nsys-ui {file}" in done.stdout
    # The command is said before it runs, and pytest's words go to standard error.
    assert "--nvtx-capture=test_copy_2@gpumem" in done.stderr.splitlines()[0]
    assert "1 passed, 2 deselected" in done.stderr


def test_ncu_is_shown_what_benchmark_times(gpumem_command: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_stock="def test_stock(benchmark): assert benchmark(sum, [1, 2]) == 3")
    done = gpumem_command("profile", "ncu", "--test", "test_stock.py::test_stock", "-o", "stock")
    report = json.loads((pytester.path / "stock.ncu-rep").read_text())
    assert report["ranges"].count("test_stock/test_stock.measure") == 1, done.stderr


def test_ncu_is_shown_the_measured_launches_of_the_chosen_tests(
    gpumem_command: Run, pytester: pytest.Pytester
) -> None:
    tests = "--test test_suite.py::test_copy --test ./test_suite.py::test_other"
    done = gpumem_command(
        "profile", "ncu", *tests.split(), "-o", "some", "--tool-options", "--set full"
    )
    assert done.returncode == 1, done.stderr  # test_other fails
    report = json.loads((pytester.path / "some.ncu-rep").read_text())
    options = report["options"]
    assert options[options.index("--clock-control") + 1] == "none"
    assert options[options.index("--set") + 1] == "full"
    included = [value for option, value in pairwise(options) if option == "--nvtx-include"]
    assert included == ["regex:gpumem@.+.measure/"]
    measured = [path.split("/")[-1] for path in report["ranges"] if re.search(r".+.measure$", path)]
    assert sorted(set(measured)) == [
        "test_copy_1.measure",
        "test_copy_2.measure",
        "test_other.measure",
    ]
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    # Each measurement is five launches, of which the stand-in counts the phase and the launch in it.
    assert [lines[number] for number in (1, 2, 4, 7)] == [
        "test_copy_1",
        "10 × copy",
        "test_copy_2",
        "test_other",
    ]
    assert "some.ncu-rep: 3 tests" in done.stdout
    assert "pytest ended with exit code 1: tests failed" in done.stderr


def test_a_selection_of_nothing_is_one_line(gpumem_command: Run) -> None:
    none = gpumem_command("profile", "nsys", "--", "-k", "nothing", CUDA_VISIBLE_DEVICES="")
    assert none.returncode == 4
    assert none.stderr.startswith("gpumem: no test is selected by '-k nothing'")
