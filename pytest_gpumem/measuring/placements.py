"""Where buffers lie while they are measured: how many placements live side by side, and padding between those that do not."""

from __future__ import annotations

import numpy as np

from pytest_gpumem.units import GiB, MiB

PADDING_STEP = 2 * MiB
"""Device memory is mapped in pages of 2 MiB: less padding would not move anything."""
MOST_PADDING = 64
"""Steps of padding at most, 128 MiB."""
MOST_PLACEMENTS_FACTOR = 4
"""Placements may grow to this many times the wanted number: while the interval is too wide, or at once where they are small."""
SMALL_BYTES = 16 * GiB
"""Memory up to which placements beyond the wanted number are made at once: what copying their content takes stays at milliseconds."""
MEMORY_SHARE = 0.5
"""Share of the free memory that placements side by side may take."""


def side_by_side(set_bytes: int, wanted: int, most: int, free: int) -> int:
    """How many placements to make at once; 0 where not even one more fits.

    Args:
        set_bytes: bytes of the buffers that make one placement.
        wanted: how many are wanted.
        most: how many there may be where they are small.
        free: bytes of device memory that are free.
    """
    count = max(wanted, min(most, SMALL_BYTES // set_bytes))
    return min(count, int(free * MEMORY_SHARE) // set_bytes)


def padding(random: np.random.Generator) -> int:
    """Bytes of memory to hold, so that what is allocated next lies elsewhere."""
    return int(random.integers(1, MOST_PADDING + 1)) * PADDING_STEP
