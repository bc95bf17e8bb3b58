"""Capturing cleans up after whatever went wrong: seen on a fake runtime that books its calls."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

import cupy
from cuda.bindings import runtime as R  # noqa: N812
from known_devices import H100

from pytest_gpumem.devices.cuda import graphs
from pytest_gpumem.devices.cuda.graphs import CudaGraphs
from pytest_gpumem.devices.protocol import AccessProperty, CannotCapture, DeviceError, WindowSpec

OK = R.cudaError_t.cudaSuccess
INVALIDATED = int(R.cudaError_t.cudaErrorStreamCaptureInvalidated)
Kind = R.cudaGraphNodeType


class FakeRuntime:
    streamCaptureModeThreadLocal = 1  # noqa: N815

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.invalidated = False

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))

    def streamEndCapture(self, stream: int) -> int:  # noqa: N802
        self.calls.append(("streamEndCapture", stream))
        if self.invalidated:
            raise cupy.cuda.runtime.CUDARuntimeError(INVALIDATED)
        return 77

    def graphInstantiate(self, graph: int) -> int:  # noqa: N802
        self.calls.append(("graphInstantiate", graph))
        return 99

    @property
    def names(self) -> list[str]:
        return [c[0] for c in self.calls]


class FakeBindings:
    cudaEventRecordExternal = 1  # noqa: N815
    cudaGraphNodeType = Kind  # noqa: N815

    def __init__(self) -> None:
        self.nodes: list[Any] = [Kind.cudaGraphNodeTypeEventRecord, Kind.cudaGraphNodeTypeKernel]
        self.external: list[tuple[Any, ...]] = []
        self.cleared = 0
        self.calls: list[tuple[Any, ...]] = []
        self.cudaKernelNodeAttrValue = R.cudaKernelNodeAttrValue
        self.attribute: Any = R.cudaKernelNodeAttrValue()

    def cudaGraphKernelNodeSetAttribute(self, node: Any, attribute: Any, value: Any) -> Any:  # noqa: N802
        self.calls.append(("set", node))
        assert node == Kind.cudaGraphNodeTypeKernel
        assert attribute == R.cudaKernelNodeAttrID.cudaLaunchAttributeAccessPolicyWindow
        self.attribute = value
        return (OK,)

    def cudaGraphKernelNodeGetAttribute(self, node: Any, attribute: Any) -> Any:  # noqa: N802
        assert attribute == R.cudaKernelNodeAttrID.cudaLaunchAttributeAccessPolicyWindow
        return OK, self.attribute

    def cudaGraphGetNodes(self, graph: int, count: int) -> Any:  # noqa: N802
        return OK, self.nodes[:count], len(self.nodes)

    def cudaGraphNodeGetType(self, node: Any) -> Any:  # noqa: N802
        return OK, node

    def cudaEventRecordWithFlags(self, event: int, stream: int, flags: int) -> Any:  # noqa: N802
        self.external.append((event, stream, flags))
        return (OK,)

    def cudaGetLastError(self) -> Any:  # noqa: N802
        self.cleared += 1
        return (OK,)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(graphs, "runtime", fake)
    return fake


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> FakeBindings:
    fake = FakeBindings()
    monkeypatch.setattr(graphs, "R", fake)
    monkeypatch.setattr(
        graphs.cupy.cuda, "MemoryPool", lambda allocator: SimpleNamespace(malloc=allocator)
    )
    return fake


STREAM: Any = SimpleNamespace(handle=5)
EVENT: Any = SimpleNamespace(ptr=6)


def test_a_graph_is_instantiated_and_destroyed_with_its_handle(
    runtime: FakeRuntime, bindings: FakeBindings
) -> None:
    capturing = CudaGraphs(H100)
    graph = capturing.capture(STREAM, lambda: None)
    capturing.replay(graph, STREAM)
    assert runtime.calls == [
        ("streamBeginCapture", 5, 1),
        ("streamEndCapture", 5),
        ("graphInstantiate", 77),
        ("graphLaunch", 99, 5),
    ]
    del graph
    gc.collect()
    assert runtime.calls[-2:] == [("graphExecDestroy", 99), ("graphDestroy", 77)]


def test_a_window_is_put_on_every_kernel_before_the_graph_is_made_executable(
    runtime: FakeRuntime, bindings: FakeBindings
) -> None:
    window = WindowSpec(0x7F0000000000, 8 << 20, 0.75, miss=AccessProperty.NORMAL)
    bindings.nodes = [
        Kind.cudaGraphNodeTypeKernel,
        Kind.cudaGraphNodeTypeMemset,
        Kind.cudaGraphNodeTypeKernel,
    ]
    bindings.calls = runtime.calls
    graph = CudaGraphs(H100).capture(STREAM, lambda: None, window=window)
    assert runtime.names == [
        "streamBeginCapture",
        "streamEndCapture",
        "set",
        "set",
        "graphInstantiate",
    ]
    assert CudaGraphs(H100).windows(graph) == (window, window)


def test_windows_of_kernels_without_one(runtime: FakeRuntime, bindings: FakeBindings) -> None:
    graph = CudaGraphs(H100).capture(STREAM, lambda: None)
    assert CudaGraphs(H100).windows(graph) == (None,)


def test_a_refused_window_destroys_the_graph(
    runtime: FakeRuntime, bindings: FakeBindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    invalid = (R.cudaError_t.cudaErrorInvalidValue,)
    monkeypatch.setattr(bindings, "cudaGraphKernelNodeSetAttribute", lambda *_: invalid)
    with pytest.raises(CannotCapture, match="setting the access-policy window of a graph's kernel"):
        CudaGraphs(H100).capture(STREAM, lambda: None, window=WindowSpec(4096, 4096, 1.0))
    assert runtime.names == ["streamBeginCapture", "streamEndCapture", "graphDestroy"]


def test_a_replay_inside_a_capture_is_refused(runtime: FakeRuntime, bindings: FakeBindings) -> None:
    capturing = CudaGraphs(H100)
    graph = capturing.capture(STREAM, lambda: None)
    with pytest.raises(CannotCapture, match="replays a graph"):
        capturing.capture(STREAM, lambda: capturing.replay(graph, STREAM))
    assert "graphLaunch" not in runtime.names


def test_events_are_external_only_on_the_captured_stream(
    runtime: FakeRuntime, bindings: FakeBindings
) -> None:
    capturing = CudaGraphs(H100)
    other: Any = SimpleNamespace(handle=8)

    def body() -> None:
        capturing.record(EVENT, STREAM)
        capturing.record(EVENT, other)

    capturing.capture(STREAM, body)
    capturing.record(EVENT, STREAM)
    assert bindings.external == [(6, 5, 1)]
    assert [c for c in runtime.calls if c[0] == "eventRecord"] == [
        ("eventRecord", 6, 8),
        ("eventRecord", 6, 5),
    ]


@pytest.mark.parametrize("invalidated", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            cupy.cuda.runtime.CUDARuntimeError(
                int(R.cudaError_t.cudaErrorStreamCaptureUnsupported)
            ),
            "cudaErrorStreamCaptureUnsupported",
        ),
        (DeviceError("waiting for a stream: it captures"), "^waiting for a stream"),
        (ValueError("a mistake\nof two lines"), "^ValueError: a mistake$"),
    ],
)
def test_a_body_that_fails_leaves_the_stream_usable(
    runtime: FakeRuntime, bindings: FakeBindings, error: Exception, reason: str, invalidated: bool
) -> None:
    runtime.invalidated = invalidated
    capturing = CudaGraphs(H100)

    def body() -> None:
        raise error

    with pytest.raises(CannotCapture, match=reason):
        capturing.capture(STREAM, body)
    assert runtime.names == ["streamBeginCapture", "streamEndCapture"] + ["graphDestroy"] * (
        not invalidated
    )
    assert bindings.cleared == 1
    runtime.invalidated = False
    assert capturing.capture(STREAM, lambda: None).executable == 99


def test_an_interrupt_ends_the_capture_and_goes_on(
    runtime: FakeRuntime, bindings: FakeBindings
) -> None:
    def body() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        CudaGraphs(H100).capture(STREAM, body)
    assert runtime.names == ["streamBeginCapture", "streamEndCapture", "graphDestroy"]


def test_a_capture_that_was_invalidated_without_an_exception_is_refused(
    runtime: FakeRuntime, bindings: FakeBindings
) -> None:
    runtime.invalidated = True
    with pytest.raises(CannotCapture, match="cudaErrorStreamCaptureInvalidated"):
        CudaGraphs(H100).capture(STREAM, lambda: None)
    assert runtime.names == ["streamBeginCapture", "streamEndCapture"]


@pytest.mark.parametrize(
    "nodes", [[], [Kind.cudaGraphNodeTypeEventRecord, Kind.cudaGraphNodeTypeEventRecord]]
)
def test_work_that_went_elsewhere_is_noticed(
    runtime: FakeRuntime, bindings: FakeBindings, nodes: list[Any]
) -> None:
    bindings.nodes = nodes
    with pytest.raises(CannotCapture, match="queued nothing on the stream"):
        CudaGraphs(H100).capture(STREAM, lambda: None)
    assert runtime.names == ["streamBeginCapture", "streamEndCapture", "graphDestroy"]


def test_captures_do_not_nest(runtime: FakeRuntime, bindings: FakeBindings) -> None:
    capturing = CudaGraphs(H100)
    with pytest.raises(CannotCapture, match="another capture is under way"):
        capturing.capture(STREAM, lambda: capturing.capture(STREAM, lambda: None))  # type: ignore[arg-type]
    assert runtime.names == ["streamBeginCapture", "streamEndCapture", "graphDestroy"]
