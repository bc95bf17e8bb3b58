"""Tests whose base and head differ in one planted cause: what `explain_proof.py` copies into a folder for each side.

A file `side.txt` beside it says "base" or "head". Kernels of the catalogue, sizes by the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem import GpuBenchmark, MiB
from pytest_gpumem.devices.protocol import Device

HERE = Path(__file__).resolve().parent
HEAD = (HERE / "side.txt").is_file() and (HERE / "side.txt").read_text(
    encoding="utf-8"
).strip() == "head"
LEAN_GRID = 32


def of_l2(device: Device, share: float) -> int:
    """Bytes: a share of L2, in whole MiB."""
    return max(1, int(share * device.facts.l2_bytes) // MiB) * MiB


def lookup(
    gpu_benchmark: GpuBenchmark,
    kernel: Any,
    device_buffer: Any,
    persisting_stream: Any,
    nbytes: int,
    **options: Any,
) -> None:
    """A table that is read over and over beside a stream that is written once."""
    out, table = device_buffer(1024 * MiB, "i4"), device_buffer(nbytes, "i4")
    with persisting_stream(table, **options) as stream:
        gpu_benchmark(kernel, out, table, stream=stream)


# Counted by ncu: kernels on device memory


def test_persistence_off(gpu_benchmark, gpu_kernels, gpu_device, device_buffer, persisting_stream):
    options = {"set_aside": "off"} if HEAD else {}
    lookup(
        gpu_benchmark,
        gpu_kernels.reset_data,
        device_buffer,
        persisting_stream,
        of_l2(gpu_device, 0.14),
        **options,
    )


def test_set_aside_at_maximum(
    gpu_benchmark, gpu_kernels, gpu_device, device_buffer, persisting_stream
):
    options = {"set_aside": "max"} if HEAD else {}
    lookup(
        gpu_benchmark,
        gpu_kernels.reset_data,
        device_buffer,
        persisting_stream,
        of_l2(gpu_device, 0.14),
        **options,
    )


@pytest.mark.filterwarnings("ignore")
def test_thrashing(gpu_benchmark, gpu_kernels, gpu_device, device_buffer, persisting_stream):
    options = (
        {"set_aside": "max", "hit_ratio": 1.0, "allow_thrash": True}
        if HEAD
        else {"set_aside": "max", "hit_ratio": "fit"}
    )
    kernel = gpu_kernels.reset_data.with_grid(LEAN_GRID)
    lookup(
        gpu_benchmark, kernel, device_buffer, persisting_stream, of_l2(gpu_device, 0.8), **options
    )


def test_stride_two(gpu_benchmark, gpu_kernels, device_buffer):
    stride = 2 if HEAD else 1
    gpu_benchmark(
        gpu_kernels.stride_copy,
        *(device_buffer(stride * 256 * MiB, "f4") for _ in range(2)),
        stride,
    )


def test_misaligned_by_one(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(
        gpu_kernels.offset_copy,
        *(device_buffer(512 * MiB, "f4") for _ in range(2)),
        1 if HEAD else 0,
    )


def test_more_bytes(gpu_benchmark, gpu_kernels, device_buffer):
    nbytes = (333 if HEAD else 256) * MiB
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(nbytes, "f4") for _ in range(3)), 3.0)


def test_unchanged_triad(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer(256 * MiB, "f4") for _ in range(3)), 3.0)


def test_unchanged_lookup(gpu_benchmark, gpu_kernels, gpu_device, device_buffer, persisting_stream):
    lookup(
        gpu_benchmark,
        gpu_kernels.reset_data,
        device_buffer,
        persisting_stream,
        of_l2(gpu_device, 0.14),
    )


# Watched by CUPTI: pages and copies


def test_prefetch_removed(gpu_benchmark, gpu_kernels, managed_buffer, prefetched_buffer):
    buffer = managed_buffer if HEAD else prefetched_buffer
    gpu_benchmark(gpu_kernels.add, buffer(16 * MiB, "f4"), buffer(16 * MiB, "f4"))


def test_pageable(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable_buffer):
    source = pageable_buffer(64 * MiB) if HEAD else pinned_buffer(64 * MiB)
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(64 * MiB), source)


def test_unchanged_prefetched(gpu_benchmark, gpu_kernels, prefetched_buffer):
    gpu_benchmark(
        gpu_kernels.add, prefetched_buffer(16 * MiB, "f4"), prefetched_buffer(16 * MiB, "f4")
    )


def test_unchanged_copy(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(64 * MiB), pinned_buffer(64 * MiB))
