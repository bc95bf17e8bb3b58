"""Access-policy windows through the driver: what it gives back, and that each place to put one gives the same gain."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem import GiB, GpuBenchmark, MiB
from pytest_gpumem.devices.protocol import AccessProperty, Device, WindowSpec
from pytest_gpumem.measuring.bound import Kernels

WHERE = ("stream", "graph", "launch")


@pytest.fixture
def launched(gpu_device: Device, gpu_kernels: Kernels, device_buffer: Any) -> Any:
    """A window of 8 MiB and a launch under it, whose kernel is loaded."""
    if not gpu_device.facts.persisting_l2_max_bytes:
        pytest.skip("no persisting L2")
    out, table = device_buffer(8 * MiB), device_buffer(8 * MiB)
    launch, stream = (
        gpu_kernels.copy.launch({"c": out, "a": table}, {}),
        gpu_device.streams.create(),
    )
    gpu_device.kernels.launch(launch, stream)
    gpu_device.streams.synchronize(stream)
    return launch, stream, table


@pytest.mark.parametrize("miss", [AccessProperty.STREAMING, AccessProperty.NORMAL])
@pytest.mark.parametrize("hit", AccessProperty)
def test_the_driver_gives_windows_back(
    gpu_device: Device, launched: Any, hit: AccessProperty, miss: AccessProperty
) -> None:
    launch, stream, table = launched
    window = WindowSpec(table.address, table.nbytes, 0.75, hit, miss)
    gpu_device.l2.set_window(stream, window)
    assert gpu_device.l2.window(stream) == window
    gpu_device.l2.set_window(stream, None)
    assert gpu_device.l2.window(stream) is None
    on_nodes = gpu_device.streams.capture(
        stream, lambda: gpu_device.kernels.launch(launch, stream), window=window
    )
    assert gpu_device.streams.windows(on_nodes) == (window,)
    on_launch = gpu_device.streams.capture(
        stream, lambda: gpu_device.kernels.launch(launch, stream, window=window)
    )
    assert gpu_device.streams.windows(on_launch) == (window,)
    assert gpu_device.l2.window(stream) is None


def test_a_launch_with_a_window_computes_the_same(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any, persisting_stream: Any
) -> None:
    """Arguments travel through another call: two arrays, a size and a scalar; the result is checked against the reference."""
    b, c = device_buffer(8 * MiB), device_buffer(8 * MiB)
    with persisting_stream(c, where="launch") as stream:
        assert gpu_benchmark(gpu_kernels.mul, b, c, 2.0, stream=stream).checked


def test_each_place_gives_the_streams_gain(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any, persisting_stream: Any
) -> None:
    out, table = device_buffer(1 * GiB, "i4"), device_buffer(8 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        off = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off").latency
    latency = {}
    for where in WHERE:
        with persisting_stream(table, where=where) as stream:
            result = gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label=where)
        window = result.measurement.window
        assert window is not None
        assert window.where == where
        latency[where] = result.latency
    assert off > 1.25 * latency["stream"]
    assert latency["graph"] == pytest.approx(latency["stream"], rel=0.03)
    assert latency["launch"] == pytest.approx(latency["stream"], rel=0.03)
