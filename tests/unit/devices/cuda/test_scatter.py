"""Blocks at random places of one region."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpumem.devices.cuda.allocations import needed_bytes, scattered
from pytest_gpumem.units import GiB, MiB

PAGE = 2 * MiB


@given(
    sizes=st.lists(st.integers(1, 300 * MiB), min_size=1, max_size=60),
    spare=st.integers(0, 10 * GiB),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_are_aligned_and_apart_and_inside_the_region(
    sizes: list[int], spare: int, seed: int
) -> None:
    region = needed_bytes(sizes) + spare
    offsets = scattered(sizes, region, seed)
    assert len(offsets) == len(sizes)
    # As allocations of their own would be: on a page where one of them is large.
    alignment = PAGE if max(sizes) >= MiB else 512
    assert all(offset % alignment == 0 for offset in offsets)
    blocks = sorted(zip(offsets, sizes, strict=True))
    assert blocks[0][0] >= 0
    assert all(first + size <= second for (first, size), (second, _) in pairwise(blocks))
    assert blocks[-1][0] + blocks[-1][1] <= region
    assert offsets == scattered(sizes, region, seed)


def test_order_and_places_are_random() -> None:
    sizes = [32 * MiB] * 6
    region = needed_bytes(sizes)
    drawn = [scattered(sizes, region, seed) for seed in range(500)]
    orders = {tuple(np.argsort(offsets)) for offsets in drawn}
    assert len(orders) > 300  # of 720
    # Not the order alone: the distance between neighbours varies, and any block lies anywhere.
    gaps = {b - a - 32 * MiB for offsets in drawn for a, b in pairwise(sorted(offsets))}
    assert min(gaps) == 0
    assert len(gaps) > 10
    first = [offsets[0] for offsets in drawn]
    assert min(first) < 0.1 * region
    assert max(first) + 32 * MiB > 0.9 * region


def test_there_is_room_for_chance() -> None:
    """A quarter of the blocks, and 64 MiB at least."""
    assert needed_bytes([MiB * 512] * 4) == 2560 * MiB
    assert needed_bytes([PAGE]) == PAGE + 64 * MiB
    assert needed_bytes([PAGE + 1]) == 2 * PAGE + 64 * MiB
    assert needed_bytes([1000]) == 1024 + 64 * MiB
