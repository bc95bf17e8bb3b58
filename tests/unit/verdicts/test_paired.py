"""The duet's statistics: exact tests against enumeration, the looks, and its error rates by simulation (ci/bench has more of it)."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.verdicts import paired
from pytest_gpumem.verdicts.paired import ALARM, MISS, ROUNDS, TooFewRounds, common_plan, common_shift, judge_pairs, lower, p_above, plan

DELTA = 0.01


def judged(values: object, schedule: paired.Plan | None = None, delta: float = DELTA) -> paired.Paired:
    return judge_pairs({"t": list(np.asarray(values, dtype=float))}, {"t": delta}, schedule or plan(1))["t"]


def enumerated(values: list[float]) -> float:
    """The p-value by all signs, sizes ranked without ties."""
    ranks = stats.rankdata(np.abs(values))
    seen = ranks[np.asarray(values) > 0].sum()
    sums = [ranks[list(chosen)].sum() for size in range(len(values) + 1) for chosen in itertools.combinations(range(len(values)), size)]
    return float(np.mean(np.array(sums) >= seen))


@pytest.mark.parametrize("count", [1, 4, 9])
def test_the_p_value_is_that_of_all_signs(count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(10):
        values = list(rng.normal(0.5, 1, count))
        assert p_above(values) == pytest.approx(enumerated(values), rel=1e-9)


def test_a_tail_of_many_pairs_is_exact() -> None:
    assert p_above([1.0 + i for i in range(60)]) == pytest.approx(2.0**-60)
    assert p_above([-1.0, *(2.0 + i for i in range(59))]) == pytest.approx(2 * 2.0**-60)


def test_ties_and_zeros_make_no_p_value_too_small() -> None:
    # Broken in any other order the p-value is smaller; an average over the orders, as mid-ranks take it, too.
    values = [1.0, 1.0, -1.0, 1.0, 2.0, 0.0, 2.0]
    rng = np.random.default_rng(1)
    others = [enumerated(list(np.array(values) + rng.normal(0, 1e-6, 7))) for _ in range(200)]
    assert p_above(values) >= max(others)
    assert p_above([0.0] * 20) == 1.0
    assert p_above([]) == 1.0


def test_bounds_are_where_the_test_turns() -> None:
    values = list(np.random.default_rng(3).normal(0, 1, 20))
    for error in (1e-4, 1e-2):
        bound = lower(values, error)
        assert p_above(np.array(values) - (bound - 1e-9)) <= error < p_above(np.array(values) - (bound + 1e-9))
    assert lower(values[:6], 1e-2) == -math.inf  # 2^-6 is more


def test_the_looks_follow_from_the_family() -> None:
    for family in (1, 10, 11, 300, 10_000):
        schedule = plan(family)
        assert schedule.looks == tuple(sorted(schedule.looks))
        assert all(n % 2 == 0 for n in schedule.looks)
        assert schedule.level <= ALARM
        assert schedule.level * family <= paired.FAMILY
        for shares, level in ((schedule.alarm, schedule.level), (schedule.miss, MISS)):
            assert sum(shares) == pytest.approx(1)
            assert all(share == 0 or 2.0**-n <= share * level for n, share in zip(schedule.looks, shares, strict=True))
        first = next(n for n, share in zip(schedule.looks, schedule.alarm, strict=True) if share)
        assert f"the look after {first} pairs, the first that can find a FAIL" in schedule.reason
    assert plan(10_000).alarm[1] == 0 < plan(1).alarm[1]


@pytest.mark.parametrize(("family", "least"), [(1, 10), (300, 14), (10_000, 18)])
def test_too_few_rounds_are_refused_with_the_least_number(family: int, least: int) -> None:
    with pytest.raises(TooFewRounds, match=f"accepted are {least} rounds or more"):
        plan(family, least - 1)
    schedule = plan(family, least)
    assert judged([0.1] * least, schedule).outcome is Outcome.FAIL
    assert judged([0.0] * least, schedule).outcome is Outcome.PASS


def test_plain_cases() -> None:
    rng = np.random.default_rng(4)
    noise = rng.normal(0, 0.0018, ROUNDS)
    same, slower = judged(noise), judged(noise + math.log1p(DELTA))
    assert (same.outcome, same.pairs) == (Outcome.PASS, 10)
    assert (slower.outcome, slower.pairs) == (Outcome.FAIL, 16)
    assert same.high < DELTA
    assert slower.low > DELTA / 2
    assert slower.change == pytest.approx(0.01, abs=0.002)
    assert slower.sentence.startswith("slower: +1.")
    assert "16 pairs of processes" in slower.sentence
    faster = judged(noise - 0.05)
    assert faster.outcome is Outcome.PASS


def test_before_the_first_look_nothing_is_decided() -> None:
    assert judged([0.5] * 11).outcome is None
    assert (judged([0.5]).low, judged([0.5]).high) == (-1, math.inf)


def test_a_slow_down_between_margin_and_delta_fails_where_it_is_resolved() -> None:
    """At the first look, which can find no FAIL, the upper bound is below delta already."""
    found = judged(np.random.default_rng(5).normal(math.log1p(0.0085), 0.0001, ROUNDS))
    assert (found.outcome, found.pairs) == (Outcome.FAIL, 16)


def test_noise_that_hides_delta_is_inconclusive_and_says_what_would_have_shown() -> None:
    found = judged(np.random.default_rng(6).normal(math.log1p(0.007), 0.05, ROUNDS))
    assert found.outcome is Outcome.INCONCLUSIVE
    assert found.resolvable > DELTA
    assert "max_regression 1.00 % cannot be decided" in found.sentence
    assert "could have been resolved" in found.sentence
    # What is called resolvable is caught.
    rng = np.random.default_rng(7)
    caught = [judged(rng.normal(math.log1p(found.resolvable), 0.05, ROUNDS)).outcome is Outcome.FAIL for _ in range(100)]
    assert sum(caught) >= 97


def test_holm_over_the_family() -> None:
    """What fails alone need not fail among 300; many that are slow fail together by Holm's later steps."""
    rng = np.random.default_rng(8)
    quiet = {f"q{i}": list(rng.normal(0, 0.001, ROUNDS)) for i in range(299)}
    whole = plan(300)
    n, share = next((n, share) for n, share in zip(whole.looks, whole.alarm, strict=True) if share)
    critical_alone = paired.critical(n, ALARM * share)
    critical_many = paired.critical(n, whole.level * share)
    assert critical_alone is not None
    assert critical_many is not None
    assert critical_alone < critical_many
    # Ranks below the margin that sum to what only the looser level allows.
    below = n * (n + 1) // 2 - critical_alone
    values = [math.log1p(DELTA / 2) + (i + 1) * 1e-3 * (-1 if i + 1 == below else 1) for i in range(n)]
    assert 1 <= below <= n
    alone = judge_pairs({"t": values}, {"t": DELTA}, paired.Plan(1, whole.looks, ALARM, whole.alarm, whole.miss))
    assert alone["t"].outcome is Outcome.FAIL
    among = judge_pairs({"t": values, **quiet}, dict.fromkeys(["t", *quiet], DELTA), whole)
    assert among["t"].outcome is None
    assert all(among[key].outcome is Outcome.PASS for key in quiet)
    fast = {key: [0.1] * n for key in quiet}
    together = judge_pairs({"t": values, **fast}, dict.fromkeys(["t", *fast], DELTA), whole)
    assert together["t"].outcome is Outcome.FAIL


def test_one_slow_test_is_no_common_shift_and_a_shift_of_all_is() -> None:
    rng = np.random.default_rng(9)
    tests = {f"t{i}": list(rng.normal(0, 0.007, ROUNDS)) for i in range(20)}
    schedule = common_plan(plan(20))
    assert judged(common_shift({**tests, "slow": [2.0] * ROUNDS}), schedule).outcome is Outcome.PASS
    shifted = {key: [value + math.log1p(DELTA) for value in values] for key, values in tests.items()}
    found = judged(common_shift(shifted), schedule)
    assert found.outcome is Outcome.FAIL
    assert found.pairs <= 22
    assert schedule.looks == plan(20).looks[:3]


# Error rates. Spreads between processes as measured, levelled: ci/records/nvidia-h200/peers.json and peers_random.json.
SPREADS = {"2 MiB": 0.00534, "32 MiB": 0.0013, "256 MiB": 0.0004}


def outcomes(change: float, spread: float, trials: int, seed: int) -> tuple[Counter[Outcome | None], float]:
    rng = np.random.default_rng(seed)
    counts: Counter[Outcome | None] = Counter()
    pairs = 0
    for _ in range(trials):
        found = judged(rng.normal(math.log1p(change), spread * math.sqrt(2), ROUNDS))
        counts[found.outcome] += 1
        pairs += found.pairs
    return counts, pairs / trials


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_unchanged_code_passes(spread: float) -> None:
    counts, pairs = outcomes(0.0, spread, 1000, 10)
    assert counts[Outcome.FAIL] == 0
    assert counts[Outcome.PASS] >= 990
    assert pairs < 20


@pytest.mark.parametrize("spread", SPREADS.values(), ids=SPREADS)
def test_a_slow_down_of_delta_is_caught(spread: float) -> None:
    counts, _ = outcomes(DELTA, spread, 1000, 11)
    assert counts[Outcome.FAIL] >= 983  # 99 % less three standard deviations


def test_the_margin_itself_alarms_as_rarely_as_promised() -> None:
    """The worst unchanged code there is: a true slow-down of delta/2, whatever the distribution."""
    rng = np.random.default_rng(12)
    alarms = 0
    for draw in (rng.standard_normal, lambda n: rng.standard_t(2, n), lambda n: rng.choice([-1.0, 1.0], n) * (1 + 0.1 * rng.random(n))):
        for _ in range(700):
            alarms += judged(math.log1p(DELTA / 2) + 0.003 * draw(ROUNDS)).outcome is Outcome.FAIL
    assert alarms <= 8  # 2.1 expected at most; more than 8 in 4e-4 of runs
