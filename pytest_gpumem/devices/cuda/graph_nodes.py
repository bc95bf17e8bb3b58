"""The arguments of the kernels in CUDA graphs.

A launch of a graph has no arguments: its nodes have, and a library may destroy the graph once it is made executable. So calls that make,
change and destroy graphs are followed, all of them rare, and the nodes are read when a graph is launched under watch, or else before they
change or go.
Sources: CUDA Driver API, Graph Management: cuGraphKernelNodeGetParams, CUDA_KERNEL_NODE_PARAMS, and the parameters of the calls in `CALLS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda.arguments import block_of, live_memory
from pytest_gpumem.devices.cuda.cupti import words
from pytest_gpumem.records.arguments import Addresses, texts

_MADE = (
    *("cuGraphInstantiate", "cuGraphInstantiate_v2", "cuGraphInstantiateWithFlags"),
    *("cuGraphInstantiateWithParams", "cuGraphInstantiateWithParams_ptsz"),
)
"""Calls whose first parameter is the address of the new executable graph, and whose second the graph."""
_UPDATED = (
    "cuGraphExecUpdate",
    "cuGraphExecUpdate_v2",
)  # whose first parameter is the executable graph, and whose second the new one
_SET = ("cuGraphExecKernelNodeSetParams", "cuGraphExecKernelNodeSetParams_v2")
"""Calls whose parameters are the executable graph, the node and its new CUDA_KERNEL_NODE_PARAMS."""
_LOST = (
    "cuGraphExecDestroy",
    "cuGraphExecNodeSetParams",
)  # calls after which the nodes of the executable graph are unknown
_TEMPLATE_CHANGES = (
    "cuGraphDestroy",
    "cuGraphNodeSetParams",
    "cuGraphKernelNodeSetParams",
    "cuGraphKernelNodeSetParams_v2",
)
"""Calls that destroy a graph or change a kernel of it, and leave executable ones as they are."""
CALLS = (*_MADE, *_UPDATED, *_SET, *_LOST, *_TEMPLATE_CHANGES)


class NodeKernel(NamedTuple):
    """A kernel of a graph."""

    name: str  # mangled name
    arguments: tuple[str, ...] | None  # as `Step.arguments`; None where they are not known


class GraphNodes:
    """The kernels of the executable graphs that were made since it was made.
    `parameters`: tells where the parameters of a kernel lie, by its name and handle.
    """

    def __init__(
        self, parameters: Callable[[str, int | None], tuple[tuple[int, int], ...] | None]
    ) -> None:
        self._parameters = parameters
        self._template: dict[
            int, int
        ] = {}  # by executable graph: the graph whose nodes it has, until they are read
        self._kernels: dict[
            int, dict[int, NodeKernel]
        ] = {}  # by executable graph, once read: by node

    def kernels(self, executable: int) -> Sequence[NodeKernel] | None:
        """The kernels of an executable graph; None if they are not known."""
        self._read(executable)
        found = self._kernels.get(executable)
        return None if found is None else list(found.values())

    def forget(self, _why: str) -> None:
        """Calls were missed: handles may stand for other graphs now."""
        self._template.clear()
        self._kernels.clear()

    def begins(self, name: str, address: int) -> None:
        """A call of `CALLS` begins. `address`: of its parameters."""
        if name in _SET:
            self._read(*words(address, 1))
        elif name in _TEMPLATE_CHANGES and self._template:
            graph = words(address, 1)[0] if name == "cuGraphDestroy" else None
            for executable in [
                one for one, template in self._template.items() if graph in (None, template)
            ]:
                self._read(executable)

    def ended(self, name: str, address: int) -> None:
        """A call of `CALLS` has ended without an error. `address`: of its parameters."""
        if name in _MADE or name in _UPDATED:
            executable, graph = words(address, 2)
            if name in _MADE:
                (executable,) = words(executable, 1)
            self._kernels.pop(executable, None)
            self._template[executable] = graph
        elif name in _SET:
            executable, node, given = words(address, 3)
            if node in (known := self._kernels.get(executable, {})):
                function, *_, pointers, extra = words(given, 7)
                known[node] = self._kernel(known[node].name, function, pointers, extra)
        elif name in _LOST:
            (executable,) = words(address, 1)
            self._template.pop(executable, None)
            self._kernels.pop(executable, None)

    def _read(self, executable: int) -> None:
        """Read the nodes of an executable graph while its template still has them."""
        graph = self._template.pop(executable, None)
        if graph is not None:
            with suppress(Exception):  # whatever the driver does not tell: the kernels stay unknown
                self._kernels[executable] = dict(self._walk(graph))

    def _walk(self, graph: Any) -> Iterator[tuple[int, NodeKernel]]:
        for node, kind in nodes(graph):
            if kind == D.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL:
                given = known(D.cuGraphKernelNodeGetParams(node))
                function, kernel = int(given.func), int(given.kern)
                name = known(
                    D.cuKernelGetName(given.kern) if kernel else D.cuFuncGetName(given.func)
                )
                yield (
                    int(node),
                    self._kernel(
                        name.decode(), kernel or function, int(given.kernelParams), int(given.extra)
                    ),
                )

    def _kernel(self, name: str, function: int, pointers: int, extra: int) -> NodeKernel:
        layout = self._parameters(name, function) or self._parameters(name, None)
        block = None if layout is None else block_of(layout, pointers, extra)
        return NodeKernel(
            name,
            None
            if block is None or layout is None
            else texts(block, layout, Addresses(live_memory).token),
        )


def nodes(graph: Any) -> Iterator[tuple[Any, Any]]:
    """Each node of a graph and of its child graphs, with its CUgraphNodeType. Raises `RuntimeError`, as `known`."""
    _, count = known(D.cuGraphGetNodes(graph))
    found, _ = known(D.cuGraphGetNodes(graph, count))
    for node in (found or ())[:count]:
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
