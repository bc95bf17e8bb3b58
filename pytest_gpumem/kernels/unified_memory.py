"""Managed memory: a vector addition, and two ways of touching its pages on the GPU first
(`kernels/unified_memory.cu`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.kernels.kernel import (
    WARP,
    Access,
    Arrays,
    Call,
    Kernel,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    enough_threads,
    filled,
    in_element_type,
    same_size,
    thread_per_element,
    touch,
    touch_all,
)

PAGE_BYTES = 64 * 1024
"""Bytes that a warp of `init_warp_per_page` touches by default: the size of the text, and of the
driver's basic migration block."""
SMALLEST_PAGE, LARGEST_PAGE = 4 * 1024, 2 * 1024 * 1024  # pages that a GPU or its host can have


def _page(call: Call) -> int:
    return int(call.scalars.get("page", PAGE_BYTES))


def _warp_per_page(call: Call) -> int:
    return WARP * ceil_div(call.arrays["x"].nbytes, _page(call))


def _sum(arrays: Arrays, _scalars: Scalars) -> dict[str, Any]:
    return {"y": arrays["x"] + arrays["y"]}


def _init_arguments(call: Call) -> tuple[str | int, ...]:
    return "x", "value", call.arrays["x"].size


def _pages_written(call: Call) -> tuple[Access, ...]:
    return (touch("x", "write", call, page_by_page=True),)


def _per_page_arguments(call: Call) -> tuple[str | int, ...]:
    array = call.arrays["x"]
    return ("x", "value", _page(call) // array.itemsize, array.size)


def _is_page(call: Call) -> str | None:
    page = call.scalars.get("page", PAGE_BYTES)
    if page not in (2**power for power in range(12, 22)):
        bounds = f"from {SMALLEST_PAGE} to {LARGEST_PAGE} bytes"
        return f"page is {page}; a power of two {bounds} is needed"
    return None


# The text's version sets two arrays; here it is launched once for each.
_INIT = Kernel(
    name="init",
    parameters=(Parameter("x", Role.WRITE), Parameter("value", Role.SCALAR, 1.0)),
    shape=thread_per_element("x"),
    accesses=touch_all(reads=(), writes=("x",)),
    source="unified_memory.cu",
    entry="init<{dtype}>",
    reference=filled("x"),
    launch_arguments=_init_arguments,
    section="Unified memory, 2.7.2 Optimizing unified memory with warp per page: init",
    checks=(in_element_type("value"),),
)

KERNELS = (
    Kernel(
        name="add",
        parameters=(Parameter("x", Role.READ), Parameter("y", Role.UPDATE)),
        shape=thread_per_element("y"),
        accesses=touch_all(reads=("x", "y"), writes=("y",)),
        source="unified_memory.cu",
        entry="add<{dtype}>",
        reference=_sum,
        section="Unified memory, 2.7.1 Understanding unified memory page allocation and transfer",
        checks=(same_size("x", "y"),),
    ),
    _INIT,
    replace(
        _INIT,
        name="init_warp_per_page",
        parameters=(*_INIT.parameters, Parameter("page", Role.SCALAR, PAGE_BYTES)),
        shape=enough_threads(_warp_per_page),
        accesses=_pages_written,
        entry="init_warp_per_page<{dtype}>",
        launch_arguments=_per_page_arguments,
        section=(
            "Unified memory, 2.7.2 Optimizing unified memory with warp per page: one warp to 64 KiB"
        ),
        checks=(*_INIT.checks, _is_page),
    ),
)
