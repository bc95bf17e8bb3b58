"""Managed memory: a vector addition, and two ways of touching its pages on the GPU first (`kernels/unified_memory.cu`)."""

from __future__ import annotations

from collections.abc import Callable

from pytest_gpumem.kernels import calls
from pytest_gpumem.kernels.kernel import Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.records.device import DeviceFacts

PAGE_BYTES = 64 * 1024
"""Bytes that one warp of `init_warp_per_page` touches, unless the caller says otherwise: the size of the text, and of the driver's basic
migration block."""
SMALLEST_PAGE, LARGEST_PAGE = 4 * 1024, 2 * 1024 * 1024  # pages that a GPU or its host can have

_THREADS = 256


def _page(call: Call) -> int:
    return int(call.scalars.get("page", PAGE_BYTES))


def _warp_per_page(_facts: DeviceFacts, call: Call) -> LaunchShape:
    return calls.grid(
        call,
        calls.ceil_div(
            calls.ceil_div(call.arrays["x"].nbytes, _page(call)), _THREADS // calls.WARP
        ),
        _THREADS,
    )


def _per_page_arguments(call: Call) -> tuple[str | int, ...]:
    array = call.arrays["x"]
    return ("x", "value", _page(call) // array.itemsize, array.size)


def _is_page(call: Call) -> str | None:
    page = call.scalars.get("page", PAGE_BYTES)
    if (
        SMALLEST_PAGE <= page <= LARGEST_PAGE
        and page == int(page)
        and int(page) & (int(page) - 1) == 0
    ):
        return None
    return f"page is {page}; a power of two from {SMALLEST_PAGE} to {LARGEST_PAGE} bytes is needed"


def _initialiser(
    name: str,
    entry: str,
    shape: calls.Shape,
    section: str,
    *,
    more: tuple[Parameter, ...] = (),
    arguments: Callable[[Call], tuple[str | int, ...]] = lambda call: (
        "x",
        "value",
        call.arrays["x"].size,
    ),
    checks: tuple[calls.Check, ...] = (),
    page_by_page: bool = False,
) -> Kernel:
    """Sets an array to a value. The text's version sets two arrays; here it is launched once for each."""
    return Kernel(
        name=name,
        parameters=(Parameter("x", Role.WRITE), Parameter("value", Role.SCALAR, 1.0), *more),
        shape=shape,
        accesses=lambda call: (calls.touch("x", "write", call, page_by_page=page_by_page),),
        source="unified_memory.cu",
        entry=entry,
        reference=lambda arrays, scalars: {"x": calls.filled_like(arrays["x"], scalars["value"])},
        elementwise=True,
        launch_arguments=arguments,
        section=section,
        checks=(calls.in_element_type("value"), *checks),
    )


KERNELS = (
    Kernel(
        name="add",
        parameters=(Parameter("x", Role.READ), Parameter("y", Role.UPDATE)),
        shape=calls.thread_per_element("y", _THREADS),
        accesses=lambda call: (
            calls.touch("x", "read", call),
            calls.touch("y", "read", call),
            calls.touch("y", "write", call),
        ),
        source="unified_memory.cu",
        entry="add<{dtype}>",
        reference=lambda arrays, _scalars: {"y": arrays["x"] + arrays["y"]},
        elementwise=True,
        section="Unified memory, 2.7.1 Understanding unified memory page allocation and transfer",
        loads_in_flight=2,
        checks=(calls.same_size("x", "y"),),
    ),
    _initialiser(
        "init",
        "init<{dtype}>",
        calls.thread_per_element("x", _THREADS),
        "Unified memory, 2.7.2 Optimizing unified memory with warp per page: init",
    ),
    _initialiser(
        "init_warp_per_page",
        "init_warp_per_page<{dtype}>",
        _warp_per_page,
        "Unified memory, 2.7.2 Optimizing unified memory with warp per page: one warp to 64 KiB",
        more=(Parameter("page", Role.SCALAR, PAGE_BYTES),),
        arguments=_per_page_arguments,
        checks=(_is_page,),
        page_by_page=True,
    ),
)
