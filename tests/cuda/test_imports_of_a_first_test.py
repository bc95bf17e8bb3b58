"""The start of a session on a GPU: what its first test imports, and that a child by fork can use CUDA until then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("free_gpu")
CONFTEST = """
import os, sys, traceback

class Asked:
    def find_spec(self, name, path=None, target=None):
        stack = traceback.format_stack()
        lazily = any("in lazy_import" in frame for frame in stack)  # CuPy asks where it is, and imports it when it is used
        if name in ("scipy", "cupyx", "cupyx.linalg") and not lazily:
            print("ASKED", name, *stack, sep="\\n")

sys.meta_path.insert(0, Asked())

def pytest_collection_finish():
    print("WITH_CUPY", "cupy" in sys.modules)
"""
TESTS = """
import os, sys

def test_a_child_can_use_cuda_before_any_test_needs_the_gpu():
    from cuda.bindings import driver
    child = os.fork()
    if child == 0:
        os._exit(int(driver.cuInit(0)[0]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

def test_triad(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer("4 MiB") for _ in range(3)), 3.0)

def test_dot(gpu_benchmark, gpu_kernels, device_buffer):
    from pytest_gpumem.kernels.stream import tile_bytes
    sums = device_buffer((2**22 // tile_bytes("dot"),))
    gpu_benchmark(gpu_kernels.dot, device_buffer("4 MiB"), device_buffer("4 MiB"), sums)
"""


def test_a_check_imports_no_further_library(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--gpumem",
        "--gpumem-device",
        "cuda",
        "-s",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
    ]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "WITH_CUPY False" in ran.stdout
    assert "ASKED" not in ran.stdout, ran.stdout
