"""Page-locked memory: how much of the host's RAM it may take, and pages that exist before anything is measured.

Locked pages cannot be swapped, and a host without free pages stalls with everything on it: "pinned memory should not be overused"
(CUDA C++ Best Practices Guide, 9.1.1).
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
    """Refuse `nbytes` more of page-locked memory if all buffers together would pass the cap.
    Raises `TooMuchPinned`: names what was asked for, what is locked already, and the cap.
    """
    memory = device.memory.host()
    cap = int(SHARE * memory.total)
    if memory.locked + nbytes <= cap:
        return
    already = (
        f" beside {format_bytes(memory.locked)} that are locked already" if memory.locked else ""
    )
    raise TooMuchPinned(
        f"{format_bytes(nbytes)} of page-locked memory{already} pass the cap of {short_bytes(cap)}, half of the host's "
        f"{short_bytes(memory.total)}: ask for less"
    )


def touch(array: np.ndarray[Any, Any]) -> None:
    """Write one byte of every page of a C-contiguous, writable array back to it, so that each page exists and is the array's own. A page
    that nobody has written is no memory: all of them read from one page of zeros, which looks as if the link were faster."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = flat[:: mmap.PAGESIZE]
    flat[-1:] = flat[-1:]
