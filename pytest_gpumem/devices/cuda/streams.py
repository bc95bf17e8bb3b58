"""Streams and events: CuPy's, under the names of the protocol."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime


class CudaStream:
    """A non-blocking stream: it does not wait for the legacy default stream, nor that for it."""

    __slots__ = ("__weakref__", "cupy", "handle")

    def __init__(self, existing: Any = None) -> None:
        self.cupy: Any = cupy.cuda.Stream(non_blocking=True) if existing is None else existing
        self.handle: int = int(self.cupy.ptr)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and handle."""
        return 0, self.handle

    @property
    def is_legacy_default(self) -> bool:
        """Whether it is the legacy default stream."""
        return self.handle in (0, runtime.streamLegacy)


def default_streams() -> tuple[CudaStream, CudaStream]:
    """The legacy default stream and this thread's default stream."""
    return CudaStream(cupy.cuda.Stream.null), CudaStream(cupy.cuda.Stream.ptds)


def current_stream() -> CudaStream:
    """CuPy's current stream."""
    return CudaStream(cupy.cuda.get_current_stream())


class CudaEvent:
    """An event that can be timed."""

    __slots__ = ("cupy", "handle")

    def __init__(self) -> None:
        self.cupy: Any = cupy.cuda.Event()
        self.handle: int = int(self.cupy.ptr)


def elapsed(start: CudaEvent, end: CudaEvent) -> float:
    """Seconds between two completed events. Raises CuPy's error if one is not complete."""
    # CUDA gives milliseconds in 32 bits, of ticks of 32 ns (H200) or more: below a picosecond there is nothing but longer files.
    return round(float(runtime.eventElapsedTime(start.handle, end.handle)) * 1e-3, 12)
