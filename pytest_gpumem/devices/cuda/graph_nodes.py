"""The arguments of kernels in launches and in CUDA graphs.

A launch of a graph has no arguments: its nodes have, and a library may destroy the graph once it is
made executable. So calls that make and change executable graphs are followed, all of them rare, and
the nodes are read at once.
Sources: CUDA Driver API, cuLaunchKernel (`kernelParams`), cuFuncGetParamInfo,
cuPointerGetAttributes; Graph Management: cuGraphKernelNodeGetParams, CUDA_KERNEL_NODE_PARAMS, and
the parameters of the calls in `CALLS`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.cupti import words
from pytest_gpumem.records.arguments import text

_ATTRIBUTES = (
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
)
_MEMORY_TYPES = {1: "pinned", 2: "device", 3: "array", 4: "managed"}  # CUmemorytype
_MADE = (
    "cuGraphInstantiate",
    "cuGraphInstantiate_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphInstantiateWithParams",
    "cuGraphInstantiateWithParams_ptsz",
)
"""Calls whose first parameter is the address of the new executable graph, the second the graph."""
_UPDATED = ("cuGraphExecUpdate", "cuGraphExecUpdate_v2")
"""Calls whose first parameter is the executable graph, and whose second the new graph."""
_LOST = (
    "cuGraphExecDestroy",
    "cuGraphExecNodeSetParams",
    "cuGraphExecKernelNodeSetParams",
    "cuGraphExecKernelNodeSetParams_v2",
)
"""Calls after which the nodes of the executable graph are not known."""
CALLS = (*_MADE, *_UPDATED, *_LOST)


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
        arguments.append(text(ctypes.string_at(address, size), offset, _memory_at))
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


def _memory_at(address: int) -> str | None:
    """The kind of CUDA's memory at an address or before it, as an end; None for no memory."""
    for place in (address, address - 1):
        status, values = D.cuPointerGetAttributes(len(_ATTRIBUTES), list(_ATTRIBUTES), place)
        if status == D.CUresult.CUDA_SUCCESS and int(values[0]):
            return "managed" if values[1] else _MEMORY_TYPES.get(int(values[0]), "unknown")
    return None


class GraphNodes:
    """The kernels of the executable graphs that were made while calls were followed."""

    def __init__(self) -> None:
        self._kernels: dict[int, list[Kernel]] = {}  # by executable graph

    def kernels(self, executable: int) -> list[Kernel] | None:
        """Return the kernels of an executable graph; None if they are not known."""
        return self._kernels.get(executable)

    def changed(self, name: str, parameters: int) -> None:
        """A call of `CALLS` has ended without an error. `parameters`: their address."""
        (executable,) = words(parameters, 1)
        if name in _MADE:
            (executable,) = words(executable, 1)
        self._kernels.pop(executable, None)
        if name not in _LOST:
            graph = words(parameters, 2)[1]
            with suppress(RuntimeError):  # the kernels stay unknown
                self._kernels[executable] = list(_kernels(graph))


def _kernels(graph: int) -> Iterator[Kernel]:
    for node, kind in nodes(graph):
        if kind == D.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
            given = known(D.cuGraphKernelNodeGetParams(node))
            kernel, function = int(given.kern), int(given.func)
            name = known(D.cuKernelGetName(given.kern) if kernel else D.cuFuncGetName(given.func))
            pointers, handle = int(given.kernelParams), kernel or function
            yield read_kernel(name.decode(), handle, pointers, is_kernel=kernel != 0)


def nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a graph and of its child graphs, with its CUgraphNodeType. Raises
    `RuntimeError`, as `known`."""
    _, count = known(D.cuGraphGetNodes(graph))
    listed, _ = known(D.cuGraphGetNodes(graph, count))
    for node in (listed or ())[:count]:
        kind = known(D.cuGraphNodeGetType(node))
        if kind == D.CUgraphNodeType.CU_GRAPH_NODE_TYPE_GRAPH:
            yield from nodes(known(D.cuGraphChildGraphNodeGetGraph(node)))
        else:
            yield node, kind


def is_captured(stream: int) -> bool | None:
    """True if work on a stream becomes a node of a graph; None if the driver does not tell."""
    status, captured = D.cuStreamIsCapturing(stream)
    return None if int(status) else int(captured) != 0  # CU_STREAM_CAPTURE_STATUS_NONE


def known(answer: tuple[Any, ...]) -> Any:
    """The value of a call. Raises `RuntimeError`: the driver refuses it, or lacks it."""
    status, *values = answer
    if int(status) != 0:
        raise RuntimeError(f"the driver does not tell the nodes of a graph: {status.name}")
    return values[0] if len(values) == 1 else values
