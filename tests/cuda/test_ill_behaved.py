"""Callables that would corrupt a naive measurement: the right time or a clear error for each, and the next measurement is sound."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_gpumem import Case, GpuBenchmark, MiB
from pytest_gpumem.memory.spaces import Memory

NBYTES = 64 * MiB
cupy = pytest.importorskip("cupy")
HOST_SPREAD = 1.5
"""How far two medians by the host's clock of works that launch and wait alike may lie apart, as a multiple: hosts are not steady."""
HOST_CALLS = 200


@pytest.fixture
def arrays(device_buffer: Any) -> tuple[Any, Any]:
    return device_buffer(NBYTES, "f4", like=cupy), device_buffer(NBYTES, "f4", like=cupy)


@pytest.fixture
def well(gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any]) -> Callable[[], Any]:
    """Measures the well-behaved work."""
    x, y = arrays
    return lambda: gpu_benchmark(
        lambda: cupy.multiply(x, np.float32(2), out=y), label="well-behaved"
    )


def by_hand(work: Callable[[], Any]) -> float:
    """Seconds of a work and of waiting for the device, by the host's clock: the median of many calls."""
    taken = []
    for _ in range(HOST_CALLS):
        begun = time.perf_counter()
        work()
        cupy.cuda.runtime.deviceSynchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def test_one_that_allocates_from_a_pool(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, _ = arrays
    result = gpu_benchmark(lambda: cupy.multiply(x, np.float32(2)), label="allocates")
    assert result.sampler == "blocked"
    assert result.latency == pytest.approx(well().latency, rel=0.1)


def test_one_that_allocates_from_the_driver(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    """cudaFree waits for the device, so the host's clock is what is left."""
    x, y = arrays

    def work() -> None:
        memory = cupy.cuda.runtime.malloc(1 * MiB)
        cupy.multiply(x, np.float32(2), out=y)
        cupy.cuda.runtime.free(memory)

    result = gpu_benchmark(work, label="allocates")
    assert result.latency > 0.9 * well().latency
    assert result.sampler == "host"
    assert "waited for the device" in result.measurement.sampler_reason


def test_one_that_synchronises(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, y = arrays

    def work() -> None:
        cupy.multiply(x, np.float32(2), out=y)
        cupy.cuda.runtime.deviceSynchronize()

    result = gpu_benchmark(work, label="synchronises")
    assert result.sampler == "host"
    assert "waited for the device" in result.measurement.sampler_reason
    assert well().latency < result.latency < HOST_SPREAD * by_hand(work)


def test_one_that_launches_on_its_own_stream(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, y = arrays
    own = cupy.cuda.Stream(non_blocking=True)

    def work() -> None:
        with own:
            cupy.multiply(x, np.float32(2), out=y)

    result = gpu_benchmark(work, label="own stream")
    assert result.sampler == "host"
    assert result.measurement.sampler_reason.startswith("its work runs on streams of its own")
    assert well().latency < result.latency < HOST_SPREAD * by_hand(work)


def test_one_whose_own_stream_joins_ours(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, y = arrays
    own = cupy.cuda.Stream(non_blocking=True)

    def work() -> None:
        ours = cupy.cuda.get_current_stream()
        own.wait_event(ours.record())
        with own:
            cupy.multiply(x, np.float32(2), out=y)
        ours.wait_event(own.record())

    result = gpu_benchmark(work, label="joins")
    assert result.sampler == "blocked"
    assert result.latency == pytest.approx(well().latency, rel=0.15)


def test_one_that_leaves_work_beside_ours(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any]
) -> None:
    x, y = arrays
    own = cupy.cuda.Stream(non_blocking=True)
    small = cupy.zeros(1024, "f4")

    def work() -> None:
        small.fill(0)
        with own:
            for _ in range(4):
                cupy.multiply(x, np.float32(2), out=y)

    result = gpu_benchmark(work, label="beside")
    assert result.sampler == "host"
    assert "of its work run beside the timed stream" in result.measurement.sampler_reason


def test_one_that_mutates_its_input(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, _ = arrays

    def work() -> None:
        cupy.multiply(x, np.float32(1.5), out=x)

    drifting = gpu_benchmark(work, label="drifts")  # to infinity, in the same time

    def case(memory: Memory) -> Case:
        z, start = memory.device(NBYTES, "f4", like=cupy), memory.device(NBYTES, "f4", like=cupy)
        return Case(
            lambda: cupy.multiply(z, np.float32(1.5), out=z),
            restore=lambda: cupy.copyto(z, start),
            check=lambda: cupy.testing.assert_array_equal(z, np.float32(1.5) * start),
            reads=[z],
            writes=[z],
        )

    restored = gpu_benchmark.case(case, label="restored")
    assert restored.latency == pytest.approx(drifting.latency, rel=0.1)
    assert restored.checked


def test_one_that_raises_at_its_fiftieth_call(
    gpu_benchmark: GpuBenchmark, arrays: tuple[Any, Any], well: Callable[[], Any]
) -> None:
    x, y = arrays
    before = well()
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        if calls == 50:
            raise RuntimeError("the fiftieth call")
        cupy.multiply(x, np.float32(2), out=y)

    with pytest.raises(RuntimeError, match="the fiftieth call"):
        gpu_benchmark(work, label="raises")
    after = gpu_benchmark(lambda: cupy.multiply(x, np.float32(2), out=y), label="after it")
    assert after.latency == pytest.approx(before.latency, rel=0.1)
