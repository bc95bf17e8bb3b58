"""Confidence over placements, the spending of a budget, and when samples are enough: on made-up series and on an H200's."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from recorded_series import MEBIBYTES, TICK, recorded
from scipy import stats

from pytest_gpumem.measuring.stopping import (
    ENOUGH_SAMPLES,
    FEW_IN_TURN,
    FEW_SAMPLES,
    LEAST_SAMPLES,
    MOST_SAMPLES,
    NOTHING,
    SHORT,
    enough,
    enough_in_turn,
    go_on,
    half_width,
    precise,
    rounds_left,
    samples_per_placement,
    sampling_error,
)

# Intervals


def test_half_width_agrees_with_scipy() -> None:
    for confidence in [0.5, 0.95, 0.999]:
        for count in [2, 3, 4, 8, 9, 32, 128]:
            medians = list(np.random.default_rng(count).normal(1.0, 0.01, count))
            low, high = stats.t.interval(confidence, count - 1, 0.0, stats.sem(medians))
            assert half_width(medians, confidence) == pytest.approx((high - low) / 2, rel=1e-9), (
                confidence,
                count,
            )


def test_half_width_needs_two_placements() -> None:
    assert half_width([1.0]) is None
    assert not precise([1.0], 0.5)


def test_half_width_covers_the_mean_over_all_recorded_placements() -> None:
    """On a GPU placements are skewed: a few lie percents above the others. That costs Student's interval up to five points of 95."""
    for placements in [8, 16]:
        for mebibytes in [2, 32]:
            medians = np.array(recorded(mebibytes).medians)
            random, hits = np.random.default_rng(2), 0
            for _ in range(1000):
                drawn = random.choice(medians, placements, replace=True)
                width = half_width(list(drawn))
                assert width is not None, (placements, mebibytes)
                hits += abs(drawn.mean() - medians.mean()) <= width
            assert hits >= 900, (placements, mebibytes)


def test_the_sampling_error_is_that_of_a_mean_of_medians() -> None:
    random = np.random.default_rng(3)
    series = random.normal(1.0, 0.01, (300, 16, 25))
    actual = np.median(series, axis=2).mean(axis=1).std(ddof=1)
    estimated = statistics.fmean(sampling_error(s.tolist()) for s in series)
    assert estimated == pytest.approx(actual, rel=0.1)


def test_the_sampling_error_is_that_of_quantiles() -> None:
    for samples in [1, 2, 3, 16, 33]:
        placements = np.random.default_rng(samples).normal(1.0, 0.05, (5, samples))
        reach = 0.5 / np.sqrt(samples)
        below, above = np.quantile(placements, [0.5 - reach, 0.5 + reach], axis=1)
        assert sampling_error(placements.tolist()) == pytest.approx(
            np.sqrt((((above - below) / 2) ** 2).sum()) / 5
        ), samples


def test_two_levels_show_in_the_sampling_error() -> None:
    for upper in [0.2, 0.45]:
        random = np.random.default_rng(8)
        series = random.normal(1.0, 0.001, (300, 16, 8)) * np.where(
            random.random((300, 16, 8)) < upper, 1.05, 1.0
        )
        actual = np.median(series, axis=2).mean(axis=1).std(ddof=1)
        estimated = statistics.fmean(sampling_error(s.tolist()) for s in series)
        assert 0.75 < estimated / actual < 1.4, upper


def test_placements_may_have_different_numbers_of_samples() -> None:
    random = np.random.default_rng(9)
    long, short = (
        random.normal(1.0, 0.01, (2, 24)).tolist(),
        random.normal(1.0, 0.05, (2, 6)).tolist(),
    )
    alone = 2 * sampling_error(long), 2 * sampling_error(short)
    assert sampling_error([long[0], short[0], long[1], short[1]]) == pytest.approx(
        np.hypot(*alone) / 4
    )


def test_outliers_do_not_raise_the_sampling_error() -> None:
    random = np.random.default_rng(4)
    quiet = random.normal(1.0, 0.01, (8, 25))
    spoilt = quiet.copy()
    spoilt[:, :2] *= 20
    assert sampling_error(spoilt.tolist()) < 1.5 * sampling_error(quiet.tolist())


def test_the_sampling_error_tells_how_far_recorded_halves_lie_apart() -> None:
    """The same placements, measured twice: between two means lies the square root of two times each one's error."""
    for mebibytes in MEBIBYTES:
        placements = np.array(recorded(mebibytes).placements(64, 12))
        random, apart, expected = np.random.default_rng(5), [], []
        for _ in range(200):
            shuffled = random.permutation(placements, axis=1)
            half = shuffled.shape[1] // 2
            one, two = shuffled[:, :half], shuffled[:, half:]
            apart.append(np.median(one, axis=1).mean() - np.median(two, axis=1).mean())
            expected.append(np.hypot(sampling_error(one.tolist()), sampling_error(two.tolist())))
        assert 0.6 < np.mean(expected) / np.std(apart) < 1.6, mebibytes


# Enough


def rounds_of(placements: np.ndarray, count: int) -> list[list[float]]:
    return [samples[:count].tolist() for samples in placements]


def stops_at(
    placements: np.ndarray, *, cost: float, wanted: float = 0.001, budget: float = 1.0
) -> int:
    """Samples of each placement after which `enough` says so, at `cost` seconds a sample."""
    for count in range(1, placements.shape[1] + 1):
        if enough(
            rounds_of(placements, count),
            wanted=wanted,
            spent=count * len(placements) * cost,
            budget=budget,
        ):
            return count
    raise AssertionError("never enough")


def made(
    sigma: float, between: float, placements: int = 16, rounds: int = 200, seed: int = 6
) -> np.ndarray:
    """Samples that vary by `sigma` within a placement, and medians by `between` between them."""
    random = np.random.default_rng(seed)
    return 30e-6 * (
        1
        + random.normal(0, between, (placements, 1))
        + random.normal(0, sigma, (placements, rounds))
    )


def test_a_cheap_measurement_takes_its_few_samples_however_quiet_it_is() -> None:
    assert stops_at(made(0.0, 0.0), cost=1e-6) == FEW_SAMPLES // 16
    assert stops_at(made(0.0, 0.0, placements=1, rounds=1000), cost=1e-6) == FEW_SAMPLES


def test_a_dear_one_stops_as_soon_as_it_is_precise() -> None:
    dear = NOTHING / LEAST_SAMPLES / 16
    assert stops_at(made(1e-4, 1e-5), cost=dear) == LEAST_SAMPLES
    assert stops_at(made(1e-4, 1e-5), cost=dear / 4) == 4 * LEAST_SAMPLES


def test_more_samples_are_taken_where_they_help() -> None:
    """Samples that vary by 5 %: the interval is wide because of them, and shrinks with more."""
    assert stops_at(made(0.05, 0.0005), cost=1e-6) > 1.5 * FEW_SAMPLES / 16


def test_no_more_samples_are_taken_where_only_placements_would_help() -> None:
    assert stops_at(made(0.005, 0.02), cost=1e-6) == FEW_SAMPLES // 16


def test_there_is_an_end() -> None:
    endless = made(0.5, 0.0, rounds=400)
    assert stops_at(endless, cost=1e-6) == -(-MOST_SAMPLES // 16)
    assert stops_at(endless, cost=1 / 160) == 10  # the budget


def test_sampling_in_chunks_looks_at_the_numbers_that_may_be_enough() -> None:
    for places in [1, 8, 21, 32]:
        for chunk in [1, 7, 100]:
            rounds, looks = 0, [0]
            while rounds * places < MOST_SAMPLES:
                rounds += min(chunk, rounds_left(rounds, places))
                looks.append(rounds)
            assert -(-FEW_SAMPLES // places) in looks, (places, chunk)
            assert looks[-1] == -(-MOST_SAMPLES // places), (places, chunk)
            assert rounds_left(rounds, places) == 1, (places, chunk)


def test_each_placement_has_three_samples_unless_the_budget_is_spent_twice() -> None:
    assert stops_at(made(0.5, 0.0), cost=1 / 16) == LEAST_SAMPLES
    assert stops_at(made(0.5, 0.0), cost=2.5 / 16) == 1
    assert not enough([[1.0], []], wanted=0.1, spent=100.0, budget=1.0)


def test_one_placement_stops_by_its_own_noise() -> None:
    lone = made(0.05, 0.0, placements=1, rounds=MOST_SAMPLES)
    assert stops_at(lone, cost=1e-6, wanted=0.02) == FEW_SAMPLES
    assert stops_at(lone, cost=1e-6) == MOST_SAMPLES


def test_a_clock_that_ticks_more_coarsely_than_the_samples_vary_is_no_reason_to_go_on() -> None:
    coarse = np.round(made(0.0001, 0.01) / TICK) * TICK
    assert sampling_error(coarse.tolist()) == 0.0
    assert stops_at(coarse, cost=1e-6) == FEW_SAMPLES // 16


def test_a_few_outliers_are_no_reason_to_go_on() -> None:
    spoilt = made(0.001, 0.0001)
    spoilt[:, ::10] *= 5
    assert stops_at(spoilt, cost=1e-6, wanted=0.002) == FEW_SAMPLES // 16


def test_two_levels_are_noise_that_samples_reduce() -> None:
    """A kernel that takes one of two times, by chance: its placements' medians fall on either until there are enough samples."""
    random = np.random.default_rng(7)
    bimodal = made(0.001, 0.0, rounds=200) * np.where(random.random((16, 200)) < 0.45, 1.05, 1.0)
    assert stops_at(bimodal, cost=1e-6) > 1.5 * FEW_SAMPLES / 16


def test_recorded_samples_are_enough_soon_and_near_the_mean_of_all() -> None:
    """An H200's triad at what its samples cost there: it stops as soon as it may, and then has what all samples have."""
    for mebibytes, placements, cost, budget, wanted, within in [
        (2, 64, 70e-6, 1.0, 0.01, 0.006),
        (32, 64, 110e-6, 1.0, 0.005, 0.003),
        (256, 16, 400e-6, 0.5, 0.001, 0.0007),
    ]:
        one = recorded(mebibytes)
        series = np.array(one.placements(placements, 12))
        count = stops_at(series, cost=cost, wanted=wanted, budget=budget)
        assert count * placements <= FEW_SAMPLES + placements, mebibytes
        latency = statistics.fmean(statistics.median(p) for p in rounds_of(series, count))
        assert latency == pytest.approx(statistics.fmean(one.medians), rel=within), mebibytes


@pytest.mark.parametrize(("mebibytes", "error"), [(2, 10e-9), (32, 100e-9)])
def test_recorded_samples_of_short_launches_ask_for_more_unless_processes_differ_by_more(
    mebibytes: int, error: float
) -> None:
    """Eight samples each leave the interval wide because of the samples, which vary by 2 to 3 %. More of them help a row of 32 MiB; their
    error in one of 2 MiB is small beside the 24 ns by which processes differ."""
    series = recorded(mebibytes).placements(64, 8)
    assert sampling_error(series) < error
    assert enough(series, wanted=0.001, spent=0.05, budget=1.0) is (mebibytes == 2)
    fewer = recorded(mebibytes).placements(64, 2)
    assert enough(fewer, wanted=0.001, spent=0.05, budget=1.0) is False
    assert enough(series, wanted=0.001, spent=1.0, budget=1.0)


# Placements that follow each other


def test_samples_are_shared_over_placements_within_bounds() -> None:
    assert samples_per_placement(cost=10e-3, budget=1.0, placements=10) == 10
    assert samples_per_placement(cost=1e-6, budget=1.0, placements=8) == MOST_SAMPLES // (4 * 8)
    assert samples_per_placement(cost=1e-6, budget=1.0, placements=100) == ENOUGH_SAMPLES
    assert samples_per_placement(cost=0.1, budget=1.0, placements=8) == LEAST_SAMPLES
    assert (
        samples_per_placement(cost=0.2, budget=1.0, placements=8) == 2
    )  # two placements keep the budget
    assert samples_per_placement(cost=5.0, budget=1.0, placements=8) == 1
    assert samples_per_placement(cost=0.0, budget=1.0, placements=1) == FEW_SAMPLES


def in_turn(samples: list[float], medians: list[float] = [], *, most: int = 64) -> bool:  # noqa: B006
    return enough_in_turn(samples, medians, wanted=0.001, placements=8, most=most)


def test_a_placement_in_turn_stops_where_its_own_noise_does_not_decide() -> None:
    random = np.random.default_rng(5)
    quiet, noisy = (list(1e-3 * (1 + random.normal(0, sigma, 64))) for sigma in (0.0005, 0.01))
    assert not in_turn(quiet[: FEW_IN_TURN - 1])
    assert in_turn(quiet[:FEW_IN_TURN])
    assert not in_turn(noisy[:FEW_IN_TURN])
    assert in_turn(noisy)  # as many as it takes at most
    assert in_turn(
        noisy[:FEW_IN_TURN], [1.0e-3, 1.1e-3, 0.9e-3]
    )  # the placements differ by far more


def test_a_placement_in_turn_between_two_levels_goes_on() -> None:
    assert not in_turn([1e-3, 1.2e-3] * 6)


def test_short_launches_take_all_of_their_samples_in_turn() -> None:
    assert not in_turn([SHORT / 2] * 63)
    assert in_turn([SHORT] * FEW_IN_TURN)


WIDE = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]


def test_one_wanted_placement_stays_one() -> None:
    assert go_on([], wanted=0.001, placements=1, most=4, spent=0.0, budget=1.0)
    assert not go_on([1.0], wanted=0.001, placements=1, most=4, spent=0.0, budget=1.0)


def test_go_on() -> None:
    for medians, spent, expected in [
        (WIDE[:4], 0.1, True),  # fewer than wanted
        (WIDE[:4], 0.9, True),  # the wanted number comes before a tight budget
        (WIDE[:4], 2.1, False),  # but not at any price
        (WIDE[:2], 1.3, True),  # a third one ends before twice the budget
        (WIDE[:2], 1.5, False),  # a third one would not
        (WIDE[:1], 3.0, True),  # two in any case
        (WIDE, 0.5, True),  # wanted number, too wide, budget left
        (WIDE, 1.1, False),  # budget used
        (WIDE * 4, 0.5, False),  # as many as there may be
        ([1.0, 1.0 + 1e-6] * 4, 0.5, False),  # precise
    ]:
        assert (
            go_on(medians, wanted=0.001, placements=8, most=32, spent=spent, budget=1.0) is expected
        ), (medians, spent, expected)
