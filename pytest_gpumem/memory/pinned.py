"""Page-locked memory: how much of the host's RAM it may take, and pages that exist before anything is measured.

Locked pages cannot be swapped, and a host without free pages stalls with everything on it: "pinned memory should not be overused"
(CUDA C++ Best Practices Guide, 9.1.1).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_gpumem.devices.protocol import Device, OutOfMemory
from pytest_gpumem.units import format_bytes, short_bytes

DEFAULT_SHARE = 0.5  # default share of the host's RAM that may be page-locked


class TooMuchPinned(OutOfMemory):
    """More page-locked memory than the cap allows; nothing was allocated."""


@dataclass(frozen=True)
class PinnedCap:
    """The cap on page-locked host memory of one device, all buffers together."""

    share: float = DEFAULT_SHARE  # of the RAM that the process may use, in (0, 1]
    origin: str = "default"  # where it was set, such as "gpumem_pinned_share in pytest.ini"

    def check(self, device: Device, nbytes: int) -> None:
        """Refuse `nbytes` more of page-locked memory if they would pass the cap.
        Raises `TooMuchPinned`: names what was asked for, what is locked already, the cap and where it was set.
        """
        memory = device.memory.host()
        cap = int(self.share * memory.total)
        if memory.locked + nbytes <= cap:
            return
        already = (
            f" beside {format_bytes(memory.locked)} that are locked already"
            if memory.locked
            else ""
        )
        raise TooMuchPinned(
            f"{format_bytes(nbytes)} of page-locked memory{already} pass the cap of {short_bytes(cap)}, {100 * self.share:.4g} % of the "
            f"host's {short_bytes(memory.total)} ({self.origin}): ask for less, or raise gpumem_pinned_share"
        )


def touch(array: np.ndarray[Any, Any]) -> None:
    """Write one byte of every page of a C-contiguous, writable array back to it, so that each page exists and is the array's own. A page
    that nobody has written is no memory: all of them read from one page of zeros, which looks as if the link were faster."""
    flat = array.reshape(-1).view(np.uint8)
    flat[:: mmap.PAGESIZE] = flat[:: mmap.PAGESIZE]
    flat[-1:] = flat[-1:]
