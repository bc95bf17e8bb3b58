"""The streams whose windows are looked at, which need no driver to be listed."""

from __future__ import annotations

from types import SimpleNamespace
from weakref import WeakSet

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import streams as streams_module
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.cuda.streams import CudaStreams


def stream(handle: int) -> CudaStream:
    return CudaStream(SimpleNamespace(ptr=handle))


@pytest.mark.parametrize(
    ("current", "handles"), [(0, [0, 2, 64]), (2, [0, 2, 64]), (96, [0, 2, 96, 64])]
)
def test_each_is_listed_once_and_own_ones_only_while_they_live(
    monkeypatch: pytest.MonkeyPatch, current: int, handles: list[int]
) -> None:
    streams = CudaStreams.__new__(CudaStreams)
    kept, gone = stream(64), stream(80)
    streams._streams = WeakSet([kept, gone])
    monkeypatch.setattr(
        streams_module.cupy.cuda, "get_current_stream", lambda: SimpleNamespace(ptr=current)
    )
    del gone
    assert [one.handle for one in streams.visible()] == handles
