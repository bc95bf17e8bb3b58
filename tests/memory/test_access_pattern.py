"""Coalescing: what a misaligned, a strided and a permuted copy cost (CUDA C++ Best Practices Guide, 9.2.1)."""

from __future__ import annotations

import pytest


def copied(gpu_benchmark, kernel, device_buffer, nbytes, *scalars, label):
    out, source = device_buffer(nbytes, "f4"), device_buffer(nbytes, "f4")
    return gpu_benchmark(kernel, out, source, *scalars, label=label)


@pytest.mark.parametrize("offset", [1, 7, 8, 32])
def test_offset_copy(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes, offset):
    """An offset of whole 32-byte sectors is nearly free; any other costs a fifth sector, which neighbouring warps mostly share."""
    aligned = copied(gpu_benchmark, gpu_kernels.offset_copy, device_buffer, streamed_bytes, 0, label="aligned")
    shifted = copied(gpu_benchmark, gpu_kernels.offset_copy, device_buffer, streamed_bytes, offset, label="shifted")
    assert shifted.bandwidth > (0.93 if offset % 8 == 0 else 0.75) * aligned.bandwidth


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_stride_copy(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes, stride):
    """Stride s moves min(32, 4s) sectors for each four that are useful: bandwidth falls with the stride, to about 1/8."""
    unit = copied(gpu_benchmark, gpu_kernels.stride_copy, device_buffer, streamed_bytes, 1, label="unit")
    strided = copied(gpu_benchmark, gpu_kernels.stride_copy, device_buffer, streamed_bytes, stride, label="strided")
    assert strided.bandwidth < 1.25 / stride * unit.bandwidth


def test_permutation_within_aligned_segments_is_nearly_free(gpu_benchmark, gpu_kernels, device_buffer, streamed_bytes):
    """Since compute capability 6.0 the order of a warp's words inside its sectors hardly matters."""
    straight = copied(gpu_benchmark, gpu_kernels.offset_copy, device_buffer, streamed_bytes, 0, label="straight")
    permuted = copied(gpu_benchmark, gpu_kernels.permuted_copy, device_buffer, streamed_bytes, label="permuted")
    assert permuted.bandwidth > 0.93 * straight.bandwidth
