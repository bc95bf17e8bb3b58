"""Sectors that a warp's requests touch, from PTX."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cuda.ahead_of_time import from_source
from pytest_gpumem.devices.cuda.nvrtc import CompilerMissing
from pytest_gpumem.kernels import sources
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import LaunchShape
from pytest_gpumem.kernels.warp_requests import Requests, requests


def pattern(statement: str, parameters: str = "float* a, const int* index, int n") -> Requests:
    """Of a kernel with one statement, in which `i` is the number of the thread in the grid."""
    source = f'extern "C" __global__ void k({parameters}) {{ int i = blockIdx.x * blockDim.x + threadIdx.x; {statement} }}'
    try:
        (kernel,) = from_source(source, "k.cu", "sm_90")
    except CompilerMissing as missing:
        pytest.skip(str(missing))
    return Requests(kernel.sectors, kernel.unknown)


@pytest.mark.parametrize(
    ("statement", "worst", "unknown"),
    [
        ("a[i] = 1;", 1, 0),
        ("a[i + 3] = 1;", 1.25, 0),
        ("a[2 * i] = 1;", 2, 0),
        ("a[8 * i] = 1;", 8, 0),
        ("a[64 * i] = 1;", 8, 0),  # one sector a thread: no more
        ("a[n - i] = 1;", 1.25, 0),  # backwards from a shared address that counts as aligned
        ("a[blockIdx.x] = 1;", 1, 0),
        ("a[(threadIdx.x * 11 + 7) % 32 + blockIdx.x * 32] = 1;", 1, 0),
        ("a[threadIdx.x / 32] = 1;", 1, 0),
        ("((float4*)a)[i] = make_float4(1, 2, 3, 4);", 1, 0),
        ("((float4*)a)[2 * i] = make_float4(1, 2, 3, 4);", 2, 0),
        ("((double*)a)[i] = 1;", 1, 0),
        ("for (; i < n; i += gridDim.x * blockDim.x) a[i] = 1;", 1, 0),
        ("for (int j = 0; j < n; j++) a[i * 16 + j] = 1;", 8, 0),
        ("a[i * n] = 1;", None, 1),
        ("a[index[i]] = 1;", 1, 1),
        ("a[i] = a[i ^ 5];", 1, 1),
        ("__shared__ float s[64]; s[threadIdx.x * 2] = n; __syncthreads(); a[i] = s[threadIdx.x];", 1, 0),
    ],
)
def test_patterns(statement: str, worst: float | None, unknown: int) -> None:
    assert pattern(statement) == Requests(worst, unknown)


def test_the_catalogues_patterns_are_those_that_its_kernels_declare() -> None:
    for name, worst, unknown in (
        ("copy", 1.0, 0),
        ("triad", 1.0, 0),
        ("offset_copy", 1.0, 0),
        ("permuted_copy", 1.0, 0),
        ("stride_copy", None, 2),
        ("transpose_tiled", 1.0, 0),
        ("transpose_padded", 1.0, 0),
    ):
        kernel = CATALOGUE[name]
        assert kernel.source is not None
        entry = kernel.expression("float", LaunchShape(1, 1))
        try:
            (found,) = from_source(sources.read(kernel.source), name, "sm_80", entries=[entry], options=sources.COMPILE_OPTIONS)
        except CompilerMissing as missing:
            pytest.skip(str(missing))
        assert (found.sectors, found.unknown) == (worst, unknown), name


def test_a_loop_that_never_settles_is_unknown() -> None:
    ptx = """
.visible .entry k(.param .u64 k_param_0)
{
    ld.param.u64 %rd1, [k_param_0];
    mov.u32 %r1, %tid.x;
    cvt.u64.u32 %rd2, %r1;
$L:
    shl.b64 %rd2, %rd2, 1;
    add.s64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r1;
    bra $L;
}
"""
    assert requests(ptx) == {"k": Requests(None, 1)}


@pytest.mark.parametrize("text", ["", "no PTX", ".entry", ".entry k(", ".visible .entry k() { ld.global.f32 %f1, [; }"])
def test_other_text_is_no_error(text: str) -> None:
    assert all(one.worst is None for one in requests(text).values())
