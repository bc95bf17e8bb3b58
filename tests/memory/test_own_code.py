"""Code of your own: any callable that launches on the current stream, and a `Case` for everything an honest measurement needs.

These skip on the simulated device, which cannot run foreign kernels, and where the library is not installed.
"""

from __future__ import annotations

import pytest

from pytest_gpumem import Case, MiB


def test_cupy_callable(real_gpu, gpu_benchmark, device_buffer):
    """The short form: a function and its arguments; `moved` is what the bandwidth counts."""
    cupy = pytest.importorskip("cupy")
    x = device_buffer(64 * MiB, "f4", like=cupy)
    result = gpu_benchmark(cupy.cumsum, x, moved=2 * x.nbytes)
    assert result.bandwidth < result.device.peak_bandwidth


def test_torch_callable(real_gpu, gpu_benchmark, device_buffer):
    torch = pytest.importorskip("torch")
    x = device_buffer(64 * MiB, "f4", like=torch)
    result = gpu_benchmark(torch.cumsum, x, 0, moved=2 * x.nbytes)
    assert result.bandwidth < result.device.peak_bandwidth


def test_case_in_place(real_gpu, gpu_benchmark):
    """An operation that changes its input: restored before every sample, checked after one launch, built anew for each placement."""
    cupy = pytest.importorskip("cupy")

    def in_place(memory):
        x = memory.device((1 << 22,), "f4", like=cupy)
        y = memory.device((1 << 22,), "f4", like=cupy)
        return Case(
            launch=lambda: cupy.add(y, x, out=y),
            restore=lambda: y.fill(1),
            check=lambda: cupy.testing.assert_array_equal(y, 1 + x),
            reads=[x, y],
            writes=[y],
        )

    result = gpu_benchmark.case(in_place)
    assert result.measurement.checked


def test_case_that_also_runs_simulated(gpu_benchmark):
    """With a reference, which does the same to the buffers' host views, a case runs on the simulated device too."""

    def scale(memory):
        x, y = memory.device((1 << 22,), "f4"), memory.device((1 << 22,), "f4")

        def compute():
            y.view()[:] = 2 * x.view()

        def check():
            assert (y.read() == 2 * x.read()).all()

        return Case(launch=compute, reference=compute, check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(scale)
    assert result.measurement.checked
