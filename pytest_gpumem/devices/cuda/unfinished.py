"""A query for unfinished work on the streams that code uses without naming one. It waits for
nothing and makes no context.

Sources: CUDA Driver API, cuStreamQuery, cuStreamIsCapturing, cuCtxGetCurrent; Stream
synchronization behavior.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cuda.bindings import driver as D  # noqa: N812

_NOT_READY = int(D.CUresult.CUDA_ERROR_NOT_READY)


def unfinished() -> bool | None:
    """True if work waits on the legacy default stream, this thread's default stream, or the current
    stream of a library; None without a context. A stream that is captured is not asked: that would
    end the capture."""
    error, context = D.cuCtxGetCurrent()
    if int(error) or not int(context):
        return None
    return any(
        _pending(stream)
        for stream in {int(D.CU_STREAM_LEGACY), int(D.CU_STREAM_PER_THREAD), *_current()}
    )


def _pending(stream: int) -> bool:
    error, status = D.cuStreamIsCapturing(stream)
    if int(error) or int(status):
        return False
    (error,) = D.cuStreamQuery(stream)
    return int(error) == _NOT_READY


def _current() -> Iterator[int]:
    """The current streams of the libraries that are in use."""
    torch, cupy = (getattr(sys.modules.get(name), "cuda", None) for name in ("torch", "cupy"))
    if torch is not None and torch.is_initialized():
        yield int(torch.current_stream().cuda_stream)
    if cupy is not None:
        yield int(cupy.get_current_stream().ptr)
