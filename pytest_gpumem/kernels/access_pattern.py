"""Copies by misaligned, strided and permuted accesses of words (`kernels/access_pattern.cu`).

Their traffic counts the words that are copied, as the guide's effective bandwidth does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.kernels.kernel import (
    SECTORS_COALESCED,
    SECTORS_SCATTERED,
    Access,
    Arrays,
    Call,
    Check,
    Kernel,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    copied,
    enough_threads,
    same_size,
    thread_per_element,
    touch,
    touch_all,
)

_WORDS_PER_SECTOR = 8


def _copied(call: Call, words: int, sectors: float) -> tuple[Access, ...]:
    return (
        touch("idata", "read", call, elements=words, sectors=sectors),
        touch("odata", "write", call, elements=words, sectors=sectors),
    )


def _after_offset(call: Call) -> int:
    return call.arrays["odata"].size - int(call.scalars["offset"])


def _offset_accesses(call: Call) -> tuple[Access, ...]:
    sectors = SECTORS_COALESCED
    if int(call.scalars["offset"]) % _WORDS_PER_SECTOR != 0:
        sectors += 1
    return _copied(call, _after_offset(call), sectors)


def _offset(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    offset = int(scalars["offset"])
    result = arrays["idata"].copy()
    result[:offset] = arrays["odata"][:offset]
    return {"odata": result}


def _offset_within(call: Call) -> str | None:
    size, offset = call.arrays["odata"].size, call.scalars["offset"]
    if offset >= size:
        return f"offset is {offset}, but the arrays have only {size} elements"
    return None


def _at_stride(call: Call) -> int:
    return ceil_div(call.arrays["odata"].size, int(call.scalars["stride"]))


def _stride_accesses(call: Call) -> tuple[Access, ...]:
    sectors = min(SECTORS_SCATTERED, SECTORS_COALESCED * int(call.scalars["stride"]))
    return _copied(call, _at_stride(call), sectors)


def _stride(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    stride = int(scalars["stride"])
    result = arrays["odata"].copy()
    result[::stride] = arrays["idata"][::stride]
    return {"odata": result}


_SAME: Check = same_size("odata", "idata")

# The lanes of a warp copy its words in another order. The other kernels are changes of this one.
_PERMUTED = Kernel(
    name="permuted_copy",
    parameters=(Parameter("odata", Role.WRITE), Parameter("idata", Role.READ)),
    shape=thread_per_element("odata"),
    accesses=touch_all(reads=("idata",), writes=("odata",)),
    source="access_pattern.cu",
    entry="permuted_copy<{dtype}>",
    reference=copied("odata", "idata"),
    dtypes=("f4", "i4"),  # the sectors hold for 4-byte words
    section="CUDA C++ Best Practices Guide 9.2.1.1 A Simple Access Pattern",
    checks=(_SAME,),
)

KERNELS = (
    replace(
        _PERMUTED,
        name="offset_copy",
        # Updated, not written: the words before the offset keep their content.
        parameters=(
            Parameter("odata", Role.UPDATE),
            Parameter("idata", Role.READ),
            Parameter("offset", Role.SCALAR, 0, least=0),
        ),
        shape=enough_threads(_after_offset),
        accesses=_offset_accesses,
        entry="offset_copy<{dtype}>",
        reference=_offset,
        section="CUDA C++ Best Practices Guide 9.2.1.3 Effects of Misaligned Accesses",
        checks=(_SAME, _offset_within),
    ),
    replace(
        _PERMUTED,
        name="stride_copy",
        # Updated, not written: the words between keep their content.
        parameters=(
            Parameter("odata", Role.UPDATE),
            Parameter("idata", Role.READ),
            Parameter("stride", Role.SCALAR, 1, least=1),
        ),
        shape=enough_threads(_at_stride),
        accesses=_stride_accesses,
        entry="stride_copy<{dtype}>",
        reference=_stride,
        section="CUDA C++ Best Practices Guide 9.2.1.4 Strided Accesses",
    ),
    _PERMUTED,
)
