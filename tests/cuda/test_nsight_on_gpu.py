"""`gpumem profile` and `gpumem explain` with NVIDIA's tools."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from committing import commit

from pytest_gpumem.nsight.tools import NCU, NSYS, find
from pytest_gpumem.outcomes import NoAnswer

pytestmark = pytest.mark.usefixtures("free_gpu", "tools")

SUITE = """
import pytest

@pytest.mark.parametrize("words", [1, 4])
def test_copy(gpu_benchmark, device_buffer, gpu_kernels, words):
    a, b = device_buffer(words << 24), device_buffer(words << 24)
    gpu_benchmark(gpu_kernels.stride_copy, b, a, STRIDE)
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def tools() -> None:
    for tool in (NCU, NSYS):
        try:
            find(tool, os.environ)
        except NoAnswer as missing:
            pytest.skip(str(missing))


@pytest.fixture
def gpumem(tmp_path: Path) -> Run:
    """Runs a command of `gpumem` in a repository, whose test the working tree changes; returns its lines with single spaces."""
    test = tmp_path / "test_a.py"
    test.write_text(SUITE.replace("STRIDE", "1"))
    commit(tmp_path)
    test.write_text(SUITE.replace("STRIDE", "8"))

    def run(*arguments: str) -> str:
        command = [sys.executable, "-c", "from pytest_gpumem.cli import main; main()", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        if "ERR_NVGPUCTRPERM" in done.stderr:
            pytest.skip("this user may not read the GPU's counters")
        assert done.returncode == 0, done.stdout + done.stderr
        return re.sub(" +", " ", done.stdout)

    return run


def test_ncu_counts_the_measured_launches(gpumem: Run) -> None:
    lines = gpumem("profile", "ncu").splitlines()
    assert lines[1] == "test_copy_1"
    assert re.fullmatch(r" 5 × .*stride_copy.*", lines[2])
    # Eight elements of four bytes apart, each of the 32 threads of a warp loads another sector.
    assert re.fullmatch(r" \d\S+ us \d\S+ MiB \d+ % 32 \d\S* \d+ 0 B \d+ %", lines[3])
    assert lines[4] == "test_copy_4"


def test_nsys_has_the_kernels_of_each_range(gpumem: Run) -> None:
    printed = gpumem("profile", "nsys", "--test", "test_a.py::test_copy[1]")
    assert re.search(r"gpumem:test_copy_1\.measure .* 5 .*stride_copy", printed)
    assert "test_copy_4" not in printed


def test_explain_has_both_values_of_what_differs(gpumem: Run) -> None:
    lines = gpumem("explain", "--base", "HEAD", "test_a.py::test_copy[4]").splitlines()
    assert lines[:2] == ["differ by more than 5 % by Nsight Compute:", " test_copy_4"]
    assert any(line.endswith("sectors/load 4 → 32") for line in lines)
    assert any("argument" in line for line in lines[lines.index("ran differently:") :])
