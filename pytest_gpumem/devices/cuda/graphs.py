"""Work captured into CUDA graphs, together with the memory that it allocated (CUDA Programming Guide, stream capture)."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import cupy
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import guests
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, check
from pytest_gpumem.devices.cuda.streams import CudaEvent, CudaStream
from pytest_gpumem.devices.protocol import CannotCapture, DeviceError


class CudaGraph:
    """An executable graph. The pools that its work allocated from live as long as it does."""

    def __init__(self, executable: int, pools: tuple[Any, ...]) -> None:
        self.executable = executable
        # Called with the pools as arguments, so that they are let go after the graph; not at exit, when the driver may be gone.
        weakref.finalize(self, _destroy, executable, pools).atexit = False


class Capturing:
    """Captures on one device; knows which stream is being captured."""

    def __init__(self) -> None:
        self._stream: CudaStream | None = None

    def record(self, event: CudaEvent, stream: CudaStream) -> None:
        """Record an event; during a capture as an external node, whose time can be read after every replay."""
        if self._stream is stream:
            check(R.cudaEventRecordWithFlags(event.handle, stream.handle, R.cudaEventRecordExternal), "recording an event in a graph")
        else:
            runtime.eventRecord(event.handle, stream.handle)

    def capture(self, stream: CudaStream, body: Callable[[], None]) -> CudaGraph:
        """Run `body` and keep what it queued on `stream`.

        Raises:
            CannotCapture: with the reason; the stream can be used as before.
        """
        if self._stream is not None:
            raise CannotCapture("another capture is under way")
        pool = cupy.cuda.MemoryPool(_malloc_while_capturing)
        graph = 0
        try:
            with ExitStack() as pools:
                pools.enter_context(cupy.cuda.using_allocator(pool.malloc))
                torch_pool = pools.enter_context(guests.private_torch_pool())
                runtime.streamBeginCapture(stream.handle, runtime.streamCaptureModeThreadLocal)
                self._stream = stream
                body()
                # Before the allocators are put back: what a library does then must not run into the capture.
                graph = self._end(stream)
            if _is_empty(graph):
                raise CannotCapture("it queued nothing on the stream that is captured")
            executable = int(runtime.graphInstantiate(graph))
        except CannotCapture:
            raise
        except Exception as error:
            raise CannotCapture(_reason(error)) from error
        finally:
            if self._stream is not None:
                self._abort(stream)
            if graph:
                runtime.graphDestroy(graph)
        return CudaGraph(executable, (pool, torch_pool))

    def _end(self, stream: CudaStream) -> int:
        self._stream = None
        return int(runtime.streamEndCapture(stream.handle))

    def _abort(self, stream: CudaStream) -> None:
        """End a capture that went wrong. Ending an invalidated one reports that; CuPy clears the error, cuda-bindings' is cleared here."""
        try:
            unfinished = self._end(stream)
        except CUPY_ERRORS:
            unfinished = 0
        R.cudaGetLastError()
        if unfinished:
            runtime.graphDestroy(unfinished)


def replay(graph: CudaGraph, stream: CudaStream) -> None:
    """Queue a graph."""
    runtime.graphLaunch(graph.executable, stream.handle)


def _malloc_while_capturing(nbytes: int) -> Any:
    """`cudaMalloc` in the middle of a capture: harmless, but refused outside the relaxed mode (cudaThreadExchangeStreamCaptureMode)."""
    relaxed = R.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed
    before = check(R.cudaThreadExchangeStreamCaptureMode(relaxed), "relaxing the capture mode")
    try:
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
    finally:
        check(R.cudaThreadExchangeStreamCaptureMode(before), "restoring the capture mode")


def _is_empty(graph: int) -> bool:
    """Whether a graph holds events at most: the work went to another stream."""
    _, count = check(R.cudaGraphGetNodes(graph, 0), "reading a graph")
    nodes, _ = check(R.cudaGraphGetNodes(graph, count), "reading a graph")
    idle = (R.cudaGraphNodeType.cudaGraphNodeTypeEventRecord, R.cudaGraphNodeType.cudaGraphNodeTypeEmpty)
    return all(check(R.cudaGraphNodeGetType(node), "reading a graph") in idle for node in nodes)


def _reason(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text if isinstance(error, (DeviceError, *CUPY_ERRORS)) else f"{type(error).__name__}: {text}"


def _destroy(executable: int, pools: tuple[Any, ...]) -> None:
    with suppress(*CUPY_ERRORS):  # only a lost context refuses, and took the graph with it
        runtime.graphExecDestroy(executable)
