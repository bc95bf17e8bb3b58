"""The search for the commit that made a test slower: which commit comes next, what its pairs prove, and when it ends. Pure.

Commits lie on a line: 0 is good, the last one is bad. A duet of good and bad proves that there is a change, and estimates it: the whole.
Every further commit is compared with good. It is on bad's side if it is slower by more than half of the whole, and on good's side if it
is slower by less, each with an error of `STEP` at most over all pairs together (`paired`). Half is the farthest from both.

A commit between two equal changes lies at half itself, which no number of pairs decides. After `PATIENT` pairs, any bound serves that
leaves a proven part of the whole between the two sides, and the search goes on by that bound.

The search proposes a commit; a duet of it and its parent, by fresh pairs, proves it: slower by more than 1 / `PARTS` of the whole, with an
error of `CONFIRM` at most. If the duet proves the contrary instead, the search repeats once, by times alone and with a smaller error a
step. At most `SEARCHES` commits are therefore put to this proof, and the commit that is named is wrong in `WRONG` of searches at most.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pytest_gpumem.judging.paired import MISS, Bet, Judge, Paired, centre, far_beyond
from pytest_gpumem.outcomes import Outcome

WRONG = 0.01  # largest share of searches that name a commit without the change
SEARCHES = 2  # commits that are put to the proof at most
CONFIRM = WRONG / SEARCHES  # error of the proof of one commit
STEP = MISS  # error of a step, each way
STEP_AGAIN = STEP / 10  # the same, in the second search
PARTS = 8  # bounds at which a commit is compared with good: multiples of 1 / `PARTS` of the whole
PATIENT = 24
"""Pairs of a step after which any bound serves that leaves a part of the whole on both sides."""


@dataclass(frozen=True)
class Level:
    """What the pairs of a commit prove: slower than good by more than `low` and by less than `high`, in parts of the whole."""

    low: int = 0
    high: int = PARTS


GOOD, BAD = Level(0, 0), Level(PARTS, PARTS)


class Levels:
    """What pairs prove of a commit, after every pair."""

    def __init__(self, whole: float, error: float) -> None:
        """No pair yet.
        `whole`: log-ratio of bad to good.
        `error`: of each side, over all pairs together.
        """
        self._error = error
        self._values: list[float] = []
        self._bets = {
            side: [
                Bet(
                    whole * part / PARTS, side, whole * (PARTS - part if side > 0 else part) / PARTS
                )
                for part in range(1, PARTS)
            ]
            for side in (1, -1)
        }

    def of(self, values: Sequence[float]) -> Level:
        """After these pairs, which begin with those of the call before: log-ratios to good, in the order of measurement."""
        for value in values[len(self._values) :]:
            self._values.append(value)
            for bet in (*self._bets[1], *self._bets[-1]):
                bet.take(value)
        # The first bound that is not proven ends it: a wrong level then needs one wrong bet, the first that can be wrong.
        low = sum(1 for _ in takewhile(self._proven, self._bets[1]))
        high = PARTS - sum(1 for _ in takewhile(self._proven, reversed(self._bets[-1])))
        return Level(low, max(low, high))

    def _proven(self, bet: Bet) -> bool:
        return bet.p_value <= self._error or far_beyond(
            [bet.side * value for value in self._values], bet.side * bet.bound, self._error
        )


@dataclass
class Search:
    """One search on the line."""

    low: int  # the last commit that is known to be on good's side
    high: int  # the first commit that is known to be on bad's side
    error: float = STEP
    levels: tuple[Level, Level] = (GOOD, BAD)  # of these two commits
    bound: int = PARTS // 2  # in parts of the whole, what separates the sides

    def next(self, skipped: Collection[int]) -> int | None:
        """The commit in the middle of those that are left; None if none is."""
        left = [index for index in range(self.low + 1, self.high) if index not in skipped]
        return min(left, key=lambda index: abs(2 * index - self.low - self.high)) if left else None

    def side(self, found: Level, pairs: int | None = None) -> bool | None:
        """Whether a commit is on bad's side; None if it is not decided.
        `pairs`: that `found` rests on; None: no more will follow.
        """
        if found.low >= self.bound:
            return True
        if found.high <= self.bound:
            return False
        if pairs is not None and pairs < PATIENT:
            return None
        below, above = found.low - self.levels[0].high, self.levels[1].low - found.high
        return None if max(below, above) <= 0 else below >= above

    def take(self, index: int, found: Level, bad: bool) -> None:
        """Go on to one side of a commit."""
        if bad:
            self.high, self.levels = index, (self.levels[0], found)
        else:
            self.low, self.levels = index, (found, self.levels[1])
        (_, least), (most, _) = ((one.low, one.high) for one in self.levels)
        if not least <= self.bound <= most:
            self.bound = (least + most) // 2


def of_step(search: Search, whole: float) -> Judge:
    """Judges the one measurement of a commit against good: FAIL on bad's side, PASS on good's."""

    levels = Levels(whole, search.error)

    def judge(
        pairs: Mapping[str, Sequence[float]], _deltas: Mapping[str, float], _same: Collection[str]
    ) -> dict[str, Paired]:
        found = {}
        for key, values in pairs.items():
            bad = search.side(levels.of(values), len(values))
            outcome = None if bad is None else Outcome.FAIL if bad else Outcome.PASS
            found[key] = _paired(outcome, values, whole * search.bound / PARTS, whole)
        return found

    return judge


def of_proof(whole: float) -> Judge:
    """Judges the commit that a search proposes against its parent: FAIL if it carries a part of the whole, PASS if it does not."""

    def judge(
        pairs: Mapping[str, Sequence[float]], _deltas: Mapping[str, float], _same: Collection[str]
    ) -> dict[str, Paired]:
        found = {}
        for key, values in pairs.items():
            # Also a gross change takes as many pairs as its interval needs.
            paired = _paired(None, values, whole / PARTS, whole)
            outcome = (
                Outcome.FAIL
                if paired.alarm <= CONFIRM
                else Outcome.PASS
                if paired.miss <= CONFIRM
                else None
            )
            found[key] = _paired(outcome, values, whole / PARTS, whole)
        return found

    return judge


def _paired(outcome: Outcome | None, values: Sequence[float], bound: float, whole: float) -> Paired:
    slow, fine = Bet(bound, 1, whole - bound), Bet(bound, -1, bound)
    for value in values:
        slow.take(value)
        fine.take(value)
    return Paired(outcome, tuple(values), math.expm1(bound), slow.p_value, fine.p_value)


def whole_of(start: Paired) -> float:
    """The whole as a log-ratio, by the pairs of good and bad."""
    return centre(start.log_ratios)


def steps_of(commits: int) -> int:
    """About how many commits a search of so many compares with good."""
    return max(0, math.ceil(math.log2(max(1, commits))))
