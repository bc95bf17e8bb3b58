"""Memory of cuMemCreate counts until its last handle and its last mapping are gone; a test that resets the device ends nothing but its
session's use of it. Runs sessions of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("free_gpu")
MIB = 2**20
TESTS = """
import pytest
from cuda.bindings import driver as d

MIB, KEPT = 2**20, []

def check(answer):
    assert int(answer[0]) == 0, answer
    return answer[1:]

def made(nbytes):
    prop = d.CUmemAllocationProp()
    prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    (handle,) = check(d.cuMemCreate(nbytes, prop, 0))
    return handle

@pytest.fixture(autouse=True)
def context():
    import cupy
    cupy.zeros(1)

def mapped(nbytes):
    handle = made(nbytes)
    (address,) = check(d.cuMemAddressReserve(nbytes, 0, 0, 0))
    check(d.cuMemMap(address, nbytes, 0, handle, 0))
    return address, handle

def test_returned():
    address, handle = mapped(64 * MIB)
    check(d.cuMemUnmap(address, 64 * MIB))
    check(d.cuMemRelease(handle))
    check(d.cuMemAddressFree(address, 64 * MIB))

def test_handle_kept():
    KEPT.append(made(32 * MIB))

def test_mapping_kept():
    address, handle = mapped(16 * MIB)
    check(d.cuMemRelease(handle))
    KEPT.append(address)
"""
RESET = """
def test_before(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("4 MiB"), device_buffer("4 MiB"))

def test_resets():
    from cuda.bindings import runtime
    assert int(runtime.cudaDeviceReset()[0]) == 0

def test_after(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("4 MiB"), device_buffer("4 MiB"))

def test_cpu(): pass
"""


def session(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(text)
    own = ("--gpumem", "--gpumem-device=cuda", "--gpumem-budget=100 ms", "-rA", "-p", "no:cacheprovider", "--rootdir=.")
    command = [sys.executable, "-m", "pytest", *own, *arguments, "--benchmark-json=out.json", "test_it.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_virtual_memory_counts_until_nothing_holds_it(tmp_path: Path) -> None:
    done = session(tmp_path, TESTS, "--gpumem-footprint=on", "--gpumem-max-kept=0 B")
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["gpumem"]["rows"]
    found = {
        row["nodeid"].partition("::")[2]: (row["footprint"]["peak"], row["footprint"]["kept"], row["verdict"]["outcome"]) for row in rows
    }
    assert done.returncode == 1, done.stdout
    assert found["test_returned"][1:] == (0, "PASS")
    assert found["test_returned"][0] >= 64 * MIB
    assert found["test_handle_kept"][1:] == (32 * MIB, "FAIL")
    assert found["test_mapping_kept"][1:] == (16 * MIB, "FAIL")


def test_a_reset_of_the_device_ends_no_process(tmp_path: Path) -> None:
    done = session(tmp_path, RESET)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PASSED test_it.py::test_before" in done.stdout
    assert "PASSED test_it.py::test_cpu" in done.stdout
    assert "ERROR test_it.py::test_after" in done.stdout
    assert "test_it.py::test_resets reset the device" in done.stdout
    assert "Fatal Python error" not in done.stderr
