"""The duet's verdict: base against head by pairs of fresh processes, looked at a few times that are fixed beforehand.

The datum is one pair's d = log(head / base) of the two processes' latencies, their launch overhead put to the same (`spread.level`).
Under "no change" d is as likely d as -d, whatever its distribution; nothing else is assumed, so the test is the exact signed-rank test
(Wilcoxon 1945) and its bounds are order statistics of the Walsh averages (Hodges and Lehmann 1963).

`max_regression` = delta; at each look

- FAIL: the lower bound is above the margin, delta/2. Error spent over all looks of one test: `ALARM`, and Holm's step (Holm 1979) over
  the family at `FAMILY`, whichever is stricter;
- PASS: the upper bound is below delta. Error spent over all looks: `MISS`;
- else go on; after the last look INCONCLUSIVE, with the slow-down that could have been resolved.

The error is shared out over the looks by the union bound, which holds however the looks hang together: half to the last, the rest in
equal parts to the earlier ones that can use it; of the error of PASS a quarter to the first that can use so much, because most tests are
unchanged and are done there. n pairs give no p-value below 2^-n, which is why the number of pairs follows from the family's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.units import format_share
from pytest_gpumem.verdicts.finding import between, change, counted

ALARM = 1e-3
"""Most unchanged tests that fail, of all verdicts; holds up to a true slow-down of delta/2."""
FAMILY = 0.05
"""Most suites in which any unchanged test fails."""
MISS = 0.004
"""Most slow-downs of delta that pass. What is left of 1 % is for those that stay undecided."""
LOWER, UPPER = 1e-3, 1e-2
"""One-sided errors of the bounds that are shown; a verdict keeps stricter ones."""
ROUNDS = 96
"""Pairs at most, by default: enough for the noisiest kernel on record, 2 MiB on an H200, at delta = 1 % (ci/bench/duet_simulation.py)."""
EARLY = 0.25
"""Share of the error of PASS for the first look that can use it: 10 pairs."""
GROWTH = 1.6
"""Pairs at a look over those at the one before."""
MANY = 10
"""Tests above which a shift of all of them together is tested first."""
FIRST_LOOKS = 3
"""Looks that the common shift gets: it is a mean over many tests, and what these cannot decide is left to the single tests."""
MIDDLE = 0.25
"""Share of tests that is cut off at each end for the common shift, so that one test which is three times as slow makes no common shift."""


class TooFewRounds(ValueError):
    """So few pairs that no verdict could ever be reached: one line with the least number."""


@dataclass(frozen=True)
class Plan:
    """When to look, and what error each look may spend."""

    family: int
    """Tests that are judged together."""
    looks: tuple[int, ...]
    """Pairs at each look, ascending, even: the order of base and head is balanced over two pairs."""
    level: float
    """Error of Holm's first step, at most `ALARM`: what the smallest p-value of the family must keep."""
    alarm: tuple[float, ...]
    """Share of a test's error of FAIL that each look spends; 0 where 2^-n is above it. Sums to 1."""
    miss: tuple[float, ...]
    """Share of the error of PASS that each look spends, likewise."""

    @property
    def reason(self) -> str:
        """Why so many pairs, in one sentence."""
        first = next(n for n, share in zip(self.looks, self.alarm, strict=True) if share)
        share = self.alarm[self.looks.index(first)]
        return (
            f"looks after {', '.join(map(str, self.looks))} pairs: {counted(self.family, 'measurement')} judged together allow an error of "
            f"{self.level:.2g} each (at most {ALARM:g} of verdicts, {FAMILY:.0%} of suites), of which the look after {first} pairs, the "
            f"first that can find a FAIL, spends {share:.0%}: 2^-{first} is {2.0**-first:.1g}"
        )


def plan(family: int, rounds_max: int = ROUNDS) -> Plan:
    """The looks for a family of tests.

    Args:
        family: tests that are judged together, at least 1.
        rounds_max: pairs at most; an odd number is rounded down.

    Raises:
        TooFewRounds: `rounds_max` pairs can give no verdict of both kinds.
    """
    common = ALARM if family > MANY else 0.0
    level = min(ALARM, (FAMILY - common) / family)
    last = rounds_max // 2 * 2
    least = _even(math.ceil(-math.log2(min(level, MISS))))
    if last < least:
        raise TooFewRounds(
            f"{rounds_max} rounds cannot fail any of {counted(family, 'measurement')}: n pairs give no p-value below 2^-n, and {level:.2g} "
            f"is needed; accepted are {least} rounds or more"
        )
    looks = [last]
    while (earlier := round(looks[0] / GROWTH / 2) * 2) >= 4:
        looks.insert(0, earlier)
    usable = [n for n, *shares in zip(looks, _spent(looks, level), _spent(looks, MISS, EARLY), strict=True) if any(shares)]
    return Plan(family, tuple(usable), level, _spent(usable, level), _spent(usable, MISS, EARLY))


def common_plan(whole: Plan) -> Plan:
    """The looks for the shift of all tests together: the first ones of the whole plan."""
    looks = whole.looks[: max(FIRST_LOOKS, 1 + next(i for i, n in enumerate(whole.looks) if 2.0**-n <= ALARM))]
    return Plan(1, looks, ALARM, _spent(looks, ALARM), _spent(looks, MISS, EARLY))


def _even(number: int) -> int:
    return number + number % 2


def _spent(looks: Sequence[int], level: float, early: float = 0.0) -> tuple[float, ...]:
    """Shares of an error: half to the last look, `early` to the first whose 2^-n fits into that, the rest of the half equally to the
    others before the last whose 2^-n fits in; all that nobody can use goes to the last."""
    shares = dict.fromkeys(looks, 0.0)
    others = list(looks[:-1])
    if early:
        first = next((n for n in others if 2.0**-n <= level * early), None)
        if first is not None:
            shares[first] = early
            others = [n for n in others if n > first]
    left = 0.5 - sum(shares.values())
    while others and 2.0 ** -others[0] > level * left / len(others):
        others.pop(0)
    for n in others:
        shares[n] = left / len(others)
    shares[looks[-1]] = 1 - sum(shares.values())
    return tuple(shares.values())


@dataclass(frozen=True)
class Paired:
    """What the pairs of one test say. Log-ratios are turned into shares: +0.01 is 1 % slower."""

    outcome: Outcome | None
    """PASS, FAIL or INCONCLUSIVE; None: go on."""
    pairs: int
    """Pairs that it rests on."""
    delta: float
    """Allowed slow-down."""
    change: float
    """Head over base less 1: the median of the Walsh averages (Hodges-Lehmann)."""
    low: float
    """Lower bound, 99.9 % one-sided."""
    high: float
    """Upper bound, 99 % one-sided."""
    resolvable: float
    """Slow-down that would have shown as one in 99 % of duets of this many pairs."""
    alarm: float
    """Smallest p-value of "slower than delta/2" over the looks, each over its share of the error."""
    miss: float
    """The same of "slower by less than delta"."""

    @property
    def sentence(self) -> str:
        """The verdict's one sentence, without a full stop."""
        seen = f"{change(self.change)} over {counted(self.pairs, 'pair')} of processes, {between(self.low, self.high)}"
        limit = f"max_regression {format_share(self.delta)}"
        if self.outcome is Outcome.FAIL:
            return f"slower: {seen}; beyond the margin of {format_share(self.delta / 2)} that {limit} has"
        if self.outcome is Outcome.PASS:
            return f"{seen}: within {limit}"
        undecided = "undecided" if self.outcome is None else f"{limit} cannot be decided"
        return f"{undecided}: {seen}; a slow-down of {format_share(self.resolvable)} could have been resolved"


def judge_pairs(pairs: Mapping[str, Sequence[float]], deltas: Mapping[str, float], schedule: Plan) -> dict[str, Paired]:
    """Judge a family of tests at every look that its pairs have reached, in order; a test is decided once.

    Args:
        pairs: log-ratios by test, in the order in which they were measured. A test that was decided early may have fewer than others;
            one that has not reached the first look stays open.
        deltas: allowed slow-down of each test as a share.
        schedule: the plan, for at least as many tests as there are.

    Returns:
        By test, in their order; `outcome` is None where the next look decides.
    """
    open_, alarms, misses = dict.fromkeys(pairs), dict.fromkeys(pairs, 1.0), dict.fromkeys(pairs, 1.0)
    found: dict[str, Paired] = {}
    for look, alarm_share, miss_share in zip(schedule.looks, schedule.alarm, schedule.miss, strict=True):
        reached = [key for key in open_ if len(pairs[key]) >= look]
        for key in reached:
            values, delta = np.asarray(pairs[key][:look]), deltas[key]
            if alarm_share:
                alarms[key] = min(alarms[key], p_above(values - math.log1p(delta / 2)) / alarm_share)
            if miss_share:
                misses[key] = min(misses[key], p_above(math.log1p(delta) - values) / miss_share)
        slower = _holm(alarms, schedule)
        for key in reached:
            outcome = None
            if key in slower:
                outcome = Outcome.FAIL
            elif misses[key] <= MISS and (alarm_share or centre(pairs[key][:look]) <= math.log1p(deltas[key] / 2)):
                # Where this look can find no FAIL, what seems slower than the margin waits for one that can.
                outcome = Outcome.PASS
            elif look == schedule.looks[-1]:
                outcome = Outcome.INCONCLUSIVE
            if outcome is not None:
                found[key] = _paired(outcome, pairs[key][:look], deltas[key], alarms[key], misses[key])
                del open_[key]
    for key in open_:
        found[key] = _paired(None, pairs[key], deltas[key], alarms[key], misses[key])
    return {key: found[key] for key in pairs}


def common_shift(pairs: Mapping[str, Sequence[float]]) -> list[float]:
    """One log-ratio for each pair of processes: the mean of the middle half of the tests' own.

    Swapping base and head of a pair turns the sign of all its tests together, and so of this mean: the test stays exact however the
    tests of one process hang together.

    Args:
        pairs: log-ratios by test; tests that have fewer pairs than others shorten the result.
    """
    return [float(stats.trim_mean(values, MIDDLE)) for values in zip(*pairs.values(), strict=False)]


def _holm(alarms: Mapping[str, float], schedule: Plan) -> set[str]:
    """Tests whose p-value keeps its step; one that is missing counts as 1."""
    slower: set[str] = set()
    for step, (key, alarm) in enumerate(sorted(alarms.items(), key=lambda item: item[1])):
        if alarm > min(ALARM, schedule.level * schedule.family / (schedule.family - step)):
            break
        slower.add(key)
    return slower


def _paired(outcome: Outcome | None, values: Sequence[float], delta: float, alarm: float, miss: float) -> Paired:
    middle, low, high = centre(values), lower(values, LOWER), -lower([-value for value in values], UPPER)
    return Paired(
        outcome,
        len(values),
        delta,
        math.expm1(middle),
        math.expm1(low),
        math.expm1(high),
        math.expm1(math.log1p(delta / 2) + (middle - low) + (high - middle)),
        min(alarm, 1.0),
        min(miss, 1.0),
    )


def _walsh(values: Sequence[float]) -> NDArray[np.float64]:
    """Means of every two values, each with itself too, ascending."""
    given = np.asarray(values, dtype=float)
    rows, columns = np.triu_indices(len(given))
    return np.sort((given[rows] + given[columns]) / 2)


def centre(values: Sequence[float]) -> float:
    """The median of the Walsh averages; NaN for no values."""
    return float(np.median(_walsh(values))) if len(values) else math.nan


def lower(values: Sequence[float], error: float) -> float:
    """The largest value that the exact one-sided test rejects as the centre; minus infinity where so few values reject none."""
    needed = critical(len(values), error)
    return -math.inf if needed is None else float(_walsh(values)[-needed])


def p_above(values: Iterable[float]) -> float:
    """Exact p-value of the signed-rank test against "the centre is at most 0".

    Equal sizes are ranked, and zeros are counted, in favour of "at most 0": with ties the p-value is too large, never too small.
    """
    given = np.asarray(tuple(values), dtype=float)
    order = np.lexsort((given <= 0, np.abs(given)))
    ranks = np.empty(len(given), dtype=int)
    ranks[order] = np.arange(1, len(given) + 1)
    return _p(len(given), int(ranks[given > 0].sum()))


@cache
def _p(count: int, total: int) -> float:
    """Probability that the ranks of what lies above 0 sum to `total` or more, among `count` values."""
    if count == 0 or total == 0:
        return 1.0
    left, signs = total, np.full(count, -1.0)
    for rank in range(count, 0, -1):
        if rank <= left:
            signs[rank - 1], left = 1.0, left - rank
    return float(stats.wilcoxon(signs * np.arange(1, count + 1), alternative="greater", method="exact").pvalue)


@cache
def critical(count: int, error: float) -> int | None:
    """The smallest rank sum whose p-value is at most `error`; None if no sum of `count` ranks is that rare."""
    low, high = 0, count * (count + 1) // 2
    if _p(count, high) > error:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _p(count, middle) <= error else (middle + 1, high)
    return low
