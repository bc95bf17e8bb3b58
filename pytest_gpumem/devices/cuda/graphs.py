"""Work captured into CUDA graphs, together with the memory that it allocated (CUDA Programming Guide, stream capture)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, cast

import cupy
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.checks import check_window, why_not_captured
from pytest_gpumem.devices.cuda import l2
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, check, translated
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.protocol import CannotCapture, DeviceError, Graph, Stream, WindowSpec
from pytest_gpumem.records.device import DeviceFacts

_WINDOW = R.cudaKernelNodeAttrID.cudaLaunchAttributeAccessPolicyWindow
_SETTING = "setting the access-policy window of a graph's kernel"


class CudaGraph:
    """An executable graph, and the graph that it was made from, which alone can be asked for its nodes' attributes. The pools that its work
    allocated from live as long as it does."""

    def __init__(self, executable: int, template: int, pools: tuple[Any, ...]) -> None:
        self.executable = executable
        self.template = template
        # Called with the pools as arguments, so that they are let go after the graph; not at exit, when the driver may be gone.
        weakref.finalize(self, _destroy, executable, template, pools).atexit = False


class CudaGraphs:
    """Captures on one device; knows which stream is being captured."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._stream: CudaStream | None = None

    def record(self, event: Any, stream: CudaStream) -> None:
        """Record an event of CuPy's; during a capture as an external node, whose time can be read after every replay."""
        if self._stream is stream:
            check(
                R.cudaEventRecordWithFlags(event.ptr, stream.handle, R.cudaEventRecordExternal),
                "recording an event in a graph",
            )
        else:
            runtime.eventRecord(event.ptr, stream.handle)

    def replay(self, graph: Graph, stream: Stream) -> None:
        if self._stream is not None:  # a graph within a graph would have to be made a node
            raise CannotCapture("it replays a graph")
        with translated("replaying a graph"):
            runtime.graphLaunch(cast(CudaGraph, graph).executable, stream.handle)

    def windows(self, graph: Graph) -> tuple[WindowSpec | None, ...]:
        reading = "reading the access-policy window of a graph's kernel"
        nodes = _kernels(cast(CudaGraph, graph).template)
        return tuple(
            l2.unpacked(check(R.cudaGraphKernelNodeGetAttribute(node, _WINDOW), reading))
            for node in nodes
        )

    def capture(
        self, stream: Stream, body: Callable[[], None], *, window: WindowSpec | None = None
    ) -> CudaGraph:
        if window is not None:
            check_window(window, self._facts)
        if self._stream is not None:
            raise CannotCapture("another capture is under way")
        pool = cupy.cuda.MemoryPool(_malloc_while_capturing)
        graph = 0
        try:
            with ExitStack() as pools:
                pools.enter_context(cupy.cuda.using_allocator(pool.malloc))
                torch_pool = pools.enter_context(arrays.private_torch_pool())
                runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeThreadLocal)
                self._stream = cast(CudaStream, stream)
                body()
                # Before the allocators are restored: their clean-up must not run inside the capture.
                graph = self._end(stream)
            if _is_empty(graph):
                raise CannotCapture("it queued nothing on the stream that is captured")
            if window is not None:
                for node in _kernels(graph):
                    # Before the graph is made executable: that one keeps what its nodes have now.
                    check(
                        R.cudaGraphKernelNodeSetAttribute(
                            node, _WINDOW, l2.packed(window, R.cudaKernelNodeAttrValue)
                        ),
                        _SETTING,
                    )
            executable = int(runtime.graphInstantiate(graph))
            template, graph = graph, 0
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture(why_not_captured(error, (DeviceError, *CUPY_ERRORS))) from error
        finally:
            if self._stream is not None:
                self._abort(stream)
            if graph:
                runtime.graphDestroy(graph)
        return CudaGraph(executable, template, (pool, torch_pool))

    def _end(self, stream: Stream) -> int:
        self._stream = None
        return int(runtime.streamEndCapture(stream.handle))

    def _abort(self, stream: Stream) -> None:
        """End a capture that went wrong. Ending an invalidated one reports that; CuPy clears the error, cuda-bindings' is cleared here."""
        try:
            unfinished = self._end(stream)
        except CUPY_ERRORS:
            unfinished = 0
        R.cudaGetLastError()
        if unfinished:
            runtime.graphDestroy(unfinished)


def _malloc_while_capturing(nbytes: int) -> Any:
    """`cudaMalloc` in the middle of a capture: harmless, but refused outside the relaxed mode (cudaThreadExchangeStreamCaptureMode)."""
    relaxed = R.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = check(R.cudaThreadExchangeStreamCaptureMode(relaxed), "relaxing the capture mode")
    try:
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    finally:
        check(R.cudaThreadExchangeStreamCaptureMode(before), "restoring the capture mode")


def _nodes(graph: int) -> list[tuple[Any, Any]]:
    """The nodes of a graph, each with its type."""
    _, count = check(R.cudaGraphGetNodes(graph, 0), "reading a graph")
    nodes, _ = check(R.cudaGraphGetNodes(graph, count), "reading a graph")
    return [(node, check(R.cudaGraphNodeGetType(node), "reading a graph")) for node in nodes]


def _kernels(graph: int) -> list[Any]:
    return [
        node for node, kind in _nodes(graph) if kind == R.cudaGraphNodeType.cudaGraphNodeTypeKernel
    ]


def _is_empty(graph: int) -> bool:
    """True if a graph holds nothing but events: the work went to another stream."""
    idle = (
        R.cudaGraphNodeType.cudaGraphNodeTypeEventRecord,
        R.cudaGraphNodeType.cudaGraphNodeTypeEmpty,
    )
    return all(kind in idle for _, kind in _nodes(graph))


def _destroy(executable: int, template: int, pools: tuple[Any, ...]) -> None:
    with suppress(*CUPY_ERRORS):  # only a lost context refuses, and took the graphs with it
        runtime.graphExecDestroy(executable)
        runtime.graphDestroy(template)
