"""Small tests of every kind of activity that a report holds: what `nsight_reading.py` records and keeps as fixtures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_gpumem import MiB


def test_kernels(gpu_benchmark: Any, device_buffer: Any, gpu_kernels: Any) -> None:
    a, b, c = (device_buffer(64 * MiB, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)


def test_several_kernels(gpu_benchmark: Any, gpu_device: Any) -> None:
    if gpu_device.facts.simulated:
        pytest.skip("the simulated device runs no foreign kernels")
    import cupy

    x = cupy.ones(1 << 20, dtype="f4")
    gpu_benchmark(lambda: cupy.sqrt(x * x + 1).sum(), moved=2 * x.nbytes)


def test_pages(gpu_benchmark: Any, managed_buffer: Any, prefetched_buffer: Any, gpu_kernels: Any) -> None:
    for label, make in {"faulting": managed_buffer, "prefetched": prefetched_buffer}.items():
        gpu_benchmark(gpu_kernels.add, make(2 * MiB, "f4"), make(2 * MiB, "f4"), label=label)


def test_copies(gpu_benchmark: Any, device_buffer: Any, pinned_buffer: Any, gpu_kernels: Any) -> None:
    target, pageable = device_buffer(1 * MiB, "f4"), np.ones(1 * MiB // 4, dtype="f4")
    gpu_benchmark(gpu_kernels.memcpy, target, pinned_buffer(1 * MiB, "f4"), label="pinned")
    gpu_benchmark(gpu_kernels.memcpy, target, pageable, label="pageable")
    gpu_benchmark(gpu_kernels.memcpy, pageable, target, label="back")
