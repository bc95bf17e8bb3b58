"""Copies by the copy engine, work to overlap them with, and reads of memory that stays on the host (`kernels/transfers.cu`)."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels import calls
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.records.device import DeviceFacts

_THREADS = 256
_BLOCKS_PER_SM = 8
_LANES = 128  # single-precision operations that an SM does in a cycle (CUDA C++ Programming Guide, Arithmetic Instructions, 8.6 and 9.0)


def _no_grid_chosen(call: Call) -> str | None:
    return (
        f"a copy by the copy engine has no grid; {call.blocks} blocks were asked for"
        if call.blocks is not None
        else None
    )


def _rounds(call: Call) -> int:
    return int(call.scalars["rounds"])


def _elementwise_cycles(call: Call) -> float:
    """Two products and a difference a round, none of them fused; an SM does 128 of 4 bytes in a cycle, half as many of 8 bytes."""
    x = call.arrays["x"]
    return x.size * _rounds(call) * 3 / (_LANES * 4 / x.itemsize)


def _elementwise(arrays: calls.Arrays, scalars: calls.Scalars) -> dict[str, Any]:
    result = arrays["x"].copy()
    rate, one, subtract = (
        calls.element(3.75, result),
        calls.element(1, result),
        calls.module_of(result).subtract,
    )
    for _ in range(int(scalars["rounds"])):
        rest = subtract(one, result)
        result *= rate
        result *= rest
    return {"x": result}


def _reread_shape(facts: DeviceFacts, call: Call) -> LaunchShape:
    """As many blocks as run at once: every pass goes through the whole array before the next begins."""
    return calls.grid(
        call,
        min(_BLOCKS_PER_SM * facts.sm_count, calls.ceil_div(call.arrays["y"].size, _THREADS)),
        _THREADS,
    )


def _reread_accesses(call: Call) -> tuple[Access, ...]:
    requests = call.arrays["x"].size * int(call.scalars["times"])
    sectors = min(calls.SECTORS_COALESCED * int(call.scalars["stride"]), calls.SECTORS_SCATTERED)
    return (
        calls.touch("x", "read", call, requests=requests, sectors=sectors),
        calls.touch("y", "write", call, requests=requests),
    )


def _reread(arrays: calls.Arrays, scalars: calls.Scalars) -> dict[str, Any]:
    # The first part alone: what follows it lies far behind, beyond the end of arrays that are cut.
    return {"y": arrays["x"][:: int(scalars["stride"])].copy()}


def _whole_rows(call: Call) -> str | None:
    size, stride = call.arrays["x"].size, int(call.scalars["stride"])
    return (
        f"stride is {stride}, which does not divide the {size} elements" if size % stride else None
    )


KERNELS = (
    Kernel(
        name="memcpy",
        parameters=(Parameter("destination", Role.WRITE), Parameter("source", Role.READ)),
        shape=lambda _facts, _call: LaunchShape(0, 0),
        accesses=lambda call: (
            calls.touch("source", "read", call),
            calls.touch("destination", "write", call),
        ),
        source=None,
        reference=lambda arrays, _scalars: {"destination": arrays["source"].copy()},
        elementwise=True,
        dtypes=("f4", "f8", "i4", "i8", "u1", "u4"),
        section="CUDA C++ Best Practices Guide 9.1.1 Pinned Memory",
        checks=(_no_grid_chosen, calls.same_size("destination", "source")),
    ),
    Kernel(
        name="elementwise",
        parameters=(Parameter("x", Role.UPDATE), Parameter("rounds", Role.SCALAR, 1, least=1)),
        shape=calls.thread_per_element("x"),
        accesses=lambda call: (calls.touch("x", "read", call), calls.touch("x", "write", call)),
        source="transfers.cu",
        entry="elementwise<{dtype}>",
        reference=_elementwise,
        elementwise=True,
        on_chip_cycles=_elementwise_cycles,
        dtypes=("f4", "f8"),
        section="CUDA C++ Best Practices Guide 9.1.2 Asynchronous and Overlapping Transfers with Computation",
    ),
    Kernel(
        name="reread",
        parameters=(
            Parameter("y", Role.WRITE),
            Parameter("x", Role.READ),
            Parameter("times", Role.SCALAR, 1, least=1),
            Parameter("stride", Role.SCALAR, 1, least=1),
        ),
        shape=_reread_shape,
        accesses=_reread_accesses,
        source="transfers.cu",
        entry="reread<{dtype}>",
        reference=_reread,
        dtypes=("f4", "i4"),  # the sectors of a strided read hold for 4-byte words
        section="CUDA C++ Best Practices Guide 9.1.3 Zero Copy",
        checks=(calls.same_size("y", "x"), _whole_rows),
    ),
)
