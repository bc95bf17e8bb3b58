"""The arguments of a launch.

Sources: CUDA Driver API, cuLaunchKernel (`kernelParams`), cuFuncGetParamInfo and
cuPointerGetAttributes.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.cupti import words
from pytest_gpumem.records.arguments import text

_ATTRIBUTES = (
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
)
_KINDS = {1: "pinned", 2: "device", 3: "array", 4: "managed"}  # CUmemorytype


class Kernel(NamedTuple):
    """A kernel of a launch."""

    name: str  # mangled
    function: int  # CUfunction or CUkernel
    arguments: tuple[str, ...] | None  # as `Step.arguments`; None where they are not known


def read_kernel(name: str, function: int, pointers: int, *, is_kernel: bool) -> Kernel:
    """Return a kernel with its arguments.
    `pointers`: the address `kernelParams` of the launch; 0 where its arguments lie in `extra`,
    which is not read.
    `is_kernel`: `function` is a CUkernel.
    """
    layout = _parameters(function, is_kernel=is_kernel)
    if layout is None or (layout and not pointers):
        return Kernel(name, function, None)
    addresses = words(pointers, len(layout)) if layout else ()
    arguments = []
    for address, (offset, size) in zip(addresses, layout, strict=True):
        arguments.append(text(ctypes.string_at(address, size), offset, memory_at))
    return Kernel(name, function, tuple(arguments))


def _parameters(function: int, *, is_kernel: bool) -> list[tuple[int, int]] | None:
    """Offset and bytes of each parameter of a kernel; None if the driver does not tell them."""
    if is_kernel:
        ask, handle = D.cuKernelGetParamInfo, D.CUkernel(function)
    else:
        ask, handle = D.cuFuncGetParamInfo, D.CUfunction(function)
    parameters: list[tuple[int, int]] = []
    while True:
        try:
            status, offset, size = ask(handle, len(parameters))
        except RuntimeError:  # a driver before CUDA 12.4 lacks the function
            return None
        if status == D.CUresult.CUDA_ERROR_INVALID_VALUE:  # there are no more
            return parameters
        if status != D.CUresult.CUDA_SUCCESS:
            return None
        parameters.append((int(offset), int(size)))


def memory_at(address: int) -> str | None:
    """The kind of CUDA's memory at an address or before it, as an end; None for no memory."""
    for place in (address, address - 1):
        status, values = D.cuPointerGetAttributes(len(_ATTRIBUTES), list(_ATTRIBUTES), place)
        if status == D.CUresult.CUDA_SUCCESS and int(values[0]):
            return "managed" if values[1] else _KINDS.get(int(values[0]), "unknown")
    return None
