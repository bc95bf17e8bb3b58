"""STREAM: copy, mul, add, triad and dot as in BabelStream, read and write (`kernels/stream.cu`).

The first array is written; `read` and `dot` take their small array of sums last. They isolate DRAM
where the footprint is at least 4x L2; below that the figure is partly L2's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pytest_gpumem.kernels.kernel import (
    Access,
    Arrays,
    Call,
    Check,
    Kernel,
    LaunchShape,
    Parameter,
    Reference,
    Role,
    Scalars,
    ceil_div,
    copied,
    filled,
    grid,
    in_element_type,
    module_of,
    same_size,
    scaled,
    touch,
    touch_all,
)
from pytest_gpumem.records.device import DeviceFacts

VECTOR_BYTES = 16  # bytes of a load or store of a thread

MEMORY_LATENCY = 700e-9
"""Seconds from a load to its data under load: what bytes in flight have to bridge (Little's
law)."""

REDUCE_THREADS = 512
REDUCE_VECTORS = {"read": 8, "dot": 4}
"""Loads of each source that a thread of `read` or `dot` issues before it uses the first: eight in
total."""

_SECTION = "STREAM (McCalpin) with BabelStream's arithmetic"


def tile_bytes(kernel: str) -> int:
    """Bytes of each source that a block of `read` or `dot` adds up: 64 KiB or 32 KiB."""
    return REDUCE_THREADS * REDUCE_VECTORS[kernel] * VECTOR_BYTES


def map_shape(facts: DeviceFacts, sources: int) -> tuple[int, int]:
    """Return the threads of a block, and the vectors of each of `sources` arrays that a thread
    reads at once: the fewest with which full SMs keep peak bandwidth x latency bytes in flight."""
    if sources == 0:
        return 512, 2
    # Blocks of 1024 would leave a third of an SM of 1536 threads empty.
    large = 512 if facts.max_threads_per_sm % 1024 else 1024
    in_flight = facts.sm_count * facts.max_threads_per_sm * sources * VECTOR_BYTES
    vectors = 1
    while vectors < 4 and vectors * in_flight < facts.dram_peak * MEMORY_LATENCY:
        vectors *= 2
    return (256 if sources == 1 else large), vectors


def _map(
    name: str,
    written: str,
    sources: tuple[str, ...],
    scalar: Parameter | None,
    reference: Reference,
) -> Kernel:
    """Return a kernel that computes each element of `written` from that of each source."""
    parameters = [Parameter(written, Role.WRITE)]
    parameters += [Parameter(source, Role.READ) for source in sources]
    checks = [same_size(written, *sources)]
    if scalar is not None:
        parameters.append(scalar)
        checks.append(in_element_type(scalar.name))

    def shape(facts: DeviceFacts, call: Call) -> LaunchShape:
        threads, vectors = map_shape(facts, len(sources))
        tiles = ceil_div(call.arrays[written].nbytes, threads * vectors * VECTOR_BYTES)
        return replace(grid(call, tiles, threads), vectors=vectors)

    def launch_arguments(call: Call) -> tuple[str | int, ...]:
        return (*(parameter.name for parameter in parameters), call.arrays[written].size)

    return Kernel(
        name=name,
        parameters=tuple(parameters),
        shape=shape,
        accesses=touch_all(reads=sources, writes=(written,)),
        source="stream.cu",
        entry=f"{name}<{{dtype}}, {{vectors}}>",
        reference=reference,
        launch_arguments=launch_arguments,
        section=f"{_SECTION}: {name.removeprefix('stream_')}",
        checks=tuple(checks),
    )


def _reduce(name: str, sources: tuple[str, ...], terms: Callable[..., Any]) -> Kernel:
    """Return a kernel that gives a sum for each tile of its sources; `sums` may be longer."""
    vectors, tile = REDUCE_VECTORS[name], tile_bytes(name)

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, call.arrays[sources[0]].nbytes // tile, REDUCE_THREADS)

    def accesses(call: Call) -> tuple[Access, ...]:
        tiles = call.arrays[sources[0]].nbytes // tile
        return (
            *(touch(source, "read", call) for source in sources),
            touch("sums", "write", call, elements=tiles),
        )

    def reference(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
        return {"sums": tile_sums([arrays[source] for source in sources], terms, tile)}

    return Kernel(
        name=name,
        parameters=(
            *(Parameter(source, Role.READ) for source in sources),
            Parameter("sums", Role.WRITE),
        ),
        shape=shape,
        accesses=accesses,
        source="stream.cu",
        entry=f"{name}<{{dtype}}, {REDUCE_THREADS}, {vectors}>",
        reference=reference,
        section=f"{_SECTION}: {name}",
        checks=(same_size(*sources), whole_tiles(name, sources[0], tile)),
        # About four times 43 roundings of 6e-8. An average element is six times as much of a sum.
        relative_tolerance=1e-5,
    )


def whole_tiles(kernel: str, source: str, tile: int) -> Check:
    """`source` has whole tiles, and `sums` an element for each, as often as it is read."""

    def check(call: Call) -> str | None:
        array, sums = call.arrays[source], call.arrays["sums"]
        if array.nbytes % tile:
            size = f"{source} has {array.nbytes} bytes, which is no multiple of that"
            return f"{kernel} adds up tiles of {tile} bytes; {size}"
        repeats = int(call.scalars.get("repeats", 1))  # `l2_read` alone has the scalar
        needed = array.nbytes // tile * repeats
        if sums.size < needed:
            given = f"{repeats} sums" if repeats > 1 else "one sum"
            size = f"sums needs {needed} elements, it has {sums.size}"
            return f"{kernel} gives {given} for each {tile} bytes of {source}: {size}"
        return None

    return check


def tile_sums(sources: list[Any], terms: Callable[..., Any], tile: int) -> Any:
    """Return the sums over whole tiles of `terms([source, ...])`: floats in float64 and rounded
    once, integers modulo 2^32 as on the device."""
    dtype = sources[0].dtype
    width = tile // dtype.itemsize
    count = min(source.size for source in sources) // width
    result = module_of(sources[0]).empty(count, dtype=dtype)
    wide = "f8" if dtype.kind == "f" else "i8"
    step = max((1 << 22) // width, 1)  # so that temporaries stay at 32 MiB
    for first in range(0, count, step):
        last = min(first + step, count)
        parts = []
        for source in sources:
            part = source[first * width : last * width]
            parts.append(part.reshape(-1, width).astype(wide))
        result[first:last] = terms(parts).sum(axis=1).astype(dtype)
    return result


def itself(sources: list[Any]) -> Any:
    return sources[0]


def _product(sources: list[Any]) -> Any:
    return sources[0] * sources[1]


def _mul(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    return {"b": scaled(arrays["c"], scalars["s"])}


def _stream_add(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    return {"c": arrays["a"] + arrays["b"]}


def _triad(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    result = scaled(arrays["c"], scalars["s"])
    result += arrays["b"]
    return {"a": result}


# STREAM's scalar, which suits integers too.
_S = Parameter("s", Role.SCALAR, 3.0)

KERNELS = (
    _map("copy", "c", ("a",), None, copied("c", "a")),
    _map("mul", "b", ("c",), _S, _mul),
    _map("stream_add", "c", ("a", "b"), None, _stream_add),
    _map("triad", "a", ("b", "c"), _S, _triad),
    _map("write", "a", (), Parameter("value", Role.SCALAR, 1.0), filled("a")),
    _reduce("read", ("a",), itself),
    _reduce("dot", ("a", "b"), _product),
)
