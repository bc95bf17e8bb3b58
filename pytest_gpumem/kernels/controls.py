"""The control kernel (`kernels/controls.cu`): reads that show whether the device has changed. It is no part of the catalogue."""

from __future__ import annotations

from typing import Any

from pytest_gpumem.kernels.calls import WARP, Arrays, Scalars, touch
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, Parameter, Role
from pytest_gpumem.kernels.l2_bandwidth import (
    BLOCKS_PER_SM,
    DTYPES,
    THREADS,
    TILE_BYTES,
    resident,
    tiles,
)
from pytest_gpumem.kernels.stream import tile_sums
from pytest_gpumem.records.device import DeviceFacts

SOURCE = "controls.cu"


def whole_waves(facts: DeviceFacts, nbytes: int) -> int:
    """Bytes near `nbytes` of which every warp of the launch reads as many, on as many blocks of each SM.

    Which SMs get the blocks that are left over depends on the kernel before, and decides the reading: on an H100, 200 blocks on 132 SMs
    take 18.2, 18.6 or 19.6 us, for as long as no other kernel runs between (ci/records/nvidia-h100/control_noise.json).
    """
    wave = facts.sm_count * THREADS // WARP * TILE_BYTES
    count = max(1, round(nbytes / wave))
    return (count if count < BLOCKS_PER_SM else count - count % BLOCKS_PER_SM) * wave


def _accesses(call: Call) -> tuple[Access, ...]:
    passes = int(call.scalars["passes"])
    if not passes:
        return ()
    return (
        touch("a", "read", call, requests=call.arrays["a"].size * passes),
        touch("sums", "write", call, elements=tiles(call), requests=tiles(call) * passes),
    )


def _check(call: Call) -> str | None:
    a, sums = call.arrays["a"], call.arrays["sums"]
    if a.nbytes % TILE_BYTES or sums.size < tiles(call):
        return f"control_read adds up tiles of {TILE_BYTES} bytes, a sum for each; a has {a.nbytes} bytes, sums {sums.size} elements"
    return None


def _reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    """A sum modulo 2^32 for each tile."""
    if not int(scalars["passes"]):
        return {"sums": arrays["sums"].copy()}
    return {"sums": tile_sums([arrays["a"]], lambda a: a, TILE_BYTES)}


CONTROL_READ = Kernel(
    name="control_read",
    parameters=(
        Parameter("a", Role.READ),
        Parameter("sums", Role.WRITE),
        Parameter("passes", Role.SCALAR, least=0),
    ),
    shape=lambda facts, call: resident(facts, call, tiles(call)),
    accesses=_accesses,
    source=SOURCE,
    entry="control_read",
    reference=_reference,
    dtypes=DTYPES,
    loads_in_flight=8,
    load_bytes=16,
    checks=(_check,),
)
"""Reads an array a number of times over and adds up its tiles."""
