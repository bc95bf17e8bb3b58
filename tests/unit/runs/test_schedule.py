from __future__ import annotations

from itertools import islice

import pytest

from pytest_gpumem.runs.experiment import Processes, pairs
from pytest_gpumem.runs.processes import BASE, HEAD, Turn


def test_each_pair_has_a_coin_of_its_own() -> None:
    """A coin for two pairs fails unchanged code whose noise has a period of four processes."""
    drawn = list(islice(pairs(), 800))
    assert [turn.round for turn in drawn] == [1 + i // 2 for i in range(800)]
    assert all({drawn[i].side, drawn[i + 1].side} == {BASE, HEAD} for i in range(0, 800, 2))
    first = [turn.side == BASE for turn in drawn[::2]]
    assert 150 <= sum(first) <= 250
    for begin in (0, 1):  # what one pair drew says nothing of the next
        assert (
            60
            <= sum(
                one == other
                for one, other in zip(first[begin::2], first[begin + 1 :: 2], strict=False)
            )
            <= 140
        )
    assert drawn == list(islice(pairs(), 800))


def test_a_pair_that_is_run_again_leaves_no_process_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[Turn] = []

    class Fake:
        def __init__(self, turn: Turn, tests: object) -> None:
            self.turn = turn
            begun.append(turn)

        def run(self, *given: object, **named: object) -> Fake:
            return self

        def close(self) -> None:
            pass

    processes = Processes({}, (), (), {}, ahead=2)
    monkeypatch.setattr(processes, "_worker", Fake)
    coming = list(islice(pairs(), 12))
    for index in (
        0,
        1,
        0,
        1,
        2,
        3,
        4,
        5,
    ):  # the first pair showed that the sides measure in different ways
        assert processes.run(coming[index:], None, 1).turn == coming[index]
    assert [begun.count(turn) for turn in coming] == [2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    processes.close()
