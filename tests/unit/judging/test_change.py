"""The decider of a slow-down, for both sources of data."""

from __future__ import annotations

import pytest

from pytest_gpumem.judging.change import Evidence, decide_change
from pytest_gpumem.outcomes import Outcome


@pytest.mark.parametrize(
    ("slower", "within", "same_code", "outcome"),
    [
        (True, False, False, Outcome.FAIL),
        (True, False, True, Outcome.FAIL),  # whatever ran
        (True, True, False, Outcome.FAIL),  # of two claims that exclude each other, the worse one
        (False, True, False, Outcome.PASS),
        (False, False, True, Outcome.PASS),
        (False, False, False, Outcome.UNDECIDED),
    ],
)
def test_what_is_beyond_doubt_decides(
    slower: bool, within: bool, same_code: bool, outcome: Outcome
) -> None:
    assert decide_change(Evidence(slower, within, same_code)) is outcome
