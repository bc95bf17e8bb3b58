"""Coalescing: misaligned, strided and permuted copies, beside what their sectors predict (CUDA C++ Best Practices Guide, 9.2.1)."""

from __future__ import annotations

import pytest

from pytest_gpumem.kernels.calls import SECTORS_COALESCED, sectors_per_request

OFFSETS = range(1, 33)
STRIDES = range(2, 33)


@pytest.fixture
def copied(gpu_benchmark, device_buffer, streamed_bytes):
    """Measures a copy; gives its bandwidth, and the share of a coalesced copy's that its sectors predict."""
    out, source = device_buffer(streamed_bytes, "f4"), device_buffer(streamed_bytes, "f4")

    def copy(kernel, *scalars, label):
        result = gpu_benchmark(kernel, out, source, *scalars, label=label)
        return result.bandwidth, SECTORS_COALESCED / sectors_per_request(kernel.accesses(out, source, *scalars))

    return copy


def test_offset_copy(gpu_kernels, copied):
    """An offset of whole 32-byte sectors is nearly free; any other costs a fifth sector, which neighbouring warps mostly share."""
    aligned, _ = copied(gpu_kernels.offset_copy, 0, label="offset 0")
    for offset in OFFSETS:
        shifted, predicted = copied(gpu_kernels.offset_copy, offset, label=f"offset {offset}")
        assert shifted > 0.93 * predicted * aligned, offset


def test_stride_copy(gpu_kernels, copied):
    """Stride s moves min(32, 4s) sectors for each four that are useful: bandwidth falls with the stride, to 1/8 or less."""
    unit, _ = copied(gpu_kernels.stride_copy, 1, label="stride 1")
    for stride in STRIDES:
        strided, predicted = copied(gpu_kernels.stride_copy, stride, label=f"stride {stride}")
        assert strided < 1.25 * predicted * unit, stride


def test_permutation_within_aligned_segments_is_nearly_free(gpu_kernels, copied):
    """Since compute capability 6.0 the order of a warp's words inside its sectors hardly matters."""
    straight, _ = copied(gpu_kernels.offset_copy, 0, label="straight")
    permuted, predicted = copied(gpu_kernels.permuted_copy, label="permuted")
    assert permuted > 0.93 * predicted * straight
