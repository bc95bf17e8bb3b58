"""Shapes and element types of buffers, and how much may be page-locked: a host without free pages
stalls (CUDA C++ Best Practices Guide, 9.1.1)."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Device, OutOfMemory
from pytest_gpumem.units import QuantityError, ShownError, format_bytes, parse_bytes, short_bytes

Shape = int | str | Sequence[int]
"""Bytes, as an integer or as "64 MiB"; or elements, as a tuple."""


class BadBuffer(ShownError, ValueError):
    """A buffer that cannot be: wrong size, type or kind."""


def parse_shape(shape: Shape, dtype: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    try:
        element = np.dtype(dtype)
    except TypeError:
        raise BadBuffer(f"dtype {dtype!r} is no element type such as 'f4'") from None
    check_plain(element)
    if isinstance(shape, str):
        try:
            shape = parse_bytes(shape)
        except QuantityError as error:
            raise BadBuffer(f"size {error}") from None
    if isinstance(shape, bool) or not isinstance(shape, (int, np.integer, tuple, list)):
        accepted = 'a number of bytes, a text such as "64 MiB", or a tuple of elements'
        raise BadBuffer(f"a size is {accepted}, not {shape!r}")
    if isinstance(shape, (int, np.integer)):
        if shape <= 0:
            raise BadBuffer(f"a buffer needs at least one element; {shape} bytes requested")
        if shape % element.itemsize:
            elements = f"{element.itemsize}-byte elements ({element})"
            raise BadBuffer(f"{shape} bytes do not hold a whole number of {elements}")
        return (int(shape) // element.itemsize,), element
    for count in shape or (0,):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count <= 0:
            raise BadBuffer(f"a shape is a tuple of positive integers, not {tuple(shape)!r}")
    return tuple(int(count) for count in shape), element


def check_plain(element: np.dtype[Any]) -> None:
    if element.kind not in "biufc" or not element.isnative:
        accepted = "it takes numbers in the machine's byte order"
        raise BadBuffer(f"dtype {element} cannot live in a buffer: {accepted}")


SHARE = 0.5  # of the RAM that the process may use, that may be page-locked


def check_cap(device: Device, nbytes: int) -> None:
    total, locked = device.memory.host()
    cap = int(SHARE * total)
    if locked + nbytes <= cap:
        return
    size = f"{format_bytes(nbytes)} of page-locked memory"
    if locked:
        size += f" beside {format_bytes(locked)} that are locked already"
    raise OutOfMemory(
        f"{size} pass the cap of {short_bytes(cap)}, half of the host's "
        f"{short_bytes(total)}: ask for less"
    )


def touch(array: np.ndarray[Any, Any]) -> None:
    """Write to each page of an array, so that it exists: unwritten pages are all read from a single
    page of zeros, as if the link were faster."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = flat[:: mmap.PAGESIZE]
    flat[-1:] = flat[-1:]
