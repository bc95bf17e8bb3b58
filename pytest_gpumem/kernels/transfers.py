"""Copies by the copy engine, and work to overlap them with (`kernels/transfers.cu`)."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.arrays import Arrays, Scalars, element
from pytest_gpumem.kernels.calls import all_of, same_size, thread_per_element, touch, typed, whole_number
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.records.device import DeviceFacts

_COPIED = ("f4", "f8", "i4", "i8", "u1", "u4")
_COMPUTED = ("f4", "f8")


def _no_grid(_facts: DeviceFacts, _call: Call) -> LaunchShape:
    return LaunchShape(0, 0)


def _memcpy_accesses(call: Call) -> tuple[Access, ...]:
    return (touch("source", "read", call), touch("destination", "write", call))


def _memcpy(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    return {"destination": arrays["source"].copy()}


def _no_grid_chosen(call: Call) -> str | None:
    return f"a copy by the copy engine has no grid; {call.blocks} blocks were asked for" if call.blocks is not None else None


def _rounds(call: Call) -> int:
    return int(call.scalars["rounds"])


def _elementwise_accesses(call: Call) -> tuple[Access, ...]:
    return (touch("x", "read", call), touch("x", "write", call))


def _elementwise_arguments(call: Call) -> tuple[str | int, ...]:
    return ("x", call.arrays["x"].size, _rounds(call))


def _elementwise(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    result = arrays["x"].copy()
    rate = element(3.75, result)
    for _ in range(int(scalars["rounds"])):
        rest = 1 - result
        result *= rate
        result *= rest
    return {"x": result}


KERNELS = (
    Kernel(
        name="memcpy",
        parameters=(Parameter("destination", Role.WRITE), Parameter("source", Role.READ)),
        shape=_no_grid,
        accesses=_memcpy_accesses,
        source=None,
        reference=_memcpy,
        dtypes=_COPIED,
        section="CUDA C++ Best Practices Guide 9.1.1 Pinned Memory",
        check=all_of(_no_grid_chosen, typed(_COPIED), same_size("destination", "source")),
        relative_tolerance=0.0,
    ),
    Kernel(
        name="elementwise",
        parameters=(Parameter("x", Role.UPDATE), Parameter("rounds", Role.SCALAR, 1)),
        shape=thread_per_element("x"),
        accesses=_elementwise_accesses,
        source="transfers.cu",
        entry="elementwise<{dtype}>",
        reference=_elementwise,
        launch_arguments=_elementwise_arguments,
        dtypes=_COMPUTED,
        section="CUDA C++ Best Practices Guide 9.1.2 Asynchronous and Overlapping Transfers with Computation",
        check=all_of(typed(_COMPUTED), whole_number("rounds", 1)),
        relative_tolerance=0.0,
    ),
)
