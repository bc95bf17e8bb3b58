"""What fields of a `Kernel` are made of: launch shapes, accesses, checks and references."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pytest_gpumem.kernels.kernel import Access, Call, LaunchShape, Reference
from pytest_gpumem.records.device import DeviceFacts

ShapeOf: TypeAlias = Callable[[DeviceFacts, Call], LaunchShape]
Accesses: TypeAlias = Callable[[Call], tuple[Access, ...]]
Check: TypeAlias = Callable[[Call], str | None]  # None, or one sentence that names the values
Direction: TypeAlias = Literal["read", "write"]
Arrays: TypeAlias = Mapping[str, Any]  # arrays of a module, by parameter name
Scalars: TypeAlias = Mapping[str, int | float]  # by parameter name

WARP = 32  # threads
SECTORS_COALESCED = 4.0
"""32-byte sectors of a warp's request for 32 consecutive, aligned 4-byte words."""
SECTORS_SCATTERED = 32.0  # sectors of a request in which no two threads share one


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def grid(call: Call, default: int, threads: int) -> LaunchShape:
    """Return the grid that the caller chose, or `default` blocks and at least one."""
    if call.blocks is not None:
        return LaunchShape(call.blocks, threads)
    return LaunchShape(max(default, 1), threads)


def enough_threads(count: Callable[[Call], int], threads: int = 256) -> ShapeOf:
    """At least `count` threads, in blocks of `threads`."""

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, ceil_div(count(call), threads), threads)

    return shape


def thread_per_element(name: str, threads: int = 256) -> ShapeOf:
    """One thread to each element of the array `name`: the textbook launch."""

    def size(call: Call) -> int:
        return call.arrays[name].size

    return enough_threads(size, threads)


def touch(
    name: str,
    direction: Direction,
    call: Call,
    *,
    elements: int | None = None,
    requests: int | None = None,
    sectors: float = SECTORS_COALESCED,
    **traits: bool,
) -> Access:
    """Return the access to an array. `elements`: how many distinct ones are touched (default: all).
    `requests`: how often threads ask for one (default: once each). `sectors`: as
    `Access.sectors_per_request`. `traits`: flags of `Access`."""
    array = call.arrays[name]
    if elements is None:
        elements = array.size
    if requests is None:
        requests = elements
    return Access(
        argument=name,
        direction=direction,
        footprint=elements * array.itemsize,
        requested=requests * array.itemsize,
        sectors_per_request=sectors,
        **traits,
    )


def touch_all(reads: Sequence[str], writes: Sequence[str]) -> Accesses:
    """The accesses of a kernel that touches each element of these arrays once."""

    def accesses(call: Call) -> tuple[Access, ...]:
        touched = [touch(name, "read", call) for name in reads]
        touched += [touch(name, "write", call) for name in writes]
        return tuple(touched)

    return accesses


def same_size(*names: str) -> Check:
    def check(call: Call) -> str | None:
        sizes = [call.arrays[name].size for name in names]
        if len(set(sizes)) == 1:
            return None
        listed = ", ".join(f"{name} has {size}" for name, size in zip(names, sizes, strict=True))
        return f"the arrays must have the same number of elements: {listed}"

    return check


def in_element_type(name: str) -> Check:
    """The scalar `name` is finite and, for integer arrays, an integer that the element type can
    hold."""

    def check(call: Call) -> str | None:
        value = call.scalars[name]
        array = next(iter(call.arrays.values()))
        if not math.isfinite(value):
            return f"{name} is {value}; a finite number is needed"
        if array.dtype.startswith("i"):
            limit = 2 ** (8 * array.itemsize - 1)
            if value != int(value) or not -limit <= value < limit:
                return f"{name} is {value}, which arrays of {array.dtype} cannot hold"
        return None

    return check


def module_of(array: Any) -> Any:
    """The module of an array, `numpy` or `cupy`."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def element(value: int | float, array: Any) -> Any:
    """A scalar in an array's element type, as the kernel gets it."""
    return array.dtype.type(value)


def scaled(array: Any, value: int | float) -> Any:
    # In CuPy `array * scalar` imports SciPy, which takes a quarter of a second.
    return module_of(array).multiply(array, element(value, array))


def filled_like(array: Any, value: int | float) -> Any:
    return module_of(array).full(array.shape, element(value, array), dtype=array.dtype)


def copied(destination: str, source: str) -> Reference:
    """The expected result of a copy."""

    def reference(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
        return {destination: arrays[source].copy()}

    return reference


def filled(name: str) -> Reference:
    """The expected result of filling an array with the scalar `value`."""

    def reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
        return {name: filled_like(arrays[name], scalars["value"])}

    return reference


def requested_bytes(accesses: Sequence[Access]) -> int:
    return sum(access.requested for access in accesses)


def sectors_per_request(accesses: Sequence[Access]) -> float:
    """Return the mean sectors of the requests of a launch: 4 if all are coalesced, up to 32."""
    requested = requested_bytes(accesses)
    if not requested:
        raise ValueError("no access asks for a byte: no request has sectors")
    return sum(access.requested * access.sectors_per_request for access in accesses) / requested
