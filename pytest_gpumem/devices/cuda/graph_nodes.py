"""The arguments of the kernels in CUDA graphs.

A launch of a graph has no arguments: its nodes have, and a library may destroy the graph once it is
made executable. So calls that make, change and destroy graphs are followed, all of them rare, and
the nodes are read when a graph is launched in a pass, or else before they change or go.
Sources: CUDA Driver API, Graph Management: cuGraphKernelNodeGetParams, CUDA_KERNEL_NODE_PARAMS, and
the parameters of the calls in `CALLS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.arguments import Kernel, read_kernel
from pytest_gpumem.devices.cuda.cupti import words

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
_TEMPLATE_CHANGES = (
    "cuGraphDestroy",
    "cuGraphNodeSetParams",
    "cuGraphKernelNodeSetParams",
    "cuGraphKernelNodeSetParams_v2",
)
"""Calls that destroy a graph or change a kernel of it, and leave executable ones as they are."""
CALLS = (*_MADE, *_UPDATED, *_LOST, *_TEMPLATE_CHANGES)


class GraphNodes:
    """The kernels of the executable graphs that were made while calls were followed."""

    def __init__(self) -> None:
        self._templates: dict[int, int] = {}
        """By executable graph: the graph whose nodes it has, until they are read."""
        self._kernels: dict[int, list[Kernel]] = {}  # by executable graph, once read

    def kernels(self, executable: int) -> list[Kernel] | None:
        """Return the kernels of an executable graph; None if they are not known."""
        self._read(executable)
        return self._kernels.get(executable)

    def begins(self, name: str, parameters: int) -> None:
        """A call of `CALLS` begins. `parameters`: their address."""
        if name in _TEMPLATE_CHANGES and self._templates:
            graph = words(parameters, 1)[0] if name == "cuGraphDestroy" else None
            for executable, template in list(self._templates.items()):
                if graph in (None, template):
                    self._read(executable)

    def ended(self, name: str, parameters: int) -> None:
        """A call of `CALLS` has ended without an error. `parameters`: their address."""
        if name in _TEMPLATE_CHANGES:
            return
        (executable,) = words(parameters, 1)
        if name in _MADE:
            (executable,) = words(executable, 1)
        self._templates.pop(executable, None)
        self._kernels.pop(executable, None)
        if name not in _LOST:
            self._templates[executable] = words(parameters, 2)[1]

    def _read(self, executable: int) -> None:
        """Read the nodes of an executable graph while its template still has them."""
        graph = self._templates.pop(executable, None)
        if graph is not None:
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
