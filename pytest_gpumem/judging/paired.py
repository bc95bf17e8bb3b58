"""The duet's verdict: base against head by pairs of fresh processes, judged after every pair.

The datum is d = log(head / base) of the latencies of a pair of processes, corrected for launch overhead. For every pair, a coin decides
which side runs first. If head is slower by m, the sign of d - m is therefore a fair coin, given its size and all earlier pairs. This
assumes nothing about the distribution of the noise, nor about its correlation in time.

`max_regression` = delta. A bet on the sign of each pair against "slower by at most delta" multiplies a wealth that starts at 1, and so
does a second bet against "slower by delta or more". By Ville's inequality, either wealth exceeds 1/a with probability a at most, over all
pairs together (Ramdas, Gruenwald, Vovk and Shafer 2023, "Game-theoretic statistics and safe anytime-valid inference"). So a duet may stop
after any pair, and may continue later.

- FAIL: the first wealth exceeds 1/`ALARM`, and Holm's step over the family at `ALPHA`, both with the quarter for gross changes taken off;
- PASS: the second exceeds 1/`MISS`, or 1/`MISS_SAME_CODE` if both sides ran the same machine code in every pair;
- else the duet continues; UNDECIDED after the last allowed pair.

A gross change needs fewer pairs than bets can prove. It is FAIL after the first pairs if each lies beyond delta by more than `GROSS`, and
by more than `FAR` times their own range. A slow mode of processes makes a pair look so with a probability of 1/4 at most: head's process is
in it, and base's is not. So many pairs are taken that chance makes all of them so in a quarter of the level.

The bets are about the median pair. Head alone may have a slow mode that is rarer. A third bet is against such a mode in `MODE` of head's
processes, and one pair far beyond delta loses what `MODE_PAIRS` others win. A PASS needs as much as these win, or all pairs that the duet
may take, if that is less. Where the same machine code ran, it needs no pair of such a mode.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from pytest_gpumem.judging.finding import between, change, counted
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.units import format_share

ALPHA = 0.05
GROSS = 0.1
ALARM = 1 - 0.999  # largest share of FAILs among tests that are slower by delta at most
MISS = 1 - 0.995  # largest share of PASSes among tests that are slower by delta or more
MISS_SAME_CODE = ALPHA
"""The same, among tests whose machine code is the same on both sides; and of PASSes with a slow
mode."""
STAKE = 0.95  # largest part of the wealth in one bet; choice: a pair with the wrong sign costs as much as four with the right sign earn
PRIOR = 2  # pairs that the prior of size and spread counts as; choice: speed alone depends on it
EXPECTED_SPREAD = 0.003  # prior standard deviation of a pair; choice: speed alone depends on it
FAR = 5.0  # ranges of the first pairs, or spreads of all, beyond the limit from which on a pair is far; choice
NORMAL_QUARTILE = statistics.NormalDist().inv_cdf(
    0.75
)  # median distance from the centre, in standard deviations
MODE = 0.1  # a PASS excludes that head alone has a slow mode in this share of its processes; choice: 30 pairs do it with 95 %
MODE_PAIRS = math.ceil(
    math.log(MISS_SAME_CODE) / math.log((1 - MODE) / (1 - MODE * MISS_SAME_CODE))
)
"""Pairs without a slow mode of head that exclude one in `MODE`: so many win a bet of `MISS_SAME_CODE` (`_without_mode`)."""
OF_GROSS = 0.25  # part of the error that the rule for gross changes has; choice
SETTLED = ", and the same machine code ran"
SHOWN = 1 - 2 * MISS
"""Confidence of the interval that is shown, two-sided; a verdict does not depend on it."""
EXACT = 200  # pairs up to which the interval is exact: counting all sums takes a second, and their number grows as 2 ** pairs


@dataclass
class Bet:
    """A wealth that grows while pairs lie beyond a bound."""

    bound: float  # log-ratio
    side: int  # +1: the alternative is above the bound; -1: below it
    expected: float  # prior distance from the bound
    log_wealth: float = 0.0
    most: float = 0.0  # largest logarithm of the wealth so far
    _count: int = 0
    _sum: float = 0.0
    _squares: float = 0.0

    def take(self, log_ratio: float) -> None:
        """Bet on one pair by the earlier pairs, then learn from it."""
        distance = self.side * (log_ratio - self.bound)
        weight = PRIOR + self._count
        ahead = max((PRIOR * self.expected + self._sum) / weight, 0.0)
        spread = self._squares - self._sum**2 / self._count if self._count else 0.0
        variance = (PRIOR * EXPECTED_SPREAD**2 + max(spread, 0.0)) / weight
        # Kelly's stake for a normal distance; the bet is fair because it is fixed before the sign is known.
        stake = STAKE * math.tanh(ahead / variance * distance / STAKE)
        self.log_wealth += math.log1p(stake)
        self.most = max(self.most, self.log_wealth)
        self._count += 1
        self._sum += distance
        self._squares += distance**2

    @property
    def p_value(self) -> float:
        """An upper bound of the probability of such a wealth, at any time, if the alternative is false."""
        return math.exp(-self.most)


@dataclass(frozen=True)
class Paired:
    """The verdict of the pairs of one test. Changes are shares: +0.01 is 1 % slower."""

    outcome: Outcome | None  # PASS or FAIL; None while it is open
    log_ratios: tuple[float, ...]  # one a pair, in the order of measurement
    delta: float  # allowed slow-down
    alarm: float  # anytime-valid p-value of "slower by at most delta"
    miss: float  # anytime-valid p-value of "slower by delta or more"
    gross: bool = False  # a FAIL by the rule for gross changes
    same_code: bool = False  # a PASS that rests on the same machine code too

    @property
    def slow(self) -> int:
        """Number of pairs that lie far beyond the limit."""
        return _far(self.log_ratios, math.log1p(self.delta))[0]

    @property
    def unseen(self) -> float:
        """Largest share of head's processes in which a slow mode would stay unseen, with a probability of `MISS_SAME_CODE`."""
        return 1.0 if not self.pairs else 1 - MISS_SAME_CODE ** (1 / self.pairs)

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.log_ratios)

    @property
    def change(self) -> float:
        """Head over base less 1: the median of the Walsh averages (Hodges and Lehmann 1963)."""
        return math.expm1(centre(self.log_ratios))

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """Interval of the change, 99 % two-sided, by the signed-rank test; infinite with too few pairs."""
        low, high = interval(self.log_ratios, SHOWN)
        return math.expm1(low) if math.isfinite(low) else low, math.expm1(high) if math.isfinite(
            high
        ) else high

    @property
    def least(self) -> float:
        """The least change that the pairs show: the lower end of the interval, or with too few pairs the smallest of them."""
        low = self.bounds[0]
        return low if math.isfinite(low) else math.expm1(min(self.log_ratios))

    @property
    def sentence(self) -> str:
        """The verdict's one sentence, without a full stop."""
        shown = (
            between(*self.bounds) if math.isfinite(self.bounds[0]) else "too few for an interval"
        )
        seen = f"{change(self.change)} over {counted(self.pairs, 'pair')} of processes, {shown}"
        limit = f"max_regression {format_share(self.delta)}"
        if self.outcome is Outcome.FAIL:
            return f"{seen}{', each far' if self.gross else ':'} slower than {limit} allows"
        slow = (
            f"; {self.slow} of them far beyond it, as in a slow mode of head" if self.slow else ""
        )
        if self.outcome is Outcome.PASS:
            missed = (
                slow
                or f"; a slow mode in up to {format_share(self.unseen)} of processes may be missed"
            )
            return f"{seen}: within {limit}{SETTLED if self.same_code else ''}{missed}"
        high = self.bounds[1]
        missed = (
            f"; a PASS would miss up to {format_share(high)}"
            if self.delta < high < math.inf
            else ""
        )
        return f"{seen}: at {limit}{missed}{slow}"


def least_pairs(family: int) -> int:
    """Least number of pairs that can fail a small slow-down: the wealth grows by at most 1 + `STAKE` a pair."""
    return math.ceil(-math.log(_level(family)) / math.log1p(STAKE))


def _level(family: int) -> float:
    """The p-value below which the bets fail a test: what the rule for gross changes leaves of it."""
    return (1 - OF_GROSS) * min(ALARM, ALPHA / family)


def judge_pairs(
    pairs: Mapping[str, Sequence[float]],
    deltas: Mapping[str, float],
    same: Collection[str] = (),
    *,
    clean: int = MODE_PAIRS,
) -> dict[str, Paired]:
    """Judge a family of tests by the pairs that each has so far.

    The verdict of a test depends on its pairs and on the number of other tests that fail. More pairs never revoke a verdict.
    `pairs`: log-ratios by test, in the order of measurement.
    `deltas`: allowed slow-down of each test, as a share.
    `same`: tests that ran the same machine code in the same way on both sides.
    `clean`: pairs that a PASS takes at least, if none of them shows a slow mode of head; not where the same machine code ran.
    Returns by test, in the order of `pairs`; `outcome` is None if more pairs are needed.
    """
    bets = {key: _bets(values, math.log1p(deltas[key]), clean) for key, values in pairs.items()}
    error = OF_GROSS * min(ALARM, ALPHA / max(len(pairs), 1))
    gross = {
        key for key, values in pairs.items() if far_beyond(values, math.log1p(deltas[key]), error)
    }
    slower = _holm({key: one.slow.p_value for key, one in bets.items()})
    found = {}
    for key, values in pairs.items():
        one = bets[key]
        fails = key in slower or key in gross
        settled = not fails and not one.within and key in same and one.nearly
        only_gross = key in gross and key not in slower
        passes = one.within or settled
        decided = Outcome.FAIL if fails else Outcome.PASS if passes else None
        found[key] = Paired(
            decided,
            tuple(values),
            deltas[key],
            one.slow.p_value,
            one.fine.p_value,
            only_gross,
            settled,
        )
    return found


class _Bets(NamedTuple):
    slow: Bet
    fine: Bet
    within: bool  # True once `MISS` was reached, and a slow mode excluded: a PASS is final, whatever pairs follow it
    nearly: bool  # the same with `MISS_SAME_CODE`, and without a slow mode so far


def _bets(values: Sequence[float], limit: float, clean: int) -> _Bets:
    slow, fine = Bet(limit, 1, limit / 2), Bet(limit, -1, limit)
    within = nearly = False
    for count, value in enumerate(values, 1):
        if not within:
            slow.take(value)
        fine.take(value)
        if not within and fine.p_value <= MISS_SAME_CODE:
            above, below = _far(values[:count], limit)
            of_head = max(above - below, 0)
            nearly = nearly or not of_head
            within = fine.p_value <= MISS and _without_mode(count, of_head) >= _without_mode(
                clean, 0
            )
    return _Bets(slow, fine, within, nearly)


def _without_mode(pairs: int, of_head: int) -> float:
    """The logarithm of a wealth that bets against a slow mode in `MODE` of head's processes, if `of_head` of the pairs show one. Without a
    mode, it expects the share of such pairs that makes each cost all that is needed."""
    expected = MODE * MISS_SAME_CODE
    return (pairs - of_head) * math.log((1 - expected) / (1 - MODE)) + of_head * math.log(
        expected / MODE
    )


def _far(values: Sequence[float], limit: float) -> tuple[int, int]:
    """The number of pairs whose head is slower than the limit by more than `FAR` spreads, and of those whose base is."""
    if not values:
        return 0, 0
    middle = statistics.median(values)
    spread = statistics.median(abs(value - middle) for value in values) / NORMAL_QUARTILE
    bound = limit + FAR * spread
    return sum(value > bound for value in values), sum(-value > bound for value in values)


def far_beyond(values: Sequence[float], limit: float, error: float) -> bool:
    """True if the first pairs lie above a log-ratio by more than `GROSS`, and by more than `FAR` times their own range; so many that a slow
    mode makes them so with a probability of `error` at most."""
    first = values[: math.ceil(-math.log(error, 4))]
    return len(first) >= -math.log(error, 4) and min(first) - limit > max(
        math.log1p(GROSS), FAR * (max(first) - min(first))
    )


def _holm(p_values: Mapping[str, float]) -> set[str]:
    """Tests whose p-value is below Holm's step (Holm 1979) and `ALARM`."""
    slower: set[str] = set()
    for step, (key, p_value) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        if p_value > _level(len(p_values) - step):
            break
        slower.add(key)
    return slower


def _walsh(values: Sequence[float]) -> list[float]:
    """Means of all pairs of values, each value with itself included, ascending."""
    return sorted((one + other) / 2 for index, one in enumerate(values) for other in values[index:])


def centre(values: Sequence[float]) -> float:
    """The median of the Walsh averages; NaN for no values."""
    return statistics.median(_walsh(values)) if values else math.nan


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """The interval of the centre by the signed-rank test (Wilcoxon 1945), exact up to `EXACT` values; infinite with too few values."""
    cut = _cut(len(values), (1 - confidence) / 2)
    if not cut:
        return -math.inf, math.inf
    averages = _walsh(values)
    return averages[cut - 1], averages[-cut]


@cache
def _cut(count: int, error: float) -> int:
    """Number of the smallest rank sums whose probabilities add up to `error` at most, among `count` ranks with random signs."""
    if count > EXACT:  # by the normal distribution, which gives a slightly smaller number
        mean, variance = count * (count + 1) / 4, count * (count + 1) * (2 * count + 1) / 24
        return math.floor(statistics.NormalDist(mean, math.sqrt(variance)).inv_cdf(error) + 0.5)
    ways = [1]  # number of subsets of the ranks with each sum
    for rank in range(1, count + 1):
        ways = [a + b for a, b in zip(ways + [0] * rank, [0] * rank + ways, strict=True)]
    cut = below = 0
    while (below := below + ways[cut]) <= error * 2**count:
        cut += 1
    return cut
