"""What a test leaves on the device, and what lives until its end."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from pytest_gpumem import Case, GiB, GpuBenchmark
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.spaces import Memory

cupy = pytest.importorskip("cupy")
FREE: dict[str, int] = {}


@pytest.fixture(autouse=True)
def _real_gpu(request: pytest.FixtureRequest) -> None:
    """Replaces that of the folder: one of these tests uses no fixture of the plugin."""
    if (
        "gpu_device" in request.fixturenames
        and request.getfixturevalue("gpu_device").facts.simulated
    ):
        pytest.skip("needs a real GPU")


def test_1_before(gpu_device: Device) -> None:
    FREE["before"] = cupy.cuda.runtime.memGetInfo()[0]


def test_2_measures_12_mib(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any, gpu_device: Device
) -> None:
    gpu_benchmark(gpu_kernels.triad, *(device_buffer("4 MiB", "f4") for _ in range(3)))


def test_3_uses_no_fixture_and_has_its_memory() -> None:
    if not FREE:
        pytest.skip("needs a real GPU")
    gc.collect()
    cupy.get_default_memory_pool().free_all_blocks()
    assert FREE["before"] - cupy.cuda.runtime.memGetInfo()[0] < GiB


def test_4_copy_of_which_no_third_array_fits_says_that_it_is_not_checked(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any, gpu_device: Device
) -> None:
    nbytes = int(cupy.cuda.runtime.memGetInfo()[0] * 0.4) // GiB * GiB
    taken = gpu_benchmark(
        gpu_kernels.copy, device_buffer(nbytes, "f4"), device_buffer(nbytes, "f4")
    ).measurement
    assert not taken.checked
    assert any("not checked: memory is too short" in note for note in taken.notes)


def test_5_arrays_of_a_case_live_until_the_test_ends(
    gpu_benchmark: GpuBenchmark, gpu_device: Device
) -> None:
    """Reading freed memory would be an illegal access, which ends the context."""
    kept = {}

    def build(memory: Memory) -> Case:
        x, y = (
            memory.device((1 << 24,), "f4", like=cupy),
            memory.device((1 << 24,), "f4", like=cupy),
        )
        kept["y"] = y
        return Case(lambda: cupy.multiply(x, 2, out=y), reads=[x], writes=[y])

    gpu_benchmark.case(build)
    assert float(kept["y"].max()) <= 2
