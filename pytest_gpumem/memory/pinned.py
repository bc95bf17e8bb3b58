"""Page-locked memory: how much of the host's RAM it may take, and pages that exist before anything
is measured.

Locked pages cannot be swapped, and a host without free pages stalls with everything on it: "pinned
memory should not be overused" (CUDA C++ Best Practices Guide, 9.1.1).
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Device, OutOfMemory
from pytest_gpumem.units import format_bytes, short_bytes

SHARE = 0.5  # of the RAM that the process may use, that may be page-locked


class TooMuchPinned(OutOfMemory):
    """More page-locked memory than the cap allows; nothing was allocated."""


def check_cap(device: Device, nbytes: int) -> None:
    """Raise `TooMuchPinned` if `nbytes` more of page-locked memory would pass the cap."""
    memory = device.memory.host()
    cap = int(SHARE * memory.total)
    if memory.locked + nbytes <= cap:
        return
    size = f"{format_bytes(nbytes)} of page-locked memory"
    if memory.locked:
        size += f" beside {format_bytes(memory.locked)} that are locked already"
    raise TooMuchPinned(
        f"{size} pass the cap of {short_bytes(cap)}, half of the host's "
        f"{short_bytes(memory.total)}: ask for less"
    )


def touch(array: np.ndarray[Any, Any]) -> None:
    """Write a byte of every page of a C-contiguous, writable array back to it, so that each page
    exists: all unwritten pages read from a single page of zeros, as if the link were faster."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = flat[:: mmap.PAGESIZE]
    flat[-1:] = flat[-1:]
