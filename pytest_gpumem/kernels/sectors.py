"""What the memory system moves for a launch, predicted from its accesses alone (CUDA C++ Best Practices Guide, 9.2.1).

A request is a warp's, for 32 words of 4 bytes; a sector is 32 bytes. Coalesced requests touch 4 sectors.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytest_gpumem.kernels.calls import SECTORS_COALESCED
from pytest_gpumem.kernels.kernel import Access


def requested_bytes(accesses: Sequence[Access]) -> int:
    """Bytes that the threads of one launch ask for, repeats counted: over its time, the bandwidth that caches and memory serve together.

    It equals the compulsory traffic where nothing is asked for twice.
    """
    return sum(access.requested for access in accesses)


def sectors_per_request(accesses: Sequence[Access]) -> float:
    """Mean sectors of the requests of one launch: 4 if all are coalesced, up to 32.

    Raises:
        ValueError: no access asks for anything.
    """
    asked = requested_bytes(accesses)
    if not asked:
        raise ValueError("no access asks for a byte: there is no request whose sectors could be counted")
    return sum(access.requested * access.sectors_per_request for access in accesses) / asked


def predicted_share(accesses: Sequence[Access]) -> float:
    """Bandwidth over that of the same words coalesced, if time goes with the sectors moved: 4 / sectors.

    A prediction, not a bound. Sectors that neighbouring warps share are moved once, so a misaligned copy is faster; DRAM that moves more
    than a sector at a time makes wide strides slower.

    Raises:
        ValueError: no access asks for anything.
    """
    return SECTORS_COALESCED / sectors_per_request(accesses)
