"""What happens once must not turn a measurement on the device's clock into one by the host's."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pytest_gpumem import Case, GpuBenchmark, MiB
from pytest_gpumem.memory.spaces import Memory

cupy = pytest.importorskip("cupy")
WAITS_AT = 60
"""Call after the check, the search for the stream and most of the warm-up."""


def test_one_wait_in_one_launch(gpu_benchmark: GpuBenchmark) -> None:
    calls = 0

    def build(memory: Memory) -> Case:
        a, b = memory.device(4 * MiB, "f4", like=cupy), memory.device(4 * MiB, "f4", like=cupy)

        def work() -> None:
            nonlocal calls
            calls += 1
            cupy.multiply(a, np.float32(2), out=b)
            if calls == WAITS_AT:
                cupy.cuda.runtime.deviceSynchronize()

        return Case(work, reads=[a], writes=[b])

    taken = gpu_benchmark.case(build).measurement
    assert calls > WAITS_AT
    assert taken.sampler == "blocked", taken.sampler_reason


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager_collector")
def test_garbage_that_holds_device_memory(gpu_benchmark: GpuBenchmark) -> None:
    """cudaFree waits for the device: the collector must not run behind a held stream."""
    with cupy.cuda.using_allocator(None):
        cycles: list[list[Any]] = [[cupy.zeros(1 << 18)] for _ in range(64)]
    for one in cycles:
        one.append(one)
    x = cupy.zeros(1 << 20, dtype="f4")
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 100:
            cycles.clear()  # garbage from here on
        assert len([[] for _ in range(200)]) == 200  # makes the collector run
        x.fill(1)

    taken = gpu_benchmark(work).measurement
    assert calls > 100
    assert taken.sampler == "blocked", taken.sampler_reason
    assert not any("tried again" in note for note in taken.notes)


def test_a_kernel_made_at_each_placement(gpu_benchmark: GpuBenchmark) -> None:
    """It is loaded at its first launch, which waits for the device."""
    built = 0

    def build(memory: Memory) -> Case:
        nonlocal built
        built += 1
        a, b = memory.device(4 * MiB, "f4", like=cupy), memory.device(4 * MiB, "f4", like=cupy)
        source = f"""extern "C" __global__ void copy_{built}(const float* a, float* b, int n) {{
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) b[i] = a[i];
        }}"""
        copy = cupy.RawKernel(source, f"copy_{built}")
        return Case(
            lambda: copy((a.size // 256,), (256,), (a, b, np.int32(a.size))), reads=[a], writes=[b]
        )

    taken = gpu_benchmark.case(build).measurement
    assert built > 1
    assert taken.sampler == "blocked", taken.sampler_reason
    assert not any("tried again" in note for note in taken.notes)
