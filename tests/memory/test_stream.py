"""Bandwidth of device memory: STREAM and its one-way parts, on arrays that no cache holds."""

from __future__ import annotations

import pytest

from pytest_gpumem.kernels.stream import tile_bytes


@pytest.fixture(autouse=True)
def _known_peak(gpu_device) -> None:
    """The limits are shares of the peak."""
    if not gpu_device.facts.dram_peak:
        pytest.skip(
            f"the peak of {gpu_device.facts.name} is unknown: the driver reports no memory clock or no bus width"
        )


@pytest.mark.gpumem(min_bandwidth="80% of peak")
def test_copy(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    c, a = device_buffer(streamed_bytes, "f4"), device_buffer(streamed_bytes, "f4")
    gpu_benchmark(gpu_kernels.copy, c, a)


@pytest.mark.gpumem(min_bandwidth="80% of peak")
def test_mul(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    b, c = device_buffer(streamed_bytes, "f4"), device_buffer(streamed_bytes, "f4")
    gpu_benchmark(gpu_kernels.mul, b, c, 3.0)


@pytest.mark.gpumem(min_bandwidth="80% of peak")
def test_stream_add(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    c, a, b = (device_buffer(streamed_bytes, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.stream_add, c, a, b)


@pytest.mark.gpumem(min_bandwidth="80% of peak")
def test_triad(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    a, b, c = (device_buffer(streamed_bytes, "f4") for _ in range(3))
    result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert result.bandwidth < result.device.peak_bandwidth


@pytest.mark.gpumem(min_bandwidth="85% of peak")
def test_write(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    gpu_benchmark(gpu_kernels.write, device_buffer(streamed_bytes, "f4"), 3.0)


@pytest.mark.gpumem(min_bandwidth="85% of peak")
def test_read(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    a = device_buffer(streamed_bytes, "f4")
    sums = device_buffer((streamed_bytes // tile_bytes("read"),), "f4")
    gpu_benchmark(gpu_kernels.read, a, sums)


@pytest.mark.gpumem(min_bandwidth="80% of peak")
def test_dot(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    a, b = device_buffer(streamed_bytes, "f4"), device_buffer(streamed_bytes, "f4")
    sums = device_buffer((streamed_bytes // tile_bytes("dot"),), "f4")
    gpu_benchmark(gpu_kernels.dot, a, b, sums)


def test_lines_that_a_flush_wrote_cost_the_next_kernel(
    gpu_benchmark, gpu_kernels, device_buffer, of_l2
):
    """Dirty lines are written back when a kernel evicts them: a quarter of its time on an H100, a sixth on an H200."""
    arrays = [device_buffer(of_l2(0.5), "f4") for _ in range(3)]
    clean, dirty = (
        gpu_benchmark(gpu_kernels.triad, *arrays, 3.0, mode=mode, label=mode).latency
        for mode in ("clean-cold", "dirty-cold")
    )
    assert dirty > 1.05 * clean
