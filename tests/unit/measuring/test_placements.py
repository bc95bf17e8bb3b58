"""How many placements lie side by side, and padding between those that do not."""

from __future__ import annotations

import numpy as np

from pytest_gpumem.measuring.target import (
    MOST_PADDING,
    PADDING_STEP,
    SMALL_BYTES,
    padding,
    side_by_side,
)
from pytest_gpumem.units import GiB, MiB

PLENTY = 1024 * GiB


def test_side_by_side() -> None:
    for set_bytes, free, count in [
        (6 * MiB, PLENTY, 32),  # small: all that there may be
        (SMALL_BYTES // 20, PLENTY, 20),  # as many as stay small together
        (SMALL_BYTES // 8, PLENTY, 8),
        (SMALL_BYTES, PLENTY, 8),  # large: what is wanted
        (4 * GiB, 64 * GiB, 8),  # half of the free memory
        (4 * GiB, 63 * GiB, 7),
        (4 * GiB, 8 * GiB, 1),
        (4 * GiB, 7 * GiB, 0),
        (6 * MiB, 0, 0),
    ]:
        assert side_by_side(set_bytes, wanted=8, most=32, free=free) == count, (
            set_bytes,
            free,
            count,
        )


def test_padding_moves_what_comes_next_by_whole_pages() -> None:
    drawn = [padding(np.random.default_rng(seed)) for seed in range(300)]
    assert {d % PADDING_STEP for d in drawn} == {0}
    assert min(drawn) >= PADDING_STEP
    assert max(drawn) <= MOST_PADDING * PADDING_STEP
    assert len(set(drawn)) > 40
