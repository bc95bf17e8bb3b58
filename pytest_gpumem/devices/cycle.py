"""Random cycles over the nodes of a pointer chase."""

from __future__ import annotations

from typing import Any

import numpy as np


def random_cycle(nodes: int, seed: int, length: int | None = None) -> Any:
    """For each node the next one, as 32-bit integers: a single random cycle through `length` nodes, one of each of as many equal blocks.

    Node 0 is on the cycle, and every node that is not leads there: a walk may start anywhere.

    Args:
        nodes: number of nodes.
        seed: of the order.
        length: of the cycle; default and most: all nodes. A cycle of a few is made in a fraction of the time.
    """
    random = np.random.default_rng(seed)
    if length is None or length >= nodes:
        order = random.permutation(nodes).astype(np.int32)
        following = np.empty(nodes, dtype=np.int32)
    else:
        block = nodes // length
        starts = random.permutation(length).astype(np.int32) * block
        order = np.where(starts > 0, starts + random.integers(0, block, length, dtype=np.int32), 0).astype(np.int32)
        following = np.zeros(nodes, dtype=np.int32)
    following[order] = np.roll(order, -1)
    return following
