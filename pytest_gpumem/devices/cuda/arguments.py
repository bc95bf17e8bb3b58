"""The arguments of a launch: where they lie, and which of their words are addresses of live memory.

Sources: CUDA Driver API, cuLaunchKernel (`kernelParams`, and `extra` with CU_LAUNCH_PARAM_BUFFER_POINTER and ..._SIZE) and
cuPointerGetAttributes; mincore(2).
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from functools import cache

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.cupti import words
from pytest_gpumem.records.arguments import Interval

_BUFFER_POINTER, _BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_...; CU_LAUNCH_PARAM_END is 0
_MOST_EXTRA = 8  # entries of `extra` that are read
_ATTRIBUTES = (
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
)
LEAST_HOST_ADDRESS = 2**40
"""A number that is a size or a stride is smaller, and no program, library, heap or stack of a 64-bit process lies lower."""


def block_of(parameters: Sequence[tuple[int, int]], pointers: int, extra: int) -> bytes | None:
    """The block of parameters as the kernel reads it, with zeros between them; None if the call does not give it.
    `parameters`: offset and bytes of each.
    `pointers`, `extra`: the addresses `kernelParams` and `extra` of the launch.
    """
    block = bytearray(max((offset + size for offset, size in parameters), default=0))
    if not parameters:
        return b""
    if pointers:
        for address, (offset, size) in zip(
            words(pointers, len(parameters)), parameters, strict=True
        ):
            block[offset : offset + size] = ctypes.string_at(address, size)
        return bytes(block)
    buffer = _buffer(extra) if extra else None
    if buffer is None or len(buffer) < len(block):
        return None
    for offset, size in parameters:
        block[offset : offset + size] = buffer[offset : offset + size]
    return bytes(block)


def _buffer(extra: int) -> bytes | None:
    """The arguments that `extra` has in one buffer."""
    found: dict[int, int] = {}
    for index in range(_MOST_EXTRA):
        (key,) = words(extra + 16 * index, 1)
        if key not in (_BUFFER_POINTER, _BUFFER_SIZE):
            break
        (found[key],) = words(extra + 16 * index + 8, 1)
    if len(found) < 2:
        return None
    (size,) = words(found[_BUFFER_SIZE], 1)
    return ctypes.string_at(found[_BUFFER_POINTER], size)


def live_memory(address: int) -> Interval | None:
    """The memory that an address lies in: an allocation that CUDA knows, or else a page of the host; None for no memory."""
    status, found = D.cuPointerGetAttributes(len(_ATTRIBUTES), list(_ATTRIBUTES), address)
    if int(status) == 0 and int(found[0]):
        begin, size = int(found[1] or 0), int(found[2] or 0)
        return (
            Interval(begin, begin + size)
            if begin <= address < begin + size
            else Interval(address, address + 1)
        )
    if address < LEAST_HOST_ADDRESS or address >= 2**56 or not sys.platform.startswith("linux"):
        return None
    page = address - address % mmap.PAGESIZE
    resident = ctypes.c_ubyte()
    if _libc().mincore(ctypes.c_void_p(page), ctypes.c_size_t(1), ctypes.byref(resident)):
        return None
    return Interval(page, page + mmap.PAGESIZE, host=True)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
