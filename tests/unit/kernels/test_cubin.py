"""Reading machine code: its digest changes with the code alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kernel_calls import called

from pytest_gpumem.kernels.cubin import Cubin, NotACubin, NotInCubin

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="cuda-bindings has no wheel for this machine"
)

SOURCE = """
__constant__ double table[4] = {1, 2, 3, 4};
__device__ float written[64];
__device__ __noinline__ double far(double x) { return x * 3.14159265358979 + table[(int)x & 3] + written[(int)x & 63]; }
extern "C" __global__ void plain(float* a) { a[threadIdx.x] = 1; }
extern "C" __global__ void calls(double* a) { a[0] = far(a[1]); }
extern "C" __global__ void shares(float* a) {
    __shared__ float s[100];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[0] = s[3];
}
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* a, int n) {
    float v[64];
    for (int i = 0; i < 64; i++) v[i] = a[i * n + threadIdx.x];
    for (int k = 0; k < n; k++)
#pragma unroll
        for (int i = 0; i < 64; i++) v[i] = v[(i * 7) % 64] * v[i] + k;
#pragma unroll
    for (int i = 0; i < 64; i++) a[i + threadIdx.x * 64] = v[i];
}
"""
KERNELS = ("calls", "plain", "shares", "spills")


def compiled(source: str = SOURCE, *options: str, arch: str = "sm_90", name: str = "t.cu") -> bytes:
    """The cubin."""
    program = called(nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], []))
    given = [option.encode() for option in (f"-arch={arch}", *options)]
    called(nvrtc.nvrtcCompileProgram(program, len(given), given))
    content = bytearray(called(nvrtc.nvrtcGetCUBINSize(program)))
    called(nvrtc.nvrtcGetCUBIN(program, content))
    return bytes(content)


def architectures() -> list[str]:
    try:
        return [f"sm_{number}" for number in called(nvrtc.nvrtcGetSupportedArchs())]
    except RuntimeError:
        pytest.skip("NVRTC is missing")


def digests(*arguments: str, **options: str) -> dict[str, str]:
    cubin = Cubin(compiled(*arguments, **options))
    return {name: cubin.kernel(name).digest for name in KERNELS}


@pytest.fixture(scope="module")
def base() -> dict[str, str]:
    architectures()
    return digests()


@pytest.mark.parametrize(
    "same",
    [
        {"name": "/elsewhere/other.cu"},
        {"source": "// a comment\n\n\n" + SOURCE},
        {"option": "-lineinfo"},
        {"option": "--define-macro=UNUSED=1"},
    ],
    ids=["path", "comment", "line information", "unused macro"],
)
def test_digest_stays(base: dict[str, str], same: Any) -> None:
    assert (
        digests(
            same.get("source", SOURCE),
            *filter(None, [same.get("option")]),
            name=same.get("name", "t.cu"),
        )
        == base
    )


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ((("a[threadIdx.x] = 1", "a[threadIdx.x] = 2"),), {"plain"}),
        ((("s[3]", "s[4]"),), {"shares"}),
        ((("3.14159265358979", "3.14159265358978"),), {"calls"}),
        # Constants and variables of the module may be used by each of its kernels.
        ((("{1, 2, 3, 4}", "{1, 2, 3, 5}"),), set(KERNELS)),
    ],
    ids=["constant", "index", "called function", "constant memory"],
)
def test_digest_changes_with_the_code(base: dict[str, str], change: Any, changed: Any) -> None:
    source = SOURCE
    for old, new in change:
        assert old in source
        source = source.replace(old, new)
    now = digests(source)
    assert {name for name in KERNELS if now[name] != base[name]} == changed


def test_digest_changes_with_an_option(base: dict[str, str]) -> None:
    source = SOURCE.replace(
        "a[threadIdx.x] = 1", "a[threadIdx.x] = __fdividef(a[0], 3) + a[1] / a[2]"
    )
    assert digests(source)["plain"] != digests(source, "--use_fast_math")["plain"]


def test_digest_tells_variables_apart_that_only_relocations_name() -> None:
    """The code loads an address from a table; which variable it is stands in the relocations alone."""
    architectures()
    source = """__device__ float %s;
        extern "C" __global__ void k(float* a) { used[threadIdx.x] = a[0]; }"""
    first, second = (
        Cubin(compiled(source % sizes))
        for sizes in ("used[64], other[128]", "used[128], other[64]")
    )
    assert first.kernel("k").digest != second.kernel("k").digest


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_where_the_parameters_of_a_kernel_lie(arch: str) -> None:
    assert arch in architectures()
    source = """
        struct mixed { char c; double d; int i; };
        template <int n> struct table { int value[n]; };
        extern "C" __global__ void none() {}
        extern "C" __global__ void several(float* p, int n, char c, mixed m, long long k) { p[n] = c + m.d + k; }
        extern "C" __global__ void four_kib(table<1020> t, float* p, char c) { p[0] = t.value[c]; }
        extern "C" __global__ void more(table<8000> t, float* p) { p[0] = t.value[threadIdx.x]; }
    """
    cubin = Cubin(compiled(source, arch=arch))
    assert cubin.kernel("none").parameters == ()
    assert cubin.kernel("several").parameters == ((0, 8), (8, 4), (12, 1), (16, 24), (40, 8))
    assert cubin.kernel("four_kib").parameters == ((0, 4080), (4080, 8), (4088, 1))
    assert cubin.kernel("more").parameters == ((0, 32000), (32000, 8))


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_a_file_that_is_cut_off_is_refused_or_read_whole(arch: str) -> None:
    assert arch in architectures()
    content = compiled(arch=arch)
    whole = [Cubin(content).kernel(name) for name in KERNELS]
    refused = 0
    for end in range(0, len(content), max(1, len(content) // 150)):
        try:
            cubin = Cubin(content[:end])
            assert [cubin.kernel(name) for name in KERNELS] == whole
        except NotACubin:
            refused += 1
    assert refused > 100


def test_damaged_bytes_never_end_otherwise() -> None:
    architectures()
    content = bytearray(compiled())
    for at in range(0, len(content), 97):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        try:
            cubin = Cubin(bytes(damaged))
            for name in KERNELS:
                cubin.kernel(name)
        except (NotACubin, NotInCubin):
            pass


def test_no_such_kernel_and_other_files() -> None:
    architectures()
    with pytest.raises(NotInCubin, match="other"):
        Cubin(compiled()).kernel("other")
    for content in (b"", b"MZ", b"\x7fELF", Path(sys.executable).read_bytes()[:4096]):
        with pytest.raises(NotACubin):
            Cubin(content)
