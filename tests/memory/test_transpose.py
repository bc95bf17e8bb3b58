"""Transposing a matrix: strided writes, a tile in shared memory, a padded tile (CUDA C++ Best Practices Guide, 9.2.3)."""

from __future__ import annotations

import pytest

WIDTH = 4096
"""Elements of a row; the height is what the size gives."""


@pytest.fixture
def matrices(device_buffer, streamed_bytes):
    """Target, source, width and height."""
    return (
        device_buffer(streamed_bytes, "f4"),
        device_buffer(streamed_bytes, "f4"),
        WIDTH,
        streamed_bytes // 4 // WIDTH,
    )


def test_a_tile_in_shared_memory_beats_strided_writes(gpu_benchmark, gpu_kernels, matrices):
    """Each word of a strided write is a sector of its own on its way to L2; bank conflicts stay on the chip."""
    naive = gpu_benchmark(gpu_kernels.transpose, *matrices, label="strided writes")
    tiled = gpu_benchmark(gpu_kernels.transpose_tiled, *matrices, label="tiled")
    assert tiled.latency < 0.97 * naive.latency


def test_padding_a_tile_removes_its_bank_conflicts(gpu_benchmark, gpu_kernels, matrices):
    """Without padding a warp finds the 32 words of a column in one bank, one after the other."""
    tiled = gpu_benchmark(gpu_kernels.transpose_tiled, *matrices, label="tiled")
    padded = gpu_benchmark(gpu_kernels.transpose_padded, *matrices, label="padded")
    assert padded.latency < 0.9 * tiled.latency


def test_a_padded_transpose_is_nearly_a_copy(gpu_benchmark, gpu_kernels, matrices):
    """With coalesced reads and writes and no conflicts, memory decides."""
    copy = gpu_benchmark(gpu_kernels.copy, *matrices[:2], label="copy")
    padded = gpu_benchmark(gpu_kernels.transpose_padded, *matrices, label="padded")
    assert padded.bandwidth > 0.75 * copy.bandwidth
