"""A neighbour that leaves the largest set-aside and windows behind must not slow the next test, and our own streams leave nothing.

The tests of a neighbour build on each other, in the order in which they stand here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_gpumem import GiB, GpuBenchmark, MiB
from pytest_gpumem.devices.protocol import Device
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.l2 import LeftoverWarning, why_no_persisting_l2

cupy = pytest.importorskip("cupy")
R = pytest.importorskip("cuda.bindings.runtime")

DEFAULT_STREAMS = {"the legacy default stream": 0, "the per-thread default stream": 2}
"""Handles as the runtime API names them."""
LIMIT = R.cudaLimit.cudaLimitPersistingL2CacheSize
WINDOW = R.cudaStreamAttrID.cudaLaunchAttributeAccessPolicyWindow
SUCCESS = R.cudaError_t.cudaSuccess

seen: dict[str, Any] = {}


class Recorder:
    """A plugin that keeps the warnings about what was left."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def pytest_warning_recorded(self, warning_message: Any, nodeid: str) -> None:
        if issubclass(warning_message.category, LeftoverWarning):
            self.said.append((nodeid, str(warning_message.message)))


@pytest.fixture(scope="module")
def said(pytestconfig: pytest.Config) -> Iterator[list[tuple[str, str]]]:
    recorder = Recorder()
    pytestconfig.pluginmanager.register(recorder)
    yield recorder.said
    pytestconfig.pluginmanager.unregister(recorder)


@pytest.fixture
def victim(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, gpu_device: Device, device_buffer: Any
) -> Callable[[str], float]:
    """Measures a saturated stream of writes, which a large set-aside slows: what is set aside is missing for them."""
    reason = why_no_persisting_l2(gpu_device)
    if reason is not None:
        pytest.skip(reason)
    out, table = device_buffer(1 * GiB, "i4"), device_buffer(1 * MiB, "i4")
    return lambda label: float(
        gpu_benchmark(gpu_kernels.reset_data, out, table, label=label).latency
    )


def limit() -> int:
    error, value = R.cudaDeviceGetLimit(LIMIT)
    assert error == SUCCESS
    return int(value)


def window_bytes(handle: int) -> int:
    error, value = R.cudaStreamGetAttribute(handle, WINDOW)
    return int(value.accessPolicyWindow.num_bytes) if error == SUCCESS else 0


def test_before_the_neighbour(victim: Callable[[str], float], said: list[tuple[str, str]]) -> None:
    seen["limit"] = limit()
    seen["windows"] = [window_bytes(handle) for handle in DEFAULT_STREAMS.values()]
    seen["before"] = victim("before")


@pytest.mark.filterwarnings("default::pytest_gpumem.memory.l2.LeftoverWarning")
def test_neighbour(
    victim: Callable[[str], float],
    device_buffer: Any,
    said: list[tuple[str, str]],
    request: pytest.FixtureRequest,
) -> None:
    """By plain CUDA calls, as somebody's own code makes them: nothing is put back."""
    if "before" not in seen:
        pytest.skip("needs the test before it")
    table = device_buffer(8 * MiB, "f4", like=cupy)
    error, most = R.cudaDeviceGetAttribute(
        R.cudaDeviceAttr.cudaDevAttrMaxPersistingL2CacheSize, cupy.cuda.Device().id
    )
    assert error == SUCCESS
    assert R.cudaDeviceSetLimit(LIMIT, most) == (SUCCESS,)
    seen["windowed"] = []
    for name, handle in DEFAULT_STREAMS.items():
        value = R.cudaStreamAttrValue()
        policy = value.accessPolicyWindow
        policy.base_ptr, policy.num_bytes, policy.hitRatio = table.data.ptr, table.nbytes, 1.0
        policy.hitProp = R.cudaAccessProperty.cudaAccessPropertyPersisting
        policy.missProp = R.cudaAccessProperty.cudaAccessPropertyStreaming
        (error,) = R.cudaStreamSetAttribute(handle, WINDOW, value)
        # A driver may take no attributes on a default stream: then there is no window to be left on it.
        if error == SUCCESS:
            assert window_bytes(handle) == table.nbytes
            seen["windowed"].append(name)
        else:
            R.cudaGetLastError()
    with cupy.cuda.Stream.null:
        table.sum()
    cupy.cuda.runtime.deviceSynchronize()
    seen["nodeid"], seen["left"] = request.node.nodeid, limit()
    assert seen["left"] > seen["limit"]
    seen["beside"] = victim("beside")


def test_after_the_neighbour(victim: Callable[[str], float], said: list[tuple[str, str]]) -> None:
    if "beside" not in seen:
        pytest.skip("needs the two tests before it")
    assert limit() == seen["limit"]
    assert [window_bytes(handle) for handle in DEFAULT_STREAMS.values()] == seen["windows"]
    after = victim("after")
    assert (
        seen["beside"] > 1.1 * seen["before"]
    )  # else the set-aside would be no harm that could be seen
    assert after == pytest.approx(seen["before"], rel=0.03)
    ((nodeid, text),) = said
    assert nodeid == seen["nodeid"]
    assert text.startswith(f"{nodeid} left an L2 set-aside of ")
    assert [
        name
        for name in DEFAULT_STREAMS
        if f"the window on {name}: 8 MiB at hit ratio 1 (found: none)" in text
    ] == seen["windowed"]
    assert text.endswith("put back as found, and persisting lines reset")


@pytest.mark.parametrize("where", ["stream", "graph", "launch"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_our_own_streams_leave_nothing(
    gpu_benchmark: GpuBenchmark,
    gpu_kernels: Kernels,
    gpu_device: Device,
    device_buffer: Any,
    persisting_stream: Any,
    where: str,
    error: type[BaseException],
) -> None:
    """A warning about something left would be an error here."""
    found, table = limit(), device_buffer(8 * MiB, "i4")

    def measure() -> None:
        with persisting_stream(table, where=where) as stream:
            gpu_benchmark(
                gpu_kernels.reset_data, device_buffer(64 * MiB, "i4"), table, stream=stream
            )
            assert limit() != 0
            raise error

    with pytest.raises(error):
        measure()
    assert limit() == found
    assert all(
        gpu_device.l2.window(stream) is None
        for stream in gpu_device.streams.visible()
        if stream.handle not in (0, 2)
    )
