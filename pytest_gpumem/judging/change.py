"""The decider of a slow-down: whether a row is slower than base by more than its limit allows.

There are two sources of data: one run against the saved runs of a baseline (`judging.screen`), and pairs of fresh processes
(`judging.paired`). Each states by its own arithmetic what is beyond doubt; the verdict on the change is made here alone.
"""

from __future__ import annotations

from typing import NamedTuple

from pytest_gpumem.outcomes import Outcome


class Evidence(NamedTuple):
    """What the data of one row show, at the error rates of their source."""

    slower: bool  # by more than the limit allows, also among all rows that are judged together
    within: bool  # by less than the limit allows
    same_code: bool = False
    """Nearly within it, and both sides ran the same machine code: only noise is left."""


def decide_change(evidence: Evidence) -> Outcome:
    """FAIL, PASS, or UNDECIDED where the data leave a doubt."""
    if evidence.slower:
        return Outcome.FAIL
    return Outcome.PASS if evidence.within or evidence.same_code else Outcome.UNDECIDED
