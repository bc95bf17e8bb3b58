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
MAKING = """
import pytest
from cuda.bindings import driver as d

MIB, KEPT = 2**20, []
FILE = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

def check(answer):
    assert int(answer[0]) == 0, answer
    return answer[1:]

def made(nbytes):
    prop = d.CUmemAllocationProp()
    prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = 0
    prop.requestedHandleTypes = FILE
    (handle,) = check(d.cuMemCreate(nbytes, prop, 0))
    return handle

@pytest.fixture(autouse=True)
def context():
    import cupy
    cupy.zeros(1)

def mapped(nbytes, handle=None):
    handle = made(nbytes) if handle is None else handle
    (address,) = check(d.cuMemAddressReserve(nbytes, 0, 0, 0))
    check(d.cuMemMap(address, nbytes, 0, handle, 0))
    return address, handle
"""
TESTS = (
    MAKING
    + """
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
)
EXPORTS = """
import socket, sys
import cupy
cupy.zeros(1)
(descriptor,) = check(d.cuMemExportToShareableHandle(made(32 * MIB), FILE, 0))
with socket.socket(fileno=int(sys.argv[1])) as parent:
    socket.send_fds(parent, [b"."], [descriptor])
    parent.recv(1)
"""
IMPORTED = """
import socket, subprocess, sys

def test_imported():
    ours, theirs = socket.socketpair()
    child = subprocess.Popen([sys.executable, "exports.py", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    with ours:
        _, (descriptor,), *_ = socket.recv_fds(ours, 1, 1)
        (handle,) = check(d.cuMemImportFromShareableHandle(descriptor, FILE))
        KEPT.append(mapped(32 * MIB, handle))
    assert child.wait() == 0
"""
EARLIER = """
def test_creates():
    KEPT.append(made(32 * MIB))

@pytest.mark.gpumem(max_peak="64 MiB")
def test_maps():
    KEPT.append(mapped(32 * MIB, KEPT[0]))
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
    own = (
        "--gpumem",
        "--gpumem-device=cuda",
        "--gpumem-budget=100 ms",
        "-rA",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        *own,
        *arguments,
        "--benchmark-json=out.json",
        "test_it.py",
    ]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_virtual_memory_counts_until_nothing_holds_it(tmp_path: Path) -> None:
    done = session(tmp_path, TESTS, "--gpumem-footprint=on", "--gpumem-max-kept=0 B")
    rows: list[dict[str, Any]] = json.loads((tmp_path / "out.json").read_text())["gpumem"]["rows"]
    found = {
        row["nodeid"].partition("::")[2]: (
            row["footprint"]["peak"],
            row["footprint"]["kept"],
            row["verdict"]["outcome"],
        )
        for row in rows
    }
    assert done.returncode == 1, done.stdout
    assert found["test_returned"][1:] == (0, "PASS")
    assert found["test_returned"][0] >= 64 * MIB
    assert found["test_handle_kept"][1:] == (32 * MIB, "FAIL")
    assert found["test_mapping_kept"][1:] == (16 * MIB, "FAIL")


def test_virtual_memory_of_another_process_is_not_the_tests(tmp_path: Path) -> None:
    (tmp_path / "exports.py").write_text(MAKING + EXPORTS)
    done = session(tmp_path, MAKING + IMPORTED, "--gpumem-footprint=on", "--gpumem-max-kept=0 B")
    assert done.returncode == 0, done.stdout
    (row,) = json.loads((tmp_path / "out.json").read_text())["gpumem"]["rows"]
    assert (row["verdict"]["outcome"], row["footprint"]["kept"]) == ("PASS", 0)
    assert row["footprint"]["peak"] < MIB  # of CuPy, which makes the context


def test_virtual_memory_from_before_the_watch_leaves_a_limit_undecided(tmp_path: Path) -> None:
    done = session(tmp_path, MAKING + EARLIER)
    assert done.returncode == 0, done.stdout
    (row,) = json.loads((tmp_path / "out.json").read_text())["gpumem"]["rows"]
    assert (row["nodeid"].partition("::")[2], row["verdict"]["outcome"]) == (
        "test_maps",
        "UNDECIDED",
    )
    assert "created before the watch" in row["verdict"]["reason"]


def test_a_reset_of_the_device_ends_no_process(tmp_path: Path) -> None:
    done = session(tmp_path, RESET)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    assert "Fatal Python error" not in done.stderr
