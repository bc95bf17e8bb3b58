"""Kernels that read the host's memory in place (Best Practices Guide, 9.1.3): once pays, again and again or strided does not."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem import MiB

pytestmark = pytest.mark.gpumem(precision="0.5%", budget="0.3 s")

TIMES = 4


@pytest.fixture
def nbytes(gpu_device) -> int:
    """Beyond any cache: more than twice L2."""
    return max(64 * MiB, 2 * gpu_device.facts.l2_bytes // MiB // 32 * 32 * MiB)


@pytest.fixture
def zero_copy(link_benchmark, gpu_kernels, device_buffer, pinned_buffer, nbytes):
    """Measures a kernel that reads mapped host memory `times` times, neighbouring threads `stride` elements apart."""
    y, x = device_buffer(nbytes), pinned_buffer(nbytes, mapped=True)

    def measure(times, stride=1, **keywords):
        return link_benchmark(
            gpu_kernels.reread,
            y,
            x,
            times,
            stride,
            label=f"mapped, {times} x, stride {stride}",
            **keywords,
        )

    return measure


@pytest.fixture
def copied(link_benchmark, gpu_kernels, gpu_work, device_buffer, pinned_buffer, nbytes):
    """Measures a copy to the device, and the same kernel there."""
    y, x, there = device_buffer(nbytes), pinned_buffer(nbytes), device_buffer(nbytes)

    def measure(times):
        work = gpu_work.in_turn(
            gpu_work.copy(there, x), gpu_work.kernel(gpu_kernels.reread, y, there, times)
        )
        return link_benchmark(work, label=f"copied, {times} x")

    return measure


def test_reading_once_in_place_is_no_slower_than_copying_first(zero_copy, copied):
    """The kernel's transfers overlap with its own work, with no streams to tune. Nine samples of ten keep to it on both sides."""
    copying = copied(1)

    def is_no_slower(mapped):
        return np.quantile(mapped.measurement.samples, 0.9) < 1.1 * np.quantile(
            copying.measurement.samples, 0.1
        )

    assert is_no_slower(zero_copy(1, holds=is_no_slower))


def test_reading_again_crosses_the_link_again(zero_copy, copied, gpu_device):
    """On an integrated GPU both are the same memory, and mapped memory "is always a performance gain"."""
    once, again, after_copy = zero_copy(1), zero_copy(TIMES), copied(TIMES)
    if gpu_device.facts.integrated:
        assert again.latency < after_copy.latency
        return
    assert again.latency > 0.8 * TIMES * once.latency
    assert again.latency > 2 * after_copy.latency


def test_strided_reads_move_whole_sectors_over_the_link(zero_copy, gpu_device):
    if gpu_device.facts.integrated:
        pytest.skip("an integrated GPU reads the host's memory as its own")
    assert zero_copy(1, stride=32).latency > 2 * zero_copy(1).latency


def test_the_links_bytes_are_what_counts(zero_copy, nbytes):
    """Of a kernel that reads mapped memory, what crosses the link is the traffic; the copy of N bytes counts N."""
    result = zero_copy(1)
    assert result.measurement.moved_bytes.link
    assert result.measurement.moved_bytes.total == nbytes
