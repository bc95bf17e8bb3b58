"""Random cycles: every node once, or a few nodes spread over all."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem.kernels.latency import random_cycle


def walked(following: np.ndarray, steps: int, start: int = 0) -> list[int]:
    seen, at = [], start
    for _ in range(steps):
        seen.append(at)
        at = int(following[at])
    return [*seen, at]


@pytest.mark.parametrize("nodes", [1, 2, 3, 1000])
@pytest.mark.parametrize("length", [None, 5000])
def test_a_cycle_visits_every_node_once(nodes: int, length: int | None) -> None:
    following = random_cycle(nodes, seed=5, length=length)
    *seen, last = walked(following, nodes)
    assert last == 0
    assert sorted(seen) == list(range(nodes))
    assert following.dtype == np.int32


@pytest.mark.parametrize("nodes", [1000, 1007])
def test_a_short_cycle_visits_one_node_of_each_block_and_every_other_leads_to_it(
    nodes: int,
) -> None:
    following = random_cycle(nodes, seed=5, length=100)
    *seen, last = walked(following, 100)
    assert last == 0
    assert sorted(at // 10 for at in seen) == list(range(100))
    outside = next(at for at in range(nodes) if at not in seen)
    assert walked(following, 1, outside)[-1] == 0
    assert len({at % 10 for at in seen}) == 10


@pytest.mark.parametrize("length", [None, 300])
def test_a_cycle_is_not_in_order_and_depends_on_its_seed(length: int | None) -> None:
    one = random_cycle(1000, seed=1, length=length)
    assert np.count_nonzero(one == np.arange(1000) + 1) < 20
    assert np.array_equal(one, random_cycle(1000, seed=1, length=length))
    assert not np.array_equal(one, random_cycle(1000, seed=2, length=length))
