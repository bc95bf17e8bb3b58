from __future__ import annotations

from itertools import islice

from pytest_gpumem.duet.schedule import BASE, HEAD, turns


def test_every_two_pairs_balance_a_drift_and_the_seed_draws_their_order() -> None:
    drawn = list(islice(turns(3), 400))
    assert [turn.round for turn in drawn] == [1 + i // 2 for i in range(400)]
    orders = [tuple(turn.side for turn in drawn[i : i + 4]) for i in range(0, 400, 4)]
    assert set(orders) == {(BASE, HEAD, HEAD, BASE), (HEAD, BASE, BASE, HEAD)}
    assert 30 <= orders.count(orders[0]) <= 70
    assert drawn == list(islice(turns(3), 400))
    assert drawn != list(islice(turns(4), 400))
