"""Who measures when: base and head in pairs, each pair in an order of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

BASE, HEAD = "base", "head"


class Turn(NamedTuple):
    """One process of the schedule."""

    round: int  # number of its pair, from 1 on
    side: str  # `BASE` or `HEAD`


def turns(seed: int) -> Iterator[Turn]:
    """All processes in their order, without end: one coin a pair decides which side runs first.

    Each pair needs a coin of its own: with one coin for two pairs, noise of a period of about four processes fails unchanged code.
    """
    for number in count(1):
        first, second = (BASE, HEAD) if np.random.default_rng([seed, number]).random() < 0.5 else (HEAD, BASE)
        yield Turn(number, first)
        yield Turn(number, second)
