"""The streams whose windows are looked at, which need no driver to be listed."""

from __future__ import annotations

from types import SimpleNamespace
from weakref import WeakSet

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import device as device_module
from pytest_gpumem.devices.cuda.device import CudaDevice
from pytest_gpumem.devices.cuda.streams import CudaStream


def stream(handle: int) -> CudaStream:
    return CudaStream(SimpleNamespace(ptr=handle))


@pytest.mark.parametrize(("current", "handles"), [(0, [0, 2, 64]), (2, [0, 2, 64]), (96, [0, 2, 96, 64])])
def test_each_is_listed_once_and_own_ones_only_while_they_live(monkeypatch: pytest.MonkeyPatch, current: int, handles: list[int]) -> None:
    device = CudaDevice.__new__(CudaDevice)
    kept, gone = stream(64), stream(80)
    device._streams = WeakSet([kept, gone])
    monkeypatch.setattr(device_module, "current_stream", lambda: stream(current))
    del gone
    assert [one.handle for one in device.visible_streams()] == handles
