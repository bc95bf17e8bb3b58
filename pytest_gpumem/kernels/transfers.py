"""Copies by the copy engine, work to overlap them with, and reads of memory that stays on the host
(`kernels/transfers.cu`)."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.kernel import (
    SECTORS_COALESCED,
    SECTORS_SCATTERED,
    Access,
    Arrays,
    Call,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    copied,
    element,
    grid,
    module_of,
    same_size,
    thread_per_element,
    touch,
    touch_all,
)
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import format_bytes

_THREADS = 256
_BLOCKS_PER_SM = 8
_OPERATIONS = 128
"""Single-precision operations of an SM in a cycle (CUDA C++ Programming Guide, Arithmetic
Instructions, 8.6 and 9.0)."""


def _no_grid_chosen(call: Call) -> str | None:
    if call.blocks is not None:
        return f"a copy by the copy engine has no grid; {call.blocks} blocks were asked for"
    return None


def _same_bytes(call: Call) -> str | None:
    to, origin = call.arrays["destination"].nbytes, call.arrays["source"].nbytes
    if to == origin:
        return None
    sizes = f"{format_bytes(origin)} to {format_bytes(to)}"
    return f"a copy of {sizes}: source and destination must be of the same size"


def _no_shape(_facts: DeviceFacts, _call: Call) -> LaunchShape:
    return LaunchShape(0, 0)


def _elementwise_cycles(call: Call) -> float:
    """None are fused. An SM runs half as many on 8 bytes."""
    x = call.arrays["x"]
    operations = 3 * x.size * int(call.scalars["rounds"])
    return operations / (_OPERATIONS * 4 / x.itemsize)


def _elementwise(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    # x = 3.75 x (1 - x), in the kernel's order: equal to the last bit.
    x = arrays["x"].copy()
    factor, unity = element(3.75, x), element(1, x)
    subtract = module_of(x).subtract
    for _ in range(int(scalars["rounds"])):
        complement = subtract(unity, x)
        x *= factor
        x *= complement
    return {"x": x}


def _reread_shape(facts: DeviceFacts, call: Call) -> LaunchShape:
    """As many blocks as run at once: a pass goes through the whole array before the next."""
    blocks = ceil_div(call.arrays["y"].size, _THREADS)
    return grid(call, min(_BLOCKS_PER_SM * facts.sm_count, blocks), _THREADS)


def _reread_accesses(call: Call) -> tuple[Access, ...]:
    requests = call.arrays["x"].size * int(call.scalars["times"])
    sectors = min(SECTORS_COALESCED * int(call.scalars["stride"]), SECTORS_SCATTERED)
    return (
        touch("x", "read", call, requests=requests, sectors=sectors),
        touch("y", "write", call, requests=requests),
    )


def _reread(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    # The first elements of y alone: a simulated device lacks the end of x, which the others need.
    return {"y": arrays["x"][:: int(scalars["stride"])].copy()}


def _stride_divides(call: Call) -> str | None:
    size, stride = call.arrays["x"].size, int(call.scalars["stride"])
    if size % stride:
        return f"stride is {stride}, which does not divide the {size} elements"
    return None


KERNELS = (
    Kernel(
        name="memcpy",
        parameters=(Parameter("destination", Role.WRITE), Parameter("source", Role.READ)),
        shape=_no_shape,
        accesses=touch_all(reads=("source",), writes=("destination",)),
        source=None,
        reference=copied("destination", "source"),
        dtypes=("u1",),  # bytes, whatever they mean
        section="CUDA C++ Best Practices Guide 9.1.1 Pinned Memory",
        checks=(_no_grid_chosen, _same_bytes),
    ),
    Kernel(
        name="elementwise",
        parameters=(Parameter("x", Role.UPDATE), Parameter("rounds", Role.SCALAR, 1, least=1)),
        shape=thread_per_element("x"),
        accesses=touch_all(reads=("x",), writes=("x",)),
        source="transfers.cu",
        entry="elementwise<{dtype}>",
        reference=_elementwise,
        on_chip_cycles=_elementwise_cycles,
        dtypes=("f4", "f8"),
        section=(
            "CUDA C++ Best Practices Guide 9.1.2 Asynchronous and Overlapping Transfers with "
            "Computation"
        ),
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
        checks=(same_size("y", "x"), _stride_divides),
    ),
)
