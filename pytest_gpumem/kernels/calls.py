"""Pieces that the kernels are put together from: launch shapes, accesses, checks of a call, references, and sectors per request."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from pytest_gpumem.kernels.kernel import Access, Call, LaunchShape
from pytest_gpumem.records.device import DeviceFacts

Shape: TypeAlias = Callable[[DeviceFacts, Call], LaunchShape]  # type of `Kernel.shape`

Check: TypeAlias = Callable[[Call], str | None]  # one of `Kernel.checks`

WARP = 32  # threads of a warp

SECTORS_COALESCED = 4.0
"""32-byte sectors of a warp's request for 32 consecutive, aligned 4-byte words."""

SECTORS_SCATTERED = 32.0  # sectors of a request in which no two threads share one


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def grid(call: Call, default: int, threads: int) -> LaunchShape:
    """The grid that the caller chose, or else the kernel's own; at least one block."""
    return LaunchShape(call.blocks if call.blocks is not None else max(default, 1), threads)


def thread_per_element(name: str, threads: int = 256) -> Shape:
    """One thread to each element of the array `name`: the textbook launch, `(n + threads - 1) / threads` blocks."""

    def shape(_facts: DeviceFacts, call: Call) -> LaunchShape:
        return grid(call, ceil_div(call.arrays[name].size, threads), threads)

    return shape


def touch(
    name: str,
    direction: Literal["read", "write"],
    call: Call,
    *,
    elements: int | None = None,
    requests: int | None = None,
    sectors: float = SECTORS_COALESCED,
    **traits: bool,
) -> Access:
    """An access to `elements` distinct elements of the array `name` (default: all), asked for `requests` times in total (default: once).
    `sectors`: as `Access.sectors_per_request`; `traits`: its flags.
    """
    array = call.arrays[name]
    distinct = array.size if elements is None else elements
    return Access(
        argument=name,
        direction=direction,
        footprint=distinct * array.itemsize,
        requested=(distinct if requests is None else requests) * array.itemsize,
        sectors_per_request=sectors,
        **traits,
    )


# Checks: None, or one sentence that names the values.


def same_size(*names: str) -> Check:
    """The named arrays have the same number of elements."""

    def check(call: Call) -> str | None:
        sizes = [call.arrays[name].size for name in names]
        if len(set(sizes)) == 1:
            return None
        listed = ", ".join(f"{name} has {size}" for name, size in zip(names, sizes, strict=True))
        return f"the arrays must have the same number of elements: {listed}"

    return check


def in_element_type(name: str) -> Check:
    """The scalar `name` is finite and, for integer arrays, an integer that the element type can hold."""

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


Arrays: TypeAlias = Mapping[str, Any]  # arrays of one module, by parameter name

Scalars: TypeAlias = Mapping[str, int | float]  # scalars by parameter name

Reference: TypeAlias = Callable[[Arrays, Scalars], Mapping[str, Any]]  # type of `Kernel.reference`


def module_of(array: Any) -> Any:
    """The module that an array comes from, `numpy` or `cupy`: the array exists, so it has been imported."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def element(value: int | float, array: Any) -> Any:
    """A scalar in an array's element type, as the kernel gets it."""
    return array.dtype.type(value)


def scaled(array: Any, value: int | float) -> Any:
    """A new array with each element times a scalar. By the module's own function: `array * scalar` goes through NumPy in CuPy, whose way
    back imports CuPy's and SciPy's special functions and takes a quarter of a second."""
    return module_of(array).multiply(array, element(value, array))


def filled_like(array: Any, value: int | float) -> Any:
    """A new array of the same size and type, filled with one value."""
    return module_of(array).full(array.shape, element(value, array), dtype=array.dtype)


def requested_bytes(accesses: Sequence[Access]) -> int:
    """Bytes that the threads of one launch ask for, repeats counted: over its time, the bandwidth that caches and memory serve together. It
    equals the compulsory traffic where nothing is asked for twice."""
    return sum(access.requested for access in accesses)


def sectors_per_request(accesses: Sequence[Access]) -> float:
    """Mean sectors of the requests of one launch: 4 if all are coalesced, up to 32. Raises `ValueError`: no access asks for anything."""
    asked = requested_bytes(accesses)
    if not asked:
        raise ValueError(
            "no access asks for a byte: there is no request whose sectors could be counted"
        )
    return sum(access.requested * access.sectors_per_request for access in accesses) / asked
