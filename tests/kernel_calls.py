"""What the kernels' tests share: calls and facts built from NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pytest_gpumem.kernels.kernel import ArrayFacts, Call, Kernel, Role
from pytest_gpumem.kernels.stream import tile_bytes

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB


VECTORS = (1, 2, 4)
"""Vectors that a thread may handle at once, where a kernel's entry leaves it to the launch shape."""
REPEATS = 3
"""Passes of `l2_read` that its array of sums has room for."""


SCALARS = {
    "offset_copy": {"offset": 5},
    "stride_copy": {"stride": 3},
    "chase": {"steps": 77},
    "chase_l1": {"steps": 77},
    "chase_onward": {"steps": 77},
    "elementwise": {"rounds": 2},
}
"""Scalars that a kernel's test gives it besides those that have a default."""


def fitting(name: str, arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    """Scalars that arrays made by `arguments_of` decide."""
    if name == "l2_read":
        return {"repeats": REPEATS}
    if name.startswith("transpose"):
        size = arrays["idata"].size
        width = next((w for w in MATRIX_WIDTHS if size % w == 0), size)
        return {"width": width, "height": size // width}
    return {}


MATRIX_WIDTHS = (150, 7)
"""More than two tiles and a rest, and less than a tile."""


def vector_counts(kernel: Kernel) -> tuple[int, ...]:
    """Every `LaunchShape.vectors` that a kernel is compiled for."""
    return VECTORS if "{vectors}" in kernel.entry else (1,)


def call_of(
    kernel: Kernel,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    blocks: int | None = None,
    **scalars: float,
) -> Call:
    """The call of a kernel on these arrays, defaults filled in."""
    facts = {name: ArrayFacts(a.size, a.dtype.str[1:], a.itemsize) for name, a in arrays.items()}
    scalars = {**fitting(kernel.name, arrays), **scalars}
    given: dict[str, Any] = {
        p.name: scalars.get(p.name, p.default) for p in kernel.parameters if p.role is Role.SCALAR
    }
    return Call(facts, given, blocks)


def sized(dtype: str = "f4", /, **sizes: int) -> dict[str, ArrayFacts]:
    """Facts of arrays of these sizes in elements."""
    return {name: ArrayFacts(size, dtype, np.dtype(dtype).itemsize) for name, size in sizes.items()}


def called(result: tuple[Any, ...]) -> Any:
    """The value of an NVRTC call, whose first is an error code."""
    status, *values = result
    assert status.name == "NVRTC_SUCCESS", status
    return values[0] if values else None


def random_array(rng: np.random.Generator, size: int, dtype: str) -> np.ndarray[Any, Any]:
    """Content as buffers hold it: floats uniform in [0, 1), integers over their full range."""
    if dtype.startswith("f"):
        return rng.random(size).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, size, dtype=dtype, endpoint=True)


def cycle(rng: np.random.Generator, nodes: int, words: int = 16) -> np.ndarray[Any, Any]:
    """One random cycle over nodes of `words` 4-byte words; the words after the index are junk."""
    order = rng.permutation(nodes)
    content = rng.integers(-(2**31), 2**31, nodes * words, dtype="i4")
    content[order * words] = np.roll(order, -1)
    return content


def arguments_of(
    name: str, size: int, dtype: str, rng: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays for a kernel of the catalogue whose largest has about `size` elements; awkward where the kernel allows it."""
    width = np.dtype(dtype).itemsize
    if name in ("read", "dot"):
        tile = tile_bytes(name) // width
        size = -(-size // tile) * tile
        sources = ("a",) if name == "read" else ("a", "b")
        return {
            **{s: random_array(rng, size, dtype) for s in sources},
            "sums": random_array(rng, size // tile, dtype),
        }
    if name == "l2_read":
        tiles = -(-size // 1024)
        return {
            "a": random_array(rng, tiles * 1024, dtype),
            "sums": random_array(rng, tiles * REPEATS, dtype),
        }
    if name.startswith("transpose"):
        width = next((w for w in MATRIX_WIDTHS if size >= 10 * w), 7)
        size = max(size // width, 1) * width
        return {"odata": random_array(rng, size, dtype), "idata": random_array(rng, size, dtype)}
    if name.startswith("chase"):
        return {"nodes": cycle(rng, max(size // 16, 1)), "out": random_array(rng, 1, "i4")}
    sizes: dict[str, dict[str, int]] = {
        "copy": {"c": size, "a": size},
        "mul": {"b": size, "c": size},
        "stream_add": {"c": size, "a": size, "b": size},
        "triad": {"a": size, "b": size, "c": size},
        "write": {"a": size},
        "reset_data": {"data_streaming": size, "lut_persistent": size // 3 + 1},
        "reset_data_shared": {"data_streaming": size, "lut_persistent": size // 3 + 1},
        "sliding_window": {"data_persistent": size // 3 + 1, "data_streaming": size},
        "add": {"x": size, "y": size},
        "init": {"x": size},
        "init_warp_per_page": {"x": size},
        "offset_copy": {"odata": size, "idata": size},
        "stride_copy": {"odata": size, "idata": size},
        "permuted_copy": {"odata": size, "idata": size},
        "memcpy": {"destination": size, "source": size},
        "elementwise": {"x": size},
        "reread": {"y": size, "x": size},
    }
    return {parameter: random_array(rng, n, dtype) for parameter, n in sizes[name].items()}
