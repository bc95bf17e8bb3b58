"""The operations. CuPy is imported at the first call, so that the package can be imported without a GPU."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from pixelbox.layout import place

THREADS = 256


def brighten(out: Any, image: Any, factor: float) -> None:
    """out = factor * image, for arrays of float32."""
    _elementwise("float32 x, float32 factor", "float32 y", "y = factor * x", "brighten")(
        image, factor, out
    )


def blend(out: Any, a: Any, b: Any, share: float) -> None:
    """out = a + share * (b - a), for arrays of float32."""
    _elementwise(
        "float32 a, float32 b, float32 share", "float32 y", "y = a + share * (b - a)", "blend"
    )(a, b, share, out)


def channel(out: Any, image: Any, index: int) -> None:
    """Copy one channel of an image of float32, whose layout `layout.place` knows, into an array of as many pixels."""
    first, step = place(index, out.size)
    _channel()(
        ((out.size + THREADS - 1) // THREADS,), (THREADS,), (out, image, first, step, out.size)
    )


@lru_cache
def _elementwise(arguments: str, results: str, operation: str, name: str) -> Any:
    import cupy

    return cupy.ElementwiseKernel(arguments, results, operation, name)


@lru_cache
def _channel() -> Any:
    import cupy

    return cupy.RawKernel((Path(__file__).parent / "kernels.cu").read_text(), "channel")
