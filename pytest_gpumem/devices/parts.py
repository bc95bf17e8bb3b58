"""Parts of allocations: where they may lie."""

from __future__ import annotations

from pytest_gpumem.devices.protocol import Allocation, DeviceError


def check_part(allocation: Allocation, offset: int, nbytes: int) -> None:
    """Refuse a part that is empty or does not lie within its allocation.

    Raises:
        DeviceError: names the part and the allocation.
    """
    if allocation.freed:
        raise DeviceError(f"a part of {allocation.kind.value} memory that is freed")
    if offset < 0 or nbytes <= 0 or offset + nbytes > allocation.nbytes:
        whole = f"{allocation.nbytes} bytes of {allocation.kind.value} memory"
        raise DeviceError(f"{nbytes} bytes from byte {offset} on are no part of {whole}")
