"""The host link: pinned against pageable memory, both ways (CUDA C++ Best Practices Guide, 9.1.1)."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem import MiB

SIZE = 256 * MiB


@pytest.fixture(scope="module")
def pageable():
    """An ordinary NumPy array, written once so that its pages exist."""
    return np.random.default_rng(0).random(SIZE // 4, dtype="f4")


def test_pinned_to_device_beats_pageable(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable):
    target = device_buffer(SIZE, "f4")
    pinned = gpu_benchmark(gpu_kernels.memcpy, target, pinned_buffer(SIZE, "f4"), label="pinned")
    slow = gpu_benchmark(gpu_kernels.memcpy, target, pageable, label="pageable")
    assert pinned.bandwidth > 1.5 * slow.bandwidth


def test_device_to_pinned_beats_pageable(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable):
    source = device_buffer(SIZE, "f4")
    pinned = gpu_benchmark(gpu_kernels.memcpy, pinned_buffer(SIZE, "f4"), source, label="pinned")
    slow = gpu_benchmark(gpu_kernels.memcpy, pageable, source, label="pageable")
    assert pinned.bandwidth > 1.5 * slow.bandwidth


def test_registered_memory_is_as_fast_as_pinned(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer, registered_buffer, pageable):
    target = device_buffer(SIZE, "f4")
    pinned = gpu_benchmark(gpu_kernels.memcpy, target, pinned_buffer(SIZE, "f4"), label="pinned")
    registered = gpu_benchmark(gpu_kernels.memcpy, target, registered_buffer(pageable), label="registered")
    assert registered.bandwidth > 0.9 * pinned.bandwidth
