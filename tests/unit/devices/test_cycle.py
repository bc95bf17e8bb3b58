"""Random cycles: every node once."""

from __future__ import annotations

import numpy as np

from pytest_gpumem.kernels.latency import random_cycle


def walked(following: np.ndarray, steps: int, start: int = 0) -> list[int]:
    seen, at = [], start
    for _ in range(steps):
        seen.append(at)
        at = int(following[at])
    return [*seen, at]


def test_a_cycle_visits_every_node_once() -> None:
    for nodes in [1, 2, 3, 1000]:
        following = random_cycle(nodes, seed=5)
        *seen, last = walked(following, nodes)
        assert last == 0, nodes
        assert sorted(seen) == list(range(nodes)), nodes
        assert following.dtype == np.int32, nodes


def test_a_cycle_is_not_in_order_and_depends_on_its_seed() -> None:
    one = random_cycle(1000, seed=1)
    assert np.count_nonzero(one == np.arange(1000) + 1) < 20
    assert np.array_equal(one, random_cycle(1000, seed=1))
    assert not np.array_equal(one, random_cycle(1000, seed=2))
