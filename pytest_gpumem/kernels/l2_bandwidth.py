"""Read bandwidth of L2 (`kernels/l2_bandwidth.cu`), and where it ends in a sweep over footprints."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pytest_gpumem.kernels.calls import WARP, Arrays, Scalars, ceil_div, grid, touch
from pytest_gpumem.kernels.kernel import Access, Call, Kernel, LaunchShape, Parameter, Role
from pytest_gpumem.kernels.stream import tile_sums
from pytest_gpumem.records.device import DeviceFacts

TILE_BYTES = 4096  # bytes that a warp reads at once, and that one sum is over: 32 lanes with 8 loads of 16 bytes each

THREADS = 256
BLOCKS_PER_SM = 4  # as many as the source leaves the registers for
DTYPES = ("i4",)  # sums that wrap around are exact in any order


def _repeats(call: Call) -> int:
    return int(call.scalars["repeats"])


def tiles(call: Call) -> int:
    """Tiles of the array that is read."""
    return call.arrays["a"].nbytes // TILE_BYTES


def resident(facts: DeviceFacts, call: Call, reads: int) -> LaunchShape:
    """A warp for each of `reads` reads of a tile, in as many blocks as run at once: no read is late because a block had to wait."""
    return grid(
        call, min(BLOCKS_PER_SM * facts.sm_count, ceil_div(reads, THREADS // WARP)), THREADS
    )


def _accesses(call: Call) -> tuple[Access, ...]:
    repeats = _repeats(call)
    return (
        touch("a", "read", call, requests=call.arrays["a"].size * repeats),
        touch("sums", "write", call, elements=tiles(call) * repeats),
    )


def _check(call: Call) -> str | None:
    a, sums = call.arrays["a"], call.arrays["sums"]
    if a.nbytes % TILE_BYTES:
        return f"l2_read adds up tiles of {TILE_BYTES} bytes; a has {a.nbytes} bytes, which is no multiple of that"
    needed = tiles(call) * _repeats(call)
    if sums.size < needed:
        return f"l2_read gives {_repeats(call)} sums for each {TILE_BYTES} bytes of a: sums needs {needed} elements, it has {sums.size}"
    return None


def _reference(arrays: Arrays, scalars: Scalars) -> dict[str, Any]:
    """A sum modulo 2^32 for each tile, once for each pass."""
    return {
        "sums": tile_sums([arrays["a"]], lambda a: a, TILE_BYTES).repeat(int(scalars["repeats"]))
    }


def plateau(bandwidths: Sequence[float]) -> float:
    """The bandwidth that a sweep over footprints holds while a cache holds the footprint.

    It is the median of the bandwidths that lie nearer to the highest than to the last, which belongs to a footprint too large for the
    cache. Footprints so small that the launch's own time shows are slower and do not count; nor does a single fast one.
    `bandwidths`: by ascending footprint, in one unit.
    Raises `ValueError`: no bandwidths, or no fall: the last is the highest.
    """
    if not bandwidths:
        raise ValueError("a sweep without a bandwidth has no plateau")
    highest, end = max(bandwidths), bandwidths[-1]
    if end >= highest:
        raise ValueError(
            f"no fall: of {len(bandwidths)} bandwidths the last, {end:g}, is the highest; a cache still holds that footprint"
        )
    return statistics.median(b for b in bandwidths if b > (highest + end) / 2)


def knee(footprints: Sequence[float], bandwidths: Sequence[float]) -> float:
    """The footprint where the plateau of a sweep ends.

    It is the last footprint before bandwidth, once it has been as high as the plateau, comes nearer to that of the largest footprint.
    Half-way between the two is the limit, rather than a share of the plateau, because a fast DRAM may give nearly what L2 does.
    `footprints`: bytes, ascending.
    `bandwidths`: of each footprint, in one unit.
    Raises `ValueError`: sizes that do not ascend, numbers of points that differ, or no fall (`plateau`).
    """
    if len(footprints) != len(bandwidths):
        raise ValueError(
            f"a knee needs a bandwidth for each footprint; got {len(footprints)} footprints and {len(bandwidths)} bandwidths"
        )
    if any(later <= earlier for earlier, later in pairwise(footprints)):
        raise ValueError(f"footprints must ascend: {', '.join(f'{f:g}' for f in footprints)}")
    top = plateau(bandwidths)
    limit = (top + bandwidths[-1]) / 2
    reached = next(i for i, bandwidth in enumerate(bandwidths) if bandwidth >= top)
    below = next(i for i in range(reached, len(bandwidths)) if bandwidths[i] < limit)
    return footprints[below - 1]


KERNELS = (
    Kernel(
        name="l2_read",
        parameters=(
            Parameter("a", Role.READ),
            Parameter("sums", Role.WRITE),
            Parameter("repeats", Role.SCALAR, least=1),
        ),
        shape=lambda facts, call: resident(facts, call, tiles(call) * _repeats(call)),
        accesses=_accesses,
        source="l2_bandwidth.cu",
        entry="l2_read",
        reference=_reference,
        dtypes=DTYPES,
        section="Read bandwidth of L2: a footprint read over and over (after gpu-benches, gpu-l2-cache)",
        loads_in_flight=8,
        load_bytes=16,
        checks=(_check,),
    ),
)
