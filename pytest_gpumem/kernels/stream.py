"""STREAM: copy, mul, add, triad and dot with BabelStream's arithmetic, and the one-way read and write (`kernels/stream.cu`).

The first array is the one that is written; `read` and `dot` take their small array of sums last. They isolate DRAM where the
footprint is at least 4x L2; below that the figure is partly L2's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytest_gpumem.kernels.arrays import Arrays, Reference, Scalars, element, filled_like, module_of
from pytest_gpumem.kernels.calls import WARP, Check, all_of, ceil_div, grid, in_element_type, same_size, touch, typed
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.records.device import DeviceFacts

VECTOR_BYTES = 16
"""Bytes of one load or store of a thread."""

LOADS_IN_FLIGHT = {"write": 0, "copy": 4, "mul": 4, "stream_add": 4, "triad": 4, "read": 8, "dot": 8}
"""Independent 16-byte loads that one thread issues before it uses the first."""

_THREADS = 256
_DTYPES = ("f4", "f8", "i4")
_SECTION = "STREAM (McCalpin) with BabelStream's arithmetic"


def tile_bytes(kernel: str) -> int:
    """Bytes of each source that one warp of `read` or `dot` adds up: 4 KiB or 2 KiB."""
    return WARP * _vectors(kernel, {"read": 1, "dot": 2}[kernel]) * VECTOR_BYTES


def _vectors(name: str, sources: int) -> int:
    """Vectors of each array that one thread handles in a tile; `write` has no loads and stores four."""
    return LOADS_IN_FLIGHT[name] // sources if sources else 4


def _map(name: str, written: str, sources: tuple[str, ...], scalar: Parameter | None, reference: Reference) -> Kernel:
    """A kernel that computes each element of `written` from the same element of each source."""
    vectors = _vectors(name, len(sources))
    arrays = (written, *sources)
    scalars = () if scalar is None else (scalar,)

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, ceil_div(call.arrays[written].nbytes, _THREADS * vectors * VECTOR_BYTES), _THREADS)

    def accesses(call: Call) -> tuple[Access, ...]:
        return (*(touch(source, "read", call) for source in sources), touch(written, "write", call))

    def launch_arguments(call: Call) -> tuple[str | int, ...]:
        return (*arrays, *(s.name for s in scalars), call.arrays[written].size)

    return Kernel(
        name=name,
        parameters=(
            Parameter(written, Role.WRITE),
            *(Parameter(source, Role.READ) for source in sources),
            *scalars,
        ),
        shape=shape,
        accesses=accesses,
        source="stream.cu",
        entry=f"{name}<{{dtype}}, {vectors}>",
        reference=reference,
        launch_arguments=launch_arguments,
        dtypes=_DTYPES,
        section=f"{_SECTION}: {name.removeprefix('stream_')}",
        loads_in_flight=max(LOADS_IN_FLIGHT[name], 1),
        check=all_of(typed(_DTYPES), same_size(*arrays), *(in_element_type(s.name) for s in scalars)),
        relative_tolerance=0.0,
    )


def _reduce(name: str, sources: tuple[str, ...], terms: Callable[..., Any]) -> Kernel:
    """A kernel that gives one sum for each tile of its sources.

    A tile's sum needs that tile alone, so the sums of a prefix are a prefix of the sums; `sums` may be longer than that. In float it
    takes at most 32 additions in a thread, 5 across the warp and a product: 38 roundings of 6e-8 relative to the sum of magnitudes,
    2.3e-6 for the non-negative data that buffers hold. The tolerance of 1e-5 is four times that, and a hundredth of 1/1024, one
    average element's share of a tile's sum.
    """
    vectors = _vectors(name, len(sources))
    tile = WARP * vectors * VECTOR_BYTES

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, ceil_div(call.arrays[sources[0]].nbytes // tile, _THREADS // WARP), _THREADS)

    def accesses(call: Call) -> tuple[Access, ...]:
        tiles = call.arrays[sources[0]].nbytes // tile
        return (*(touch(source, "read", call) for source in sources), touch("sums", "write", call, elements=tiles))

    def launch_arguments(call: Call) -> tuple[str | int, ...]:
        return (*sources, "sums", call.arrays[sources[0]].size)

    def reference(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
        return {"sums": _tile_sums([arrays[source] for source in sources], terms, tile)}

    return Kernel(
        name=name,
        parameters=(*(Parameter(source, Role.READ) for source in sources), Parameter("sums", Role.WRITE)),
        shape=shape,
        accesses=accesses,
        source="stream.cu",
        entry=f"{name}<{{dtype}}, {vectors}>",
        reference=reference,
        launch_arguments=launch_arguments,
        dtypes=_DTYPES,
        section=f"{_SECTION}: {name}",
        loads_in_flight=LOADS_IN_FLIGHT[name],
        check=all_of(typed(_DTYPES), same_size(*sources), _whole_tiles(name, sources[0], tile)),
        relative_tolerance=1e-5,
    )


def _whole_tiles(kernel: str, source: str, tile: int) -> Check:
    def check(call: Call) -> str | None:
        array, sums = call.arrays[source], call.arrays["sums"]
        if array.nbytes % tile:
            return f"{kernel} adds up tiles of {tile} bytes; {source} has {array.nbytes} bytes, which is no multiple of that"
        needed = array.nbytes // tile
        if sums.size < needed:
            return f"{kernel} gives one sum for each {tile} bytes of {source}: sums needs {needed} elements, it has {sums.size}"
        return None

    return check


def _tile_sums(sources: list[Any], terms: Callable[..., Any], tile: int) -> Any:
    """Sums over the sources' whole tiles: floats in float64 and rounded once, integers modulo 2^32 as on the device."""
    dtype = sources[0].dtype
    width = tile // dtype.itemsize
    count = min(source.size for source in sources) // width
    result = module_of(sources[0]).empty(count, dtype=dtype)
    wide = "f8" if dtype.kind == "f" else "i8"
    step = max((1 << 22) // width, 1)  # so that temporaries stay at 32 MiB
    for first in range(0, count, step):
        last = min(first + step, count)
        parts = [source[first * width : last * width].reshape(-1, width).astype(wide) for source in sources]
        result[first:last] = terms(*parts).sum(axis=1).astype(dtype)
    return result


def _copy(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    return {"c": arrays["a"].copy()}


def _mul(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    return {"b": arrays["c"] * element(scalars["s"], arrays["c"])}


def _stream_add(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    return {"c": arrays["a"] + arrays["b"]}


def _triad(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    result = arrays["c"] * element(scalars["s"], arrays["c"])
    result += arrays["b"]
    return {"a": result}


def _write(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    return {"a": filled_like(arrays["a"], scalars["value"])}


# BabelStream's scalar is 0.4; 3 is STREAM's own, and an integer array can be scaled by it too.
_S = Parameter("s", Role.SCALAR, 3.0)

KERNELS = (
    _map("copy", "c", ("a",), None, _copy),
    _map("mul", "b", ("c",), _S, _mul),
    _map("stream_add", "c", ("a", "b"), None, _stream_add),
    _map("triad", "a", ("b", "c"), _S, _triad),
    _map("write", "a", (), Parameter("value", Role.SCALAR, 1.0), _write),
    _reduce("read", ("a",), lambda a: a),
    _reduce("dot", ("a", "b"), lambda a, b: a * b),
)
