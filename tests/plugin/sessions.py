"""What the tests of the plugin run."""

from __future__ import annotations

QUICKLY = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
"""Leave out what takes no part: each session would import most of Hypothesis again."""

SIMULATED = ("--gpumem", "--gpumem-device", "sim", "--gpumem-budget", "5 ms", *QUICKLY)
"""Measure on the simulated device, quickly."""

TRIAD = """
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert result.latency > 0
"""
"""A test that measures once."""
