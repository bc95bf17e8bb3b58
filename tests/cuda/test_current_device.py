"""A test that leaves another current device sends nothing of the next one there. Needs two GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_gpumem import GpuBenchmark
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels

cupy = pytest.importorskip("cupy")


@pytest.fixture
def _two_gpus(_real_gpu: None) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")


@pytest.fixture
def own(gpu_device: Device, _two_gpus: None) -> int:
    return int(cupy.cuda.runtime.getDevice())


def test_1_leaves_another_gpu_current(own: int) -> None:
    cupy.cuda.runtime.setDevice(1 - own)


def test_2_is_on_its_own_gpu(own: int, device_buffer: Any) -> None:
    assert (
        cupy.cuda.runtime.pointerGetAttributes(device_buffer("64 MiB", "f4").address).device == own
    )


def test_3_measures_its_own_gpu(
    own: int, gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    cupy.cuda.runtime.setDevice(1 - own)
    try:
        a, b = device_buffer("64 MiB", "f4"), device_buffer("64 MiB", "f4")
        assert cupy.cuda.runtime.pointerGetAttributes(a.address).device == own
        gpu_benchmark(gpu_kernels.copy, a, b)
        assert cupy.cuda.runtime.getDevice() == 1 - own
    finally:
        cupy.cuda.runtime.setDevice(own)


@pytest.mark.filterwarnings(
    "ignore:Benchmark fixture was not used"
)  # by pytest-benchmark, of a call that raises
def test_4_a_function_that_switches_is_an_error(
    own: int, gpu_benchmark: GpuBenchmark, device_buffer: Any
) -> None:
    from pytest_gpumem.devices.protocol import DeviceError

    x = device_buffer("4 MiB", "f4", like=cupy)

    def switches() -> None:
        cupy.multiply(x, np.float32(2), out=x)
        cupy.cuda.runtime.setDevice(1 - own)

    with pytest.raises(DeviceError, match=f"made GPU {1 - own} current"):
        gpu_benchmark(switches)
    assert cupy.cuda.runtime.getDevice() == own


def test_5_serves_calls_on_its_own_gpu(
    own: int, gpu_kernels: Kernels, device_buffer: Any, managed_buffer: Any, persisting_stream: Any
) -> None:
    cupy.cuda.runtime.setDevice(1 - own)
    try:
        a, b, pages = (
            device_buffer("4 MiB", "f4"),
            device_buffer("4 MiB", "f4"),
            managed_buffer("4 MiB"),
        )
        gpu_kernels.copy(a, b)
        assert (a.read() == b.read()).all()
        assert cupy.cuda.runtime.pointerGetAttributes(pages.address).device == own
        with persisting_stream(a) as stream:
            assert stream.window is not None
            stream.used = True
        assert cupy.cuda.runtime.getDevice() == 1 - own
    finally:
        cupy.cuda.runtime.setDevice(own)
