"""Streams and events of one device."""

from __future__ import annotations

from typing import cast
from weakref import WeakSet

import cupy
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import holds
from pytest_gpumem.devices.cuda.allocations import CudaMemory
from pytest_gpumem.devices.cuda.compiler import Compiler
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, failure, translated
from pytest_gpumem.devices.cuda.graphs import CudaGraphs
from pytest_gpumem.devices.cuda.handles import CudaEvent, CudaStream
from pytest_gpumem.devices.protocol import Event, Hold, Stream, Streams


class CudaStreams:
    """Creates streams and events and waits for them. The hold kernel is compiled at the first `hold`."""

    def __init__(self, compiler: Compiler, memory: CudaMemory, graphs: CudaGraphs) -> None:
        self._compiler = compiler
        self._memory = memory
        self._graphs = graphs
        self._holds: holds.Holds | None = None
        self._streams: WeakSet[CudaStream] = WeakSet()

    def create(self) -> Stream:
        with translated("creating a stream"):
            stream = CudaStream()
        self._streams.add(stream)
        return stream

    def defaults(self) -> tuple[Stream, ...]:
        return CudaStream(cupy.cuda.Stream.null), CudaStream(cupy.cuda.Stream.ptds)

    def visible(self) -> tuple[Stream, ...]:
        with translated("asking for the current stream"):
            seen = (*self.defaults(), CudaStream(cupy.cuda.get_current_stream()), *self._streams)
        return tuple({stream.handle: stream for stream in seen}.values())

    def event(self) -> Event:
        with translated("creating an event"):
            return CudaEvent()

    def record(self, event: Event, stream: Stream) -> None:
        try:  # not `translated`: samples repeat it
            self._graphs.record(cast(CudaEvent, event), cast(CudaStream, stream))
        except CUPY_ERRORS as error:
            raise failure(error.status, str(error), "recording an event") from error

    def elapsed(self, start: Event, end: Event) -> float:
        with translated("reading the time between two events"):
            milliseconds = float(runtime.eventElapsedTime(cast(CudaEvent, start).handle, cast(CudaEvent, end).handle))
        # CUDA gives milliseconds in 32 bits, of ticks of 32 ns (H200) or more: below a picosecond there is nothing but longer files.
        return round(milliseconds * 1e-3, 12)

    def synchronize(self, stream: Stream | None = None) -> None:
        with translated("waiting for the device" if stream is None else "waiting for a stream"):
            if stream is None:
                runtime.deviceSynchronize()
            else:
                runtime.streamSynchronize(stream.handle)
        if self._holds is not None:
            self._holds.settle(cast("CudaStream | None", stream))

    def join(self, stream: Stream, other: Stream) -> None:
        try:  # not `translated`: samples repeat it
            mark = cupy.cuda.Event(disable_timing=True)
            runtime.eventRecord(mark.ptr, other.handle)
            # The driver keeps what the wait needs: the event may go at once (CUDA Runtime API, cudaEventDestroy).
            runtime.streamWaitEvent(stream.handle, mark.ptr)
        except CUPY_ERRORS as error:
            raise failure(error.status, str(error), "making a stream wait for another") from error

    def hold(self, stream: Stream, timeout: float) -> Hold:
        with translated("holding a stream"):
            if self._holds is None:
                self._holds = holds.Holds(self._compiler.private(holds.SOURCE, "gpumem_hold"), self._memory)
            return self._holds.hold(cast(CudaStream, stream), timeout)

    def close(self) -> None:
        """Release every held stream."""
        started, self._holds = self._holds, None
        if started is not None:
            started.release_all()


_: type[Streams] = CudaStreams
