"""Who measures when: base and head in blocks of two pairs, each block in one of the two orders that balance a drift, drawn by a seed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

BASE, HEAD = "base", "head"


class Turn(NamedTuple):
    """One process of the schedule."""

    round: int
    """Number of its pair, from 1 on."""
    side: str
    """`BASE` or `HEAD`."""


def turns(seed: int) -> Iterator[Turn]:
    """All processes in their order, without end: base head head base, or head base base head, by an even draw for each two pairs.

    A drift that is linear over a block cancels within it, and the draw keeps a periodic disturbance from meeting one side alone.
    """
    block = 0
    while True:
        first, second = (BASE, HEAD) if np.random.default_rng([seed, block]).random() < 0.5 else (HEAD, BASE)
        for number, side in enumerate((first, second, second, first)):
            yield Turn(2 * block + number // 2 + 1, side)
        block += 1
