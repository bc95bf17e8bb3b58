"""Read bandwidth of L2 (`kernels/l2_bandwidth.cu`)."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.kernel import (
    WARP,
    Access,
    Arrays,
    Call,
    Kernel,
    LaunchShape,
    Parameter,
    Role,
    Scalars,
    ceil_div,
    grid,
    touch,
)
from pytest_gpumem.kernels.stream import itself, tile_sums, whole_tiles
from pytest_gpumem.records.device import DeviceFacts

TILE_BYTES = 4096  # of a sum; a warp reads them at once: 32 lanes with 8 loads of 16 bytes

_THREADS = 256
_BLOCKS_PER_SM = 4  # as many as the source leaves the registers for


def _repeats(call: Call) -> int:
    return int(call.scalars["repeats"])


def _sums(call: Call) -> int:
    """Sums of a launch, each of a tile."""
    return call.arrays["a"].nbytes // TILE_BYTES * _repeats(call)


def _shape(facts: DeviceFacts, call: Call) -> LaunchShape:
    """A warp for each sum, in as many blocks as run at once."""
    blocks = ceil_div(_sums(call), _THREADS // WARP)
    return grid(call, min(_BLOCKS_PER_SM * facts.sm_count, blocks), _THREADS)


def _accesses(call: Call) -> tuple[Access, ...]:
    return (
        touch("a", "read", call, requests=call.arrays["a"].size * _repeats(call)),
        touch("sums", "write", call, elements=_sums(call)),
    )


def _reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    """A sum modulo 2^32 for each tile, once for each pass."""
    sums = tile_sums([arrays["a"]], itself, TILE_BYTES)
    return {"sums": sums.repeat(int(scalars["repeats"]))}


KERNELS = (
    Kernel(
        name="l2_read",
        parameters=(
            Parameter("a", Role.READ),
            Parameter("sums", Role.WRITE),
            Parameter("repeats", Role.SCALAR, least=1),
        ),
        shape=_shape,
        accesses=_accesses,
        source="l2_bandwidth.cu",
        entry="l2_read",
        reference=_reference,
        dtypes=("i4",),  # sums that wrap around are exact in any order
        section=(
            "Read bandwidth of L2: a footprint read over and over (after gpu-benches, gpu-l2-cache)"
        ),
        checks=(whole_tiles("l2_read", "a", TILE_BYTES),),
    ),
)
