"""Streams: CuPy's, under the names of the protocol."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime


class CudaStream:
    """A non-blocking stream: it and the legacy default stream do not wait for each other."""

    __slots__ = ("__weakref__", "cupy", "handle")

    def __init__(self, existing: Any = None) -> None:
        self.cupy: Any = cupy.cuda.Stream(non_blocking=True) if existing is None else existing
        self.handle: int = int(self.cupy.ptr)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which cuda.core and CuPy take another library's stream: version and handle."""
        return 0, self.handle

    @property
    def is_legacy_default(self) -> bool:
        """True for the legacy default stream."""
        return self.handle in (0, runtime.streamLegacy)
