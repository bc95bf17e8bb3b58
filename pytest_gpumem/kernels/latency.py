"""The pointer chase (`kernels/latency.cu`): the same walk at every launch, or on and on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pytest_gpumem.kernels.kernel import (
    SECTORS_SCATTERED,
    Access,
    Accesses,
    Arrays,
    Call,
    Direction,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
    Scalars,
    filled_like,
    touch,
)
from pytest_gpumem.records.device import DeviceFacts

NODE_BYTES = 64
"""Bytes of a node. Two fill a cache line, and no two indices share a sector."""

_WORDS = NODE_BYTES // 4


def _steps(call: Call) -> int:
    return int(call.scalars["steps"])


def _nodes(call: Call) -> int:
    return call.arrays["nodes"].size // _WORDS


def _accesses(*of_out: Direction, **traits: bool) -> Accesses:
    """Return the accesses of a walk. `of_out`: directions of its accesses to `out`."""

    def accesses(call: Call) -> tuple[Access, ...]:
        steps = _steps(call)
        walk = touch(
            "nodes",
            "read",
            call,
            elements=min(steps, _nodes(call)),
            requests=steps,
            sectors=SECTORS_SCATTERED,
            dependent=True,
            **traits,
        )
        touched = [walk]
        for direction in of_out:
            touched.append(touch("out", direction, call))
        return tuple(touched)

    return accesses


def _check(call: Call) -> str | None:
    nodes, out = call.arrays["nodes"], call.arrays["out"]
    if nodes.size % _WORDS:
        return f"nodes has {nodes.nbytes} bytes, which is no multiple of a node's {NODE_BYTES}"
    if _nodes(call) >= 2**31:
        return f"nodes has {_nodes(call)} nodes, which is more than a 32-bit index can number"
    if out.size != 1:
        return f"out takes one index, it has {out.size} elements"
    if call.blocks not in (None, 1):
        return f"one thread follows the cycle; a grid of {call.blocks} blocks is not possible"
    return None


def _starts_inside(call: Call) -> str | None:
    start = call.scalars["start"]
    if start >= _nodes(call):
        return f"start is {start}, but there are only {_nodes(call)} nodes"
    return None


def _reached(nodes: Any, node: int, steps: int) -> int:
    """Return the node reached. Each round doubles the steps of `jump`: log2(steps) gathers."""
    jump = nodes[: nodes.size // _WORDS * _WORDS : _WORDS].copy()
    low, high = int(jump.min()), int(jump.max())
    if low < 0 or high >= jump.size:
        raise ValueError(f"nodes hold no cycle: indices from {low} to {high}, {jump.size} nodes")
    while steps:
        if steps & 1:
            node = int(jump[node])
        steps >>= 1
        if steps:
            jump = jump[jump]
    return node


def _reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    node = _reached(arrays["nodes"], int(scalars["start"]), int(scalars["steps"]))
    return {"out": filled_like(arrays["out"], node)}


def _onward_reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    nodes, out = arrays["nodes"], arrays["out"]
    start = (int(out[0]) & 0xFFFFFFFF) % (nodes.size // _WORDS)  # the kernel reads it as unsigned
    return {"out": filled_like(out, _reached(nodes, start, int(scalars["steps"])))}


def _single_thread(_facts: DeviceFacts, _call: Call) -> LaunchShape:
    return LaunchShape(1, 1)


def _arguments(call: Call) -> tuple[str | int, ...]:
    return "nodes", "out", _steps(call), int(call.scalars["start"])


def _onward_arguments(call: Call) -> tuple[str | int, ...]:
    return "nodes", "out", _steps(call), _nodes(call)


_SECTION = "Latency of dependent accesses over a random cycle (pointer chase): "

_CHASE = Kernel(
    name="chase",
    parameters=(
        Parameter("nodes", Role.READ),
        Parameter("out", Role.WRITE),
        Parameter("steps", Role.SCALAR, least=1),
        Parameter("start", Role.SCALAR, 0, least=0),
    ),
    shape=_single_thread,
    accesses=_accesses("write"),
    source="latency.cu",
    entry=f"chase<{NODE_BYTES}>",
    reference=_reference,
    launch_arguments=_arguments,
    dtypes=("i4",),
    section=_SECTION + "the same walk at every launch",
    checks=(_check, _starts_inside),
    accesses_per_launch=_steps,
    cycle="nodes",
)

KERNELS = (
    _CHASE,
    replace(
        _CHASE,
        name="chase_l1",
        accesses=_accesses("write", through_l1=True),
        entry=f"chase_l1<{NODE_BYTES}>",
        section=_SECTION + "the same walk, with loads through L1",
    ),
    replace(
        _CHASE,
        name="chase_onward",
        # Updated, not written: the walk starts from what it holds.
        parameters=(
            Parameter("nodes", Role.READ),
            Parameter("out", Role.UPDATE),
            Parameter("steps", Role.SCALAR, least=1),
        ),
        accesses=_accesses("read", "write", onward=True),
        entry=f"chase_onward<{NODE_BYTES}>",
        reference=_onward_reference,
        launch_arguments=_onward_arguments,
        section=_SECTION + "lines that no launch before has touched",
        checks=(_check,),
    ),
)


def random_cycle(nodes: int, seed: int = 1) -> Any:
    """Return the next node of each, as 32-bit integers: a single random cycle through all nodes.
    The default `seed` gives the same walk in every test."""
    order = np.random.default_rng(seed).permutation(nodes).astype(np.int32)
    following = np.empty(nodes, dtype=np.int32)
    following[order] = np.roll(order, -1)
    return following
