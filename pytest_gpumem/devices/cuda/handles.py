"""Streams and events by cuda-bindings, under the names of the protocol. The context frees them
(`context.Context.frees`)."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.context import Context
from pytest_gpumem.devices.cuda.errors import check

LEGACY_DEFAULT, PER_THREAD_DEFAULT = 1, 2
"""Handles of the default streams: `cudaStreamLegacy`, `cudaStreamPerThread`."""


class CudaStream:
    """A stream by its handle: an own one, or one that somebody else has made and frees."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and
        handle."""
        return 0, self.handle

    @property
    def is_legacy_default(self) -> bool:
        """True for the legacy default stream."""
        return self.handle in (0, LEGACY_DEFAULT)


class CudaEvent:
    """An event by its handle."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Any) -> None:
        self.handle = handle


def new_stream(context: Context) -> CudaStream:
    """A non-blocking stream: it and the legacy default stream do not wait for each other."""
    handle = check(R.cudaStreamCreateWithFlags(R.cudaStreamNonBlocking), "creating a stream")
    stream = CudaStream(int(handle))
    context.frees(stream, R.cudaStreamDestroy, handle)
    return stream


def new_event(context: Context, *, timing: bool = True) -> CudaEvent:
    """An event, which can be timed unless `timing` is False."""
    flags = R.cudaEventDefault if timing else R.cudaEventDisableTiming
    event = CudaEvent(check(R.cudaEventCreateWithFlags(flags), "creating an event"))
    context.frees(event, R.cudaEventDestroy, event.handle)
    return event
