"""Managed memory: who touches it first decides where its pages are, and faults cost more than the kernel.

`add` is y = x + y on two arrays of floats, as in "Unified memory" (seed: 2.7). Before every sample the pages are put back to where
the test says, so no sample sees the pages that the one before has moved.
"""

from __future__ import annotations

import pytest

from pytest_gpumem import MiB

SIZE = 64 * MiB


@pytest.fixture
def plain(gpu_benchmark, gpu_kernels, device_buffer):
    """The same kernel on device memory: the best that managed memory can reach."""
    return lambda: gpu_benchmark(gpu_kernels.add, device_buffer(SIZE, "f4"), device_buffer(SIZE, "f4"), label="device memory")


def test_prefetch_beats_faulting(gpu_benchmark, gpu_kernels, managed_buffer, prefetched_buffer):
    faulting = gpu_benchmark(gpu_kernels.add, managed_buffer(SIZE, "f4"), managed_buffer(SIZE, "f4"), label="faulting")
    prefetched = gpu_benchmark(gpu_kernels.add, prefetched_buffer(SIZE, "f4"), prefetched_buffer(SIZE, "f4"), label="prefetched")
    assert faulting.latency > 30 * prefetched.latency


@pytest.mark.parametrize("init", ["init", "init_warp_per_page"])
def test_first_touch_by_the_gpu_avoids_faults(gpu_benchmark, gpu_kernels, managed_buffer, plain, init):
    x, y = (managed_buffer(SIZE, "f4", first_touch="none") for _ in range(2))
    for array in (x, y):
        getattr(gpu_kernels, init)(array)
    initialised = gpu_benchmark(gpu_kernels.add, x, y, label="GPU first")
    assert initialised.latency < 3 * plain().latency


def test_prefetched_is_nearly_device_memory(gpu_benchmark, gpu_kernels, prefetched_buffer, plain):
    prefetched = gpu_benchmark(gpu_kernels.add, prefetched_buffer(SIZE, "f4"), prefetched_buffer(SIZE, "f4"), label="prefetched")
    assert prefetched.latency < 3 * plain().latency
