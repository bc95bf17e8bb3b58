"""Host memory as NumPy sees it, what the host can give, and errors in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cases import naming

pytest.importorskip("cuda.bindings.runtime")

from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Allocation,
    ContextLost,
    DeviceError,
    OutOfMemory,
    Unsupported,
)


def test_numpy_sees_and_writes_the_memory_itself() -> None:
    owner = np.arange(64, dtype="f4")
    there = Allocation(
        MemoryKind.PAGEABLE, owner.nbytes, 0, owner.__array_interface__["data"][0], backing=owner
    )
    seen = places.array(there, "f4", 10)
    seen[3] = -1
    assert owner[3] == -1
    assert seen.size == 10
    with pytest.raises(Unsupported, match="NumPy cannot see device memory"):
        places.array(Allocation(MemoryKind.DEVICE, 64, 256, 0), "f4", 1)


GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """/proc and a control group: 100 GiB available, no limit."""
    proc, group = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    group.mkdir()
    (proc / "meminfo").write_text(
        f"MemTotal: {200 * GIB >> 10} kB\nMemAvailable: {100 * GIB >> 10} kB\nHugePages_Total: 0\n"
    )
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text(f"{30 * GIB}\n")
    (group / "memory.stat").write_text(f"anon {10 * GIB}\ninactive_file {20 * GIB}\n")
    return proc, group


def test_without_a_limit_the_machine_decides(machine: tuple[Path, Path], tmp_path: Path) -> None:
    assert places.host_bytes(*machine)[1] == 100 * GIB
    assert places.host_bytes(machine[0], tmp_path / "none")[1] == 100 * GIB


def test_a_tighter_control_group_decides_and_its_idle_file_pages_count_as_free(
    machine: tuple[Path, Path],
) -> None:
    (machine[1] / "memory.max").write_text(f"{64 * GIB}\n")
    assert places.host_bytes(*machine)[1] == 54 * GIB
    (machine[1] / "memory.max").write_text(f"{1 * GIB}\n")
    assert places.host_bytes(*machine)[1] == 0


def test_the_group_of_a_job_decides_and_those_around_it(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/slurm/job_7/step_0\n")
    job = root / "slurm" / "job_7"
    (job / "step_0").mkdir(parents=True)
    for group, limit in ((job, 40 * GIB), (job / "step_0", "max")):
        for file, content in (
            ("memory.max", limit),
            ("memory.current", 10 * GIB),
            ("memory.stat", f"inactive_file {1 * GIB}"),
        ):
            (group / file).write_text(f"{content}\n")
    assert places.host_bytes(*machine) == (40 * GIB, 31 * GIB)
    (root / "memory.max").write_text(f"{35 * GIB}\n")
    assert places.host_bytes(*machine) == (35 * GIB, 25 * GIB)


def test_a_cuda_bindings_error_is_one_line() -> None:
    assert check((R.cudaError_t.cudaSuccess,), "x") is None
    assert check((R.cudaError_t.cudaSuccess, 3), "x") == 3
    assert check((R.cudaError_t.cudaSuccess, 3, 4), "x") == (3, 4)
    with pytest.raises(
        DeviceError, match=r"^setting a limit: cudaErrorInvalidValue: invalid argument\.$"
    ):
        check((R.cudaError_t.cudaErrorInvalidValue, None), "setting a limit")


def test_a_lost_context_is_said() -> None:
    for name, lost in [
        ("cudaErrorIllegalAddress", True),
        ("cudaErrorMpsClientTerminated", True),
        ("cudaErrorNotReady", False),
    ]:
        with naming(name):
            with pytest.raises(DeviceError, match=f"^waiting: {name}: ") as raised:
                check((getattr(R.cudaError_t, name), None), "waiting")
            assert ("context is lost" in str(raised.value)) == lost
            assert isinstance(raised.value, ContextLost) == lost


def test_a_lack_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(OutOfMemory, match=r"^allocating 64 bytes: .*out of memory"):
        check((R.cudaError_t.cudaErrorMemoryAllocation, None), "allocating 64 bytes")
