"""The figures of `gpumem code` are those that the driver reports of the loaded kernel."""

from __future__ import annotations

import pytest

from pytest_gpumem.devices.cuda.ahead_of_time import from_source
from pytest_gpumem.devices.protocol import Device

cupy = pytest.importorskip("cupy")

SPILLS = """
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
SHARES = """
extern "C" __global__ void shares(float* a) {
    __shared__ float s[100];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    a[0] = s[3];
}
"""
PLAIN = 'extern "C" __global__ void plain(double* a, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) a[i] = a[i] / 3 + 1; }'


@pytest.mark.parametrize(
    ("source", "name"), [(SPILLS, "spills"), (SHARES, "shares"), (PLAIN, "plain")]
)
def test_figures_are_those_of_the_driver(gpu_device: Device, source: str, name: str) -> None:
    major, minor = gpu_device.facts.compute_capability
    (code,) = from_source(source, "k.cu", f"sm_{major}{minor}")
    loaded = cupy.RawKernel(source, name)
    assert (code.registers, code.spill, code.shared) == (
        loaded.num_regs,
        loaded.local_size_bytes,
        loaded.shared_size_bytes,
    )
    assert (code.spill != 0, code.shared != 0) == (name == "spills", name == "shares")
