"""The duet's verdicts: bets on the sign of each pair, their error rates by simulation, and the interval against scipy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from pytest_gpumem.commands import ROUNDS
from pytest_gpumem.judging.paired import (
    ALARM,
    MISS,
    MISS_SAME_CODE,
    MODE,
    MODE_PAIRS,
    STAKE,
    Bet,
    Paired,
    centre,
    interval,
    judge_pairs,
    least_pairs,
)
from pytest_gpumem.judging.screen import ALPHA
from pytest_gpumem.outcomes import Outcome

DELTA = 0.01
LIMIT = math.log1p(DELTA)
PASS, FAIL = Outcome.PASS, Outcome.FAIL
Noise = npt.NDArray[np.float64]


def judged(values: Iterable[float], delta: float = DELTA, clean: int = MODE_PAIRS) -> Paired:
    return judge_pairs({"t": [float(value) for value in values]}, {"t": delta}, clean=clean)["t"]


def decided(values: Noise, clean: int = MODE_PAIRS) -> tuple[Outcome | None, int]:
    """The verdict of a duet that stops as soon as it has one, and its pairs."""
    for count in range(1, len(values) + 1):
        if (outcome := judged(values[:count], clean=clean).outcome) is not None:
            return outcome, count
    return None, len(values)


@pytest.mark.parametrize(
    ("change", "outcome", "pairs"),
    [
        (-0.3, PASS, MODE_PAIRS),
        (0.0, PASS, MODE_PAIRS),
        (0.05, FAIL, 11),  # -log(ALARM) / log(1 + STAKE), rounded up
        (0.11, FAIL, 11),  # not 10 % beyond the limit
        (0.15, FAIL, 6),
        (0.5, FAIL, 6),
    ],
)
def test_how_many_pairs_a_verdict_takes_without_noise(
    change: float, outcome: Outcome, pairs: int
) -> None:
    assert decided(np.full(ROUNDS, math.log1p(change))) == (outcome, pairs)
    assert judged(np.full(6, math.log1p(change))).gross is (pairs == 6)
    if outcome is PASS:  # without proof against slow modes: -log(MISS) / log(1 + STAKE), rounded up
        assert decided(np.full(ROUNDS, math.log1p(change)), clean=1) == (PASS, 8)


@pytest.mark.parametrize(("family", "least"), [(1, 11), (50, 11), (300, 14), (10_000, 19)])
def test_a_larger_family_takes_more_pairs(family: int, least: int) -> None:
    assert least_pairs(family) == least
    quiet = {f"q{index}": [0.0] for index in range(min(family, 300) - 1)}
    if family <= 300:
        for count, outcome in ((least - 1, None), (least, FAIL)):
            pairs = {"t": [0.05] * count, **quiet}
            assert judge_pairs(pairs, dict.fromkeys(pairs, DELTA))["t"].outcome is outcome


@pytest.mark.parametrize(
    ("values", "gross"),
    [
        ([0.4] * 5, False),
        ([0.4, 0.41, 0.42, 0.4, 0.4, 0.4], True),
        ([0.4, 0.4, 0.1, 0.4, 0.4, 0.4], False),
        ([0.3, 0.4, 0.5, 0.4, 0.4, 0.4], False),  # not far beyond their own range
        ([0.0, *[0.4] * 6], False),  # the first six count
        ([*[0.4] * 6, 0.0], True),
    ],
)
def test_a_gross_change_shows_in_the_first_six_pairs(values: list[float], gross: bool) -> None:
    found = judged(values)
    assert (found.outcome, found.gross) == ((FAIL, True) if gross else (None, False))


@pytest.mark.parametrize(("family", "pairs"), [(1, 6), (50, 6), (300, 8)])
def test_a_gross_change_takes_more_pairs_in_a_larger_family(family: int, pairs: int) -> None:
    others = {f"q{index}": [0.0] for index in range(family - 1)}
    for count in (pairs - 1, pairs):
        taken = {"t": [0.4] * count, **others}
        assert judge_pairs(taken, dict.fromkeys(taken, DELTA))["t"].outcome is (
            FAIL if count == pairs else None
        )


def test_a_slow_mode_of_both_sides_fails_no_more_often_than_promised() -> None:
    """Half of the processes of either side are slower by 12 %: a pair looks gross in one of four."""
    rng, trials = np.random.default_rng(8), 4000
    modes = math.log1p(0.12) * (rng.random((trials, 2, 24)) < 0.5) + 0.001 * rng.standard_normal(
        (trials, 2, 24)
    )
    failed = sum(judged(one[0] - one[1]).outcome is FAIL for one in modes)
    assert failed <= stats.binom.isf(1e-3, trials, ALARM)


def test_a_slow_mode_of_head_alone_is_named_and_does_not_pass() -> None:
    slow = [0.0, 0.05, *[0.0] * 4, 0.05, *[0.0] * 60]
    found = judged(slow)
    assert found.outcome is None
    assert found.sentence.endswith(
        ": at max_regression 1.00 %; 2 of them far beyond it, as in a slow mode of head"
    )
    # One slow pair costs as much as thirty others win; what base has too is no fault of head's.
    assert decided(np.array([0.0, 0.05, *[0.0] * 94])) == (PASS, 61)
    one, both = judged([0.0, 0.05, *[0.0] * 60]), judged([*slow, -0.05, -0.05, *[0.0] * 20])
    assert (one.outcome, one.slow, both.outcome) == (PASS, 1, PASS)
    assert one.sentence.endswith(
        ": within max_regression 1.00 %; 1 of them far beyond it, as in a slow mode of head"
    )


def test_a_rare_slow_mode_of_head_seldom_passes() -> None:
    """30 % slower in a tenth of the processes: the median pair is unchanged."""
    rng, trials = np.random.default_rng(12), 200
    slow = [
        math.log1p(0.3) * (rng.random(ROUNDS) < MODE) + 0.001 * rng.standard_normal(ROUNDS)
        for _ in range(trials)
    ]
    # Once the pairs of a PASS are there, a slow one keeps it open for thirty more: three looks find every PASS.
    passed = sum(
        PASS in [judged(one[:count]).outcome for count in (MODE_PAIRS, 2 * MODE_PAIRS, ROUNDS)]
        for one in slow
    )
    assert passed <= stats.binom.isf(1e-3, trials, MISS_SAME_CODE)
    assert (1 - MODE) ** MODE_PAIRS <= MISS_SAME_CODE < (1 - MODE) ** (MODE_PAIRS - 2)


def test_a_duet_of_few_pairs_says_which_slow_mode_it_may_miss() -> None:
    for clean, count, share in ((MODE_PAIRS, 30, "9.50"), (12, 12, "22.1"), (8, 8, "31.2")):
        assert judged([0.0] * (count - 1), clean=clean).outcome is None
        found = judged([0.0] * count, clean=clean)
        assert found.outcome is PASS
        assert found.sentence.endswith(
            f"within max_regression 1.00 %; a slow mode in up to {share} % of processes may be missed"
        )
    # The same machine code in all processes needs no proof against modes, but passes with none in sight.
    same, slow = [0.0] * 5, [0.0, 0.05, *[0.0] * 20]
    assert judge_pairs({"t": same}, {"t": DELTA}, ["t"])["t"].outcome is PASS
    assert judge_pairs({"t": slow}, {"t": DELTA}, ["t"])["t"].outcome is None


def test_holms_steps_in_a_family_of_300() -> None:
    """Eleven pairs are enough alone, not among 300; where 250 others fail, they are again."""
    deltas = dict.fromkeys(["t", *(f"q{index}" for index in range(299))], DELTA)
    eleven = {"t": [0.05] * 11}
    assert judge_pairs(eleven, {"t": DELTA})["t"].alarm == pytest.approx((1 + STAKE) ** -11)
    for failing, outcome in ((0, None), (100, None), (250, FAIL), (299, FAIL)):
        others = {
            f"q{index}": [0.05] * 20 if index < failing else [0.0] * 20 for index in range(299)
        }
        found = judge_pairs({**eleven, **others}, deltas, clean=20)
        assert found["t"].outcome is outcome
        assert [found[key].outcome for key in others] == [FAIL] * failing + [PASS] * (299 - failing)


def test_each_test_has_its_own_limit() -> None:
    found = judge_pairs({"a": [0.03] * 12, "b": [0.03] * 12}, {"a": 0.01, "b": 0.05}, clean=12)
    assert {key: one.outcome for key, one in found.items()} == {"a": FAIL, "b": PASS}


STEPS = st.tuples(st.sampled_from([-0.02, 0.0, 0.0099, 0.012, 0.05, 0.3]), st.integers(1, 60))


@given(st.lists(STEPS, max_size=3))
@example([(0.0, 8), (0.05, 80)])
@example([(0.05, 11), (-0.02, 80)])
@settings(max_examples=40)
def test_more_pairs_never_take_a_verdict_back(steps: list[tuple[float, int]]) -> None:
    values = [change for change, count in steps for _ in range(count)]
    for before, after in itertools.pairwise(
        judged(values[:count], clean=8) for count in range(len(values) + 1)
    ):
        assert before.outcome is None or after.outcome is before.outcome
        assert after.alarm <= before.alarm
        assert after.miss <= before.miss


@given(st.floats(-0.1, 0.1), st.lists(st.floats(-0.1, 0.1), max_size=20), st.sampled_from([1, -1]))
def test_a_bet_is_fair_and_never_loses_all(bound: float, before: list[float], side: int) -> None:
    """Whatever came before: equal distances to both sides of the bound change the wealth by factors whose mean is 1."""
    for distance in (1e-5, 0.003, 0.2):
        wealths = []
        for sign in (1, -1):
            bet = Bet(bound, side, 0.01)
            for value in before:
                bet.take(value)
            start = bet.log_wealth
            bet.take(bound + sign * distance)
            wealths.append(math.exp(bet.log_wealth - start))
        assert sum(wealths) == pytest.approx(2)
        assert min(wealths) >= 1 - STAKE - 1e-9


def test_a_bet_stakes_nothing_while_its_pairs_lie_on_the_wrong_side() -> None:
    bet = Bet(0.01, 1, 0.005)
    for _ in range(2):
        bet.take(0.0)
    lost = bet.log_wealth
    bet.take(0.02)
    assert bet.log_wealth == lost < 0
    for _ in range(9):
        bet.take(0.02)
    assert bet.log_wealth > lost


# Noise of single processes, two for each pair


def independent(rng: np.random.Generator, count: int) -> Noise:
    return rng.normal(0, 1, count)


def heavy(rng: np.random.Generator, count: int) -> Noise:
    return rng.standard_t(2, count)


def waves(rng: np.random.Generator, count: int) -> Noise:
    """A device that is slow for two processes, then fast for two."""
    return np.where((np.arange(count) + rng.integers(4)) % 4 < 2, 1.0, -1.0) + rng.normal(
        0, 0.1, count
    )


def cycles(rng: np.random.Generator, count: int) -> Noise:
    """AR(2) with a period of about four."""
    values = np.zeros(count + 2)
    for index, kick in enumerate(rng.normal(0, 1, count), 2):
        values[index] = -0.9 * values[index - 2] + kick
    return values[2:]


def pairs_of(noise: Noise, change: float, rng: np.random.Generator) -> Noise:
    """Log-ratios of head to base, where a coin of each pair decides which side runs first."""
    first, second = noise[::2], noise[1::2]
    return math.log1p(change) + np.where(
        rng.random(len(first)) < 0.5, first - second, second - first
    )


@pytest.mark.parametrize("kind", [independent, heavy, waves, cycles])
def test_a_slow_down_of_delta_seldom_fails_and_seldom_passes(kind: object) -> None:
    """Exactly at delta both errors are possible. Chances that more trials err than are allowed here lie below 1e-3."""
    assert callable(kind)
    rng, trials = np.random.default_rng(4), 400
    drawn = [pairs_of(0.004 * kind(rng, 2 * ROUNDS), DELTA, rng) for _ in range(trials)]
    outcomes = [judged(values, clean=1).outcome for values in drawn]
    assert outcomes.count(FAIL) <= stats.binom.isf(1e-3, trials, ALARM)
    assert outcomes.count(PASS) <= stats.binom.isf(1e-3, trials, MISS)
    settled = [
        judge_pairs({"a": values}, {"a": DELTA}, ["a"])["a"].outcome for values in map(list, drawn)
    ]
    assert (
        outcomes.count(PASS) < settled.count(PASS) <= stats.binom.isf(1e-3, trials, MISS_SAME_CODE)
    )


def test_a_family_at_delta_seldom_has_any_failure() -> None:
    rng, failed = np.random.default_rng(5), 0
    for _ in range(40):
        pairs = {
            str(index): list(pairs_of(0.001 * waves(rng, 48), DELTA, rng)) for index in range(60)
        }
        failed += any(
            one.outcome is FAIL for one in judge_pairs(pairs, dict.fromkeys(pairs, DELTA)).values()
        )
    assert failed <= stats.binom.isf(1e-3, 40, ALPHA)


@pytest.mark.parametrize(
    ("spread", "change", "outcome", "median"),
    [
        (0.0004, 0.0, PASS, MODE_PAIRS),
        (0.0013, 0.0, PASS, MODE_PAIRS),
        (0.0013, 0.015, FAIL, 12),
        (0.0051, 0.0, PASS, MODE_PAIRS),
        (0.0051, 0.02, FAIL, 25),
    ],
)
def test_what_a_duet_decides_in_how_many_pairs(
    spread: float, change: float, outcome: Outcome, median: int
) -> None:
    """Process spreads as recorded for 256, 32 and 2 MiB (verdicts.noise)."""
    rng = np.random.default_rng(6)
    found = [
        decided(pairs_of(spread * independent(rng, 2 * ROUNDS), change, rng)) for _ in range(30)
    ]
    assert sum(one is outcome for one, _ in found) >= 29
    assert np.median([pairs for _, pairs in found]) <= median


# What is shown


def test_the_change_is_the_median_of_walsh_averages() -> None:
    values = np.random.default_rng(3).normal(0, 1, 15)
    averages = np.add.outer(values, values)[np.triu_indices(15)] / 2
    assert centre(list(values)) == pytest.approx(np.median(averages))
    assert math.isnan(centre([]))
    assert judged([LIMIT] * 3).change == pytest.approx(DELTA)


SIDES: tuple[Literal["greater", "less"], ...] = ("greater", "less")


@pytest.mark.parametrize("count", [8, 9, 20])
def test_the_interval_is_where_the_signed_rank_test_turns(count: int) -> None:
    values = np.random.default_rng(count).normal(0, 1, count)
    for end, side, inward in zip(interval(list(values), 0.99), SIDES, (1, -1), strict=True):
        outside, inside = (
            stats.wilcoxon(values - (end + step * inward), alternative=side, method="exact").pvalue
            for step in (-1e-9, 1e-9)
        )
        assert outside <= 0.005 < inside
    assert interval(list(values[:7]), 0.99) == (-math.inf, math.inf)


def test_the_interval_of_more_pairs_than_powers_of_two_fit_into_a_float() -> None:
    """`--rounds-max` allows 10,000."""
    values = np.random.default_rng(1).normal(0, 1, 1100)
    low, high = interval(list(values), 0.99)
    # Of a normal sample, the signed-rank test needs pi / 3 times as many values as the t-test.
    assert high - low == pytest.approx(2 * 2.576 * math.sqrt(math.pi / 3 / 1100), rel=0.1)
    assert low < values.mean() < high


def test_the_sentence() -> None:
    noise = [0.001 * step for step in (1, -1, 0) * 4]
    assert judged(noise, clean=12).sentence == (
        "+0 % over 12 pairs of processes, between -0.100 % and +0.100 %: within max_regression 1.00 %; a slow mode in up to 22.1 % of "
        "processes may be missed"
    )
    assert judged([0.4] * 6).sentence == (
        "+49.2 % over 6 pairs of processes, too few for an interval, each far slower than max_regression 1.00 % allows"
    )
    assert judged([0.001 * step for step in (30, -30, 0) * 4]).sentence == (
        "+0 % over 12 pairs of processes, between -2.96 % and +3.05 %: at max_regression 1.00 %; a PASS would miss up to 3.05 %"
    )
    assert (
        judged([0.0]).sentence
        == "+0 % over 1 pair of processes, too few for an interval: at max_regression 1.00 %"
    )
