"""The extras install NVRTC and the CUDA runtime alone: nothing here needs CuPy's libraries for linear algebra, FFT and random numbers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.pathfinder")
pytestmark = pytest.mark.usefixtures("free_gpu")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import pathlib, sys, traceback
import pytest
from cuda import pathfinder

find = pathfinder.load_nvidia_dynamic_lib

def load(name):  # as where only the extras are installed
    # CuPy looks for cuTENSOR, which it can do without, and finding it would load cublasLt before it.
    if name in ("cublas", "cublasLt", "cufft", "curand", "cusolver", "cusparse", "cutensor", "nvJitLink"):
        with open("asked.txt", "a") as file:
            file.write(f"{name}\\n{''.join(traceback.format_stack(limit=6))}")
        raise pathfinder.DynamicLibNotFoundError(name)
    return find(name)

pathfinder.load_nvidia_dynamic_lib = load
code = pytest.main(sys.argv[1:])
pathlib.Path("maps.txt").write_text(pathlib.Path("/proc/self/maps").read_text())
sys.exit(code)
"""


def test_the_memory_suite_runs_without_the_libraries_that_the_extras_leave_out(
    tmp_path: Path,
) -> None:
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "--gpumem",
        "--gpumem-device",
        "cuda",
        "--gpumem-budget",
        "50 ms",
        "-q",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
    ]
    suite = [
        str(ROOT / "tests" / "memory" / f"test_{name}.py")
        for name in ("stream", "access_pattern", "managed", "l2_persistence")
    ]
    ran = subprocess.run([*command, *suite], cwd=tmp_path, capture_output=True, text=True)
    output = ran.stdout + ran.stderr
    assert ran.returncode in (0, 1), output  # with so short a budget a claim may fail
    asked = (tmp_path / "asked.txt").read_text() if (tmp_path / "asked.txt").exists() else ""
    assert "DynamicLibNotFoundError" not in output, output + asked
    loaded = set(re.findall(r"/lib([A-Za-z]+)\.so", (tmp_path / "maps.txt").read_text()))
    assert "nvrtc" in loaded
    assert not loaded & {
        "cublas",
        "cublasLt",
        "cufft",
        "curand",
        "cusolver",
        "cusparse",
        "nvJitLink",
    }, asked
