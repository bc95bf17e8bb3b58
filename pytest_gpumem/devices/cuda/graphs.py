"""Work captured into CUDA graphs, together with the memory that it allocated (CUDA Programming
Guide, stream capture)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.checks import check_window, why_not_captured
from pytest_gpumem.devices.cuda import l2
from pytest_gpumem.devices.cuda.context import Context
from pytest_gpumem.devices.cuda.errors import check, library_errors
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.handles import CudaEvent, CudaStream
from pytest_gpumem.devices.protocol import CannotCapture, DeviceError, Graph, Stream, WindowSpec
from pytest_gpumem.records.device import DeviceFacts

_WINDOW = R.cudaKernelNodeAttrID.cudaLaunchAttributeAccessPolicyWindow
_THREAD_LOCAL = R.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
_SETTING = "setting the access-policy window of a graph's kernel"


class CudaGraph:
    """An executable graph, and the graph that it was made from, which alone can be asked for its
    nodes' attributes."""

    __slots__ = ("__weakref__", "executable", "template")

    def __init__(self, executable: Any, template: Any) -> None:
        self.executable = executable
        self.template = template


class CudaGraphs:
    """Captures on one device; knows which stream is being captured."""

    def __init__(self, context: Context, facts: DeviceFacts) -> None:
        self._context = context
        self._facts = facts
        self._stream: CudaStream | None = None

    def record(self, event: CudaEvent, stream: CudaStream) -> None:
        """Record an event; during a capture as an external node, whose time can be read after every
        replay."""
        if self._stream is stream:
            flags = R.cudaEventRecordExternal
            check(
                R.cudaEventRecordWithFlags(event.handle, stream.handle, flags),
                "recording an event in a graph",
            )
        else:
            check(R.cudaEventRecord(event.handle, stream.handle), "recording an event")

    def replay(self, graph: Graph, stream: Stream) -> None:
        if self._stream is not None:  # a graph within a graph would have to be made a node
            raise CannotCapture("it replays a graph")
        check(
            R.cudaGraphLaunch(cast(CudaGraph, graph).executable, stream.handle), "replaying a graph"
        )

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        windows = []
        for node in _kernels(cast(CudaGraph, graph).template):
            value = R.cudaGraphKernelNodeGetAttribute(node, _WINDOW)
            windows.append(
                l2.unpacked(check(value, "reading the access-policy window of a graph's kernel"))
            )
        return tuple(windows)

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> CudaGraph:
        if window is not None:
            check_window(window, self._facts)
        if self._stream is not None:
            raise CannotCapture("another capture is under way")
        template = executable = None
        try:
            with ExitStack() as pools:
                kept = pools.enter_context(arrays.private_pools(_relaxed))
                check(R.cudaStreamBeginCapture(stream.handle, _THREAD_LOCAL), "beginning a capture")
                self._stream = cast(CudaStream, stream)
                body()
                # Before the allocators are restored: their clean-up must not run inside the
                # capture.
                self._stream = None
                template = check(R.cudaStreamEndCapture(stream.handle), "ending a capture")
            if _is_empty(template):
                raise CannotCapture("it queued nothing on the stream that is captured")
            if window is not None:
                for node in _kernels(template):
                    # Before the graph is made executable: that one keeps what its nodes have now.
                    value = l2.packed(window, R.cudaKernelNodeAttrValue)
                    check(R.cudaGraphKernelNodeSetAttribute(node, _WINDOW, value), _SETTING)
            executable = check(R.cudaGraphInstantiate(template, 0), "making a graph executable")
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture(
                why_not_captured(error, (DeviceError, *library_errors()))
            ) from error
        finally:
            if self._stream is not None:
                self._abort(stream)
            if executable is None and template is not None:
                R.cudaGraphDestroy(template)
        graph = CudaGraph(executable, template)
        self._context.frees(graph, _destroy, executable, template, kept)
        return graph

    def _abort(self, stream: Stream) -> None:
        """End a capture that went wrong. Ending an invalidated one reports that."""
        self._stream = None
        error, unfinished = R.cudaStreamEndCapture(stream.handle)
        R.cudaGetLastError()
        if int(error) == 0 and int(unfinished):
            R.cudaGraphDestroy(unfinished)


@contextmanager
def _relaxed() -> Iterator[None]:
    """Allow `cudaMalloc` in the middle of a capture: it is harmless, but refused outside the
    relaxed mode (CUDA Runtime API, cudaThreadExchangeStreamCaptureMode)."""
    relaxed = R.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = check(R.cudaThreadExchangeStreamCaptureMode(relaxed), "relaxing the capture mode")
    try:
        yield
    finally:
        check(R.cudaThreadExchangeStreamCaptureMode(before), "restoring the capture mode")


def _nodes(graph: Any) -> list[tuple[Any, Any]]:
    """The nodes of a graph, each with its type."""
    _, count = check(R.cudaGraphGetNodes(graph, 0), "reading a graph")
    nodes, _ = check(R.cudaGraphGetNodes(graph, count), "reading a graph")
    return [(node, check(R.cudaGraphNodeGetType(node), "reading a graph")) for node in nodes]


def _kernels(graph: Any) -> list[Any]:
    return [
        node for node, kind in _nodes(graph) if kind == R.cudaGraphNodeType.cudaGraphNodeTypeKernel
    ]


def _is_empty(graph: Any) -> bool:
    """True if a graph holds nothing but events: the work went to another stream."""
    idle = (
        R.cudaGraphNodeType.cudaGraphNodeTypeEventRecord,
        R.cudaGraphNodeType.cudaGraphNodeTypeEmpty,
    )
    return all(kind in idle for _, kind in _nodes(graph))


def _destroy(executable: Any, template: Any, pools: object) -> None:
    """Free a graph, and then the pools that its work allocated from, which live in the
    arguments."""
    R.cudaGraphExecDestroy(executable)
    R.cudaGraphDestroy(template)
