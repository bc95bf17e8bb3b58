"""The pointer chase (`kernels/latency.cu`)."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.arrays import Arrays, Scalars, module_of
from pytest_gpumem.kernels.calls import SECTORS_SCATTERED, all_of, touch, typed, whole_number
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.records.device import DeviceFacts

NODE_BYTES = 64
"""Bytes of a node: two to a cache line, four sectors apart from no other node's index."""

_WORDS = NODE_BYTES // 4
_DTYPES = ("i4",)


def _shape(_facts: DeviceFacts, _call: Call) -> LaunchShape:
    return LaunchShape(1, 1)


def _steps(call: Call) -> int:
    return int(call.scalars["steps"])


def _accesses(call: Call) -> tuple[Access, ...]:
    # One 4-byte index a node: a walk along a cycle comes to a node again only after all others. Each index is a sector of its own,
    # so what the walk occupies in a cache is eight times its footprint: footprint x sectors_per_request / 4.
    visited = min(_steps(call), call.arrays["nodes"].size // _WORDS)
    return (
        touch(
            "nodes",
            "read",
            call,
            elements=visited,
            requests=_steps(call),
            sectors=SECTORS_SCATTERED,
            dependent=True,
            random=True,
        ),
        touch("out", "write", call),
    )


def _arguments(call: Call) -> tuple[str | int, ...]:
    return ("nodes", "out", _steps(call), int(call.scalars["start"]))


def _check(call: Call) -> str | None:
    nodes, out, start = call.arrays["nodes"], call.arrays["out"], call.scalars["start"]
    if nodes.size % _WORDS:
        return f"nodes has {nodes.nbytes} bytes, which is no multiple of a node's {NODE_BYTES}"
    if start >= nodes.size // _WORDS:
        return f"start is {start}, but there are only {nodes.size // _WORDS} nodes"
    if out.size != 1:
        return f"out takes one index, it has {out.size} elements"
    if call.blocks not in (None, 1):
        return f"one thread follows the cycle; a grid of {call.blocks} blocks is not possible"
    return None


def _reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    """The node reached, by squaring the map from node to next node: log2(steps) gathers in place of a walk on the host.

    Raises:
        ValueError: an index points outside the nodes; they hold no cycle.
    """
    jump = arrays["nodes"][: arrays["nodes"].size // _WORDS * _WORDS : _WORDS].copy()
    if int(jump.min()) < 0 or int(jump.max()) >= jump.size:
        raise ValueError(f"nodes hold no cycle: indices from {int(jump.min())} to {int(jump.max())}, {jump.size} nodes")
    steps, node = int(scalars["steps"]), int(scalars["start"])
    while steps:
        if steps & 1:
            node = int(jump[node])
        steps >>= 1
        if steps:
            jump = jump[jump]
    return {"out": module_of(jump).full(1, node, dtype=arrays["out"].dtype)}


KERNELS = (
    Kernel(
        name="chase",
        parameters=(
            Parameter("nodes", Role.READ),
            Parameter("out", Role.WRITE),
            Parameter("steps", Role.SCALAR),
            Parameter("start", Role.SCALAR, 0),
        ),
        shape=_shape,
        accesses=_accesses,
        source="latency.cu",
        entry=f"chase<{NODE_BYTES}>",
        reference=_reference,
        launch_arguments=_arguments,
        dtypes=_DTYPES,
        section="Latency of dependent accesses over a random cycle (pointer chase)",
        check=all_of(typed(_DTYPES), whole_number("steps", 1), whole_number("start", 0), _check),
        relative_tolerance=0.0,
        accesses_per_launch=_steps,
        content={"nodes": "cycle"},
    ),
)
