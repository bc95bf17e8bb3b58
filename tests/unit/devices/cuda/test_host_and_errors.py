"""Host memory as NumPy sees it, what the host can give, errors in one line, and guests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

import cupy
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda import allocations, allocators, host
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.errors import check, translated
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Allocation,
    ContextLost,
    DeviceError,
    OutOfMemory,
    Unsupported,
)
from pytest_gpumem.records.device import DeviceFacts


def test_numpy_sees_and_writes_the_memory_itself() -> None:
    owner = np.arange(64, dtype="f4")
    there = Allocation(
        MemoryKind.PAGEABLE, owner.nbytes, 0, owner.__array_interface__["data"][0], backing=owner
    )
    seen = host.array(there, "f4", 10)
    seen[3] = -1
    assert owner[3] == -1
    assert seen.size == 10
    with pytest.raises(Unsupported, match="NumPy cannot see device memory"):
        host.array(Allocation(MemoryKind.DEVICE, 64, 256, 0), "f4", 1)


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
    assert host.available_bytes(*machine) == 100 * GIB
    assert host.available_bytes(machine[0], tmp_path / "none") == 100 * GIB


def test_a_tighter_control_group_decides_and_its_idle_file_pages_count_as_free(
    machine: tuple[Path, Path],
) -> None:
    (machine[1] / "memory.max").write_text(f"{64 * GIB}\n")
    assert host.available_bytes(*machine) == 54 * GIB
    (machine[1] / "memory.max").write_text(f"{1 * GIB}\n")
    assert host.available_bytes(*machine) == 0


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
    assert (host.total_bytes(*machine), host.available_bytes(*machine)) == (40 * GIB, 31 * GIB)
    (root / "memory.max").write_text(f"{35 * GIB}\n")
    assert (host.total_bytes(*machine), host.available_bytes(*machine)) == (35 * GIB, 25 * GIB)


def test_the_total_is_the_machines_or_the_control_groups(machine: tuple[Path, Path]) -> None:
    assert host.total_bytes(*machine) == 200 * GIB
    (machine[1] / "memory.max").write_text(f"{64 * GIB}\n")
    assert host.total_bytes(*machine) == 64 * GIB


@pytest.fixture
def memory(h100: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> CudaMemory:
    monkeypatch.setattr(allocations.host, "available_bytes", lambda: 10 * GIB)
    monkeypatch.setattr(allocations.runtime, "memGetInfo", lambda: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(
        allocations.cupy,
        "get_default_memory_pool",
        lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )
    return CudaMemory(0, h100)


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        (MemoryKind.DEVICE, 2 * GIB - allocations.RESERVE),
        (MemoryKind.MANAGED, 2 * GIB - allocations.RESERVE),
        (MemoryKind.PINNED, 10 * GIB),
        (MemoryKind.REGISTERED, 10 * GIB),
        (MemoryKind.PAGEABLE, 10 * GIB),
    ],
)
def test_more_than_is_free_is_refused_without_asking_the_driver(
    memory: CudaMemory, kind: MemoryKind, free: int
) -> None:
    assert memory.free_bytes(kind) == free
    with pytest.raises(
        OutOfMemory, match=rf"GiB of {kind.value} memory asked for, \S+ GiB are free"
    ):
        memory.allocate(free + 1, kind, mapped=True, write_combined=False)


def test_what_cupys_pool_keeps_for_nobody_counts_as_free(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [GIB]
    monkeypatch.setattr(allocations.runtime, "memGetInfo", lambda: (free[0], 80 * GIB))
    monkeypatch.setattr(allocations.runtime, "malloc", lambda nbytes: 4096)
    pool = SimpleNamespace(free_all_blocks=lambda: free.__setitem__(0, 4 * GIB))
    monkeypatch.setattr(allocations.cupy, "get_default_memory_pool", lambda: pool)
    assert (
        memory.allocate(2 * GIB, MemoryKind.DEVICE, mapped=True, write_combined=False).address
        == 4096
    )


def test_memory_that_is_not_aligned_is_given_back(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(allocations.runtime, "malloc", lambda nbytes: 4096 + 128)
    monkeypatch.setattr(allocations.runtime, "free", freed.append)
    with pytest.raises(DeviceError, match="not aligned to 256 bytes"):
        memory.allocate(64, MemoryKind.DEVICE, mapped=True, write_combined=False)
    assert freed == [4096 + 128]


def test_pageable_memory_is_aligned_and_freed_once(memory: CudaMemory) -> None:
    made = memory.allocate(10_000, MemoryKind.PAGEABLE, mapped=True, write_combined=False)
    assert (made.address, made.host_address % 4096, made.nbytes) == (0, 0, 10_000)
    view = memory.view(made, "f4", 2500)
    view[:] = 1
    memory.free(made)
    memory.free(made)
    assert made.freed
    with pytest.raises(DeviceError, match="is freed"):
        memory.view(made, "f4", 1)


def test_a_view_beyond_the_end_is_refused(memory: CudaMemory) -> None:
    made = memory.allocate(100, MemoryKind.PAGEABLE, mapped=True, write_combined=False)
    with pytest.raises(DeviceError, match="26 elements of f4 do not fit in 100 bytes"):
        memory.view(made, "f4", 26)


def test_what_is_freed_with_its_context_is_let_go(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(code: int) -> Any:
        def free(address: int) -> None:
            raise cupy.cuda.runtime.CUDARuntimeError(code)

        return free

    monkeypatch.setattr(
        allocations.runtime, "free", refuse(int(R.cudaError_t.cudaErrorIllegalAddress))
    )
    memory.free(Allocation(MemoryKind.DEVICE, 64, 256, 0))
    monkeypatch.setattr(
        allocations.runtime, "free", refuse(int(R.cudaError_t.cudaErrorInvalidValue))
    )
    with pytest.raises(DeviceError, match="freeing device memory: cudaErrorInvalidValue"):
        memory.free(Allocation(MemoryKind.DEVICE, 64, 256, 0))


@pytest.mark.parametrize(
    "array", [np.zeros((4, 4))[:, 1], np.zeros(0), [1, 2], np.broadcast_to(np.zeros(1), (4,))]
)
def test_only_whole_writable_arrays_are_adopted(memory: CudaMemory, array: Any) -> None:
    with pytest.raises(DeviceError, match="writable, C-contiguous"):
        memory.adopt(array, register=False)


def test_an_adopted_array_keeps_its_memory(memory: CudaMemory) -> None:
    array = np.arange(10, dtype="i4")
    adopted = memory.adopt(array, register=False)
    assert adopted.kind is MemoryKind.PAGEABLE
    memory.view(adopted, "i4", 10)[:] = 7
    assert (array == 7).all()


def test_a_cuda_bindings_error_is_one_line() -> None:
    assert check((R.cudaError_t.cudaSuccess,), "x") is None
    assert check((R.cudaError_t.cudaSuccess, 3), "x") == 3
    assert check((R.cudaError_t.cudaSuccess, 3, 4), "x") == (3, 4)
    with pytest.raises(
        DeviceError, match=r"^setting a limit: cudaErrorInvalidValue: invalid argument\.$"
    ):
        check((R.cudaError_t.cudaErrorInvalidValue, None), "setting a limit")


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("cudaErrorIllegalAddress", True),
        ("cudaErrorMpsClientTerminated", True),
        ("cudaErrorNotReady", False),
    ],
)
def test_a_lost_context_is_said(name: str, lost: bool) -> None:
    with pytest.raises(DeviceError, match=f"^waiting: {name}: ") as raised, translated("waiting"):
        raise cupy.cuda.runtime.CUDARuntimeError(int(getattr(R.cudaError_t, name)))
    assert ("context is lost" in str(raised.value)) == lost
    assert isinstance(raised.value, ContextLost) == lost


def _of_the_driver() -> None:
    raise cupy.cuda.runtime.CUDARuntimeError(int(R.cudaError_t.cudaErrorMemoryAllocation))


def _of_cupys_pool() -> None:
    raise cupy.cuda.memory.OutOfMemoryError(64, 0)


def _of_the_bindings() -> None:
    check((R.cudaError_t.cudaErrorMemoryAllocation, None), "allocating 64 bytes")


@pytest.mark.parametrize("fails", [_of_the_driver, _of_cupys_pool, _of_the_bindings])
def test_a_lack_of_memory_is_told_from_other_errors(fails: Callable[[], None]) -> None:
    with (
        pytest.raises(OutOfMemory, match=r"^allocating 64 bytes: .*[Oo]ut of memory"),
        translated("allocating 64 bytes"),
    ):
        fails()


def test_memory_of_a_pool_needs_a_device_that_has_pools(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda kind: 2**30)
    monkeypatch.setattr(
        allocators.R,
        "cudaDeviceGetAttribute",
        lambda attribute, index: (R.cudaError_t.cudaSuccess, 0),
    )
    with pytest.raises(Unsupported, match="no stream-ordered memory pools"):
        memory.allocate(64, MemoryKind.POOLED)


def test_a_stranger_is_no_guest(memory: CudaMemory) -> None:
    made = memory.allocate(100, MemoryKind.PAGEABLE, mapped=True, write_combined=False)
    with pytest.raises(
        Unsupported,
        match=r"^no bridge to json: like= takes .* cupy, torch, numba\.cuda, jax, warp, cudf or numpy$",
    ):
        memory.guest(made, "f4", (5, 5), json)
    with pytest.raises(Unsupported, match="no bridge to 3"):
        memory.guest(made, "f4", (5, 5), 3)
    with pytest.raises(Unsupported, match="CuPy cannot see pageable memory"):
        memory.guest(made, "f4", (5, 5), cupy)
    assert memory.guest(made, "f4", (5, 5), np).shape == (5, 5)


def test_the_stream_is_current_for_cupy_and_for_a_torch_that_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered: list[Any] = []

    @contextmanager
    def booked(what: Any) -> Any:
        entered.append(what)
        yield
        entered.append(f"end of {what}")

    monkeypatch.setattr(arrays.cupy.cuda, "Device", lambda index: booked(f"device {index}"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def stream(handle: int) -> Any:
        made = CudaStream(SimpleNamespace(ptr=handle))
        made.cupy = booked("cupy")
        return made

    with arrays.current(1, stream(5)):
        assert entered == ["device 1", "cupy"]
    assert "torch" not in sys.modules

    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        ExternalStream=lambda handle, device: f"{handle} on {device}",
        default_stream=lambda index: f"default of {index}",
        stream=lambda external: booked(f"torch {external}"),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    # PyTorch's own default stream has another handle than the legacy default stream's, and cannot be made from one.
    for handle, name in (
        (5, "5 on cuda:1"),
        (0, "default of 1"),
        (1, "default of 1"),
        (2, "2 on cuda:1"),
    ):
        entered.clear()
        with arrays.current(1, stream(handle)):
            pass
        assert entered == [
            "device 1",
            "cupy",
            f"torch {name}",
            f"end of torch {name}",
            "end of cupy",
            "end of device 1",
        ]


def test_a_pools_memory_goes_back_with_its_owner(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    runtime = SimpleNamespace(deviceSynchronize=lambda: None, free=freed.append)
    monkeypatch.setattr(allocations, "runtime", runtime)
    owner = SimpleNamespace(ptr=4096)
    made = memory.pooled(512, lambda nbytes: owner)
    assert (made.kind, made.address, made.nbytes, made.backing) == (
        MemoryKind.POOLED,
        4096,
        512,
        owner,
    )
    memory.free(made)
    assert (made.backing, freed) == (None, [])
    with pytest.raises(
        DeviceError, match="a pool gives an object with the address of its memory as ptr, not int"
    ):
        memory.pooled(512, lambda nbytes: 4096)


class _Jax:
    """An array of JAX's over memory at an address."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, address: int) -> None:
        self.shape, self.dtype, self._address = shape, dtype, address

    def unsafe_buffer_pointer(self) -> int:
        return self._address


def _over(name: str, allocation: Allocation, shape: tuple[int, ...] = (2, 3)) -> Any:
    like = sys.modules[name]
    return arrays.guest(
        lambda _allocation, dtype, size: np.zeros(size, dtype), allocation, "f4", shape, like
    )


def test_jax_gets_an_array_over_the_memory_and_never_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = {"address": 4096}
    jax = ModuleType("jax")
    jax.dlpack = SimpleNamespace(
        from_dlpack=lambda view: _Jax(view.shape, view.dtype, where["address"])
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", jax)
    assert _over("jax", Allocation(MemoryKind.DEVICE, 24, 4096, 0)).shape == (2, 3)
    where["address"] = 8192
    with pytest.raises(Unsupported, match="JAX made a copy of device memory of f4"):
        _over("jax", Allocation(MemoryKind.DEVICE, 24, 4096, 0))
    with pytest.raises(Unsupported, match="JAX cannot see pageable memory"):
        _over("jax", Allocation(MemoryKind.PAGEABLE, 24, 0, 4096))


def test_warp_and_cudf_get_arrays_over_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    warp, cudf = ModuleType("warp"), ModuleType("cudf")
    warp.from_dlpack = lambda view: view  # type: ignore[attr-defined]
    cudf.Series = lambda view: view  # type: ignore[attr-defined]
    for module in (warp, cudf):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    device = Allocation(MemoryKind.DEVICE, 24, 4096, 0)
    assert _over("warp", device).shape == (2, 3)
    assert _over("cudf", device, (6,)).shape == (6,)
    with pytest.raises(Unsupported, match="a cuDF series has one dimension; 2 were asked for"):
        _over("cudf", device)


def test_warp_follows_the_stream_where_it_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []

    @contextmanager
    def scoped(stream: Any, sync_enter: bool = True) -> Iterator[None]:
        entered.append((stream, sync_enter))
        yield
        entered.append("left")

    warp = ModuleType("warp")
    warp.Stream = lambda device, cuda_stream: (device, cuda_stream)  # type: ignore[attr-defined]
    warp.ScopedStream = scoped  # type: ignore[attr-defined]
    warp.is_cuda_available = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "warp", warp)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(arrays, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=nullcontext)))
    with arrays.current(1, SimpleNamespace(cupy=nullcontext(), handle=77)):  # type: ignore[arg-type]
        assert entered == [(("cuda:1", 77), False)]
    assert entered[-1] == "left"
