"""Changes of level: planted ones are found and dated, scatter and what all tests have in common are not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pytest_gpumem.history.changes import Floats, Step, exact_steps, steps

pytest.importorskip("ruptures", reason="ruptures is of the extra history")

RUNS, TESTS = 300, 40
SCATTER = 0.002


def suite(seed: int = 1, *, tests: int = TESTS, runs: int = RUNS) -> Floats:
    """Logarithms of times: tests that scatter, and days that last."""
    random = np.random.default_rng(seed)
    day = np.zeros(runs)
    for run in range(1, runs):
        day[run] = 0.7 * day[run - 1] + random.normal(0, 0.004)
    return np.asarray(np.log(1e-4) + day + SCATTER * random.standard_normal((tests, runs)))


def found(logs: Floats, present: np.ndarray | None = None) -> list[list[Step]]:
    there = np.isfinite(logs) if present is None else present
    runs = [np.flatnonzero(own).astype(np.int32) for own in there]
    return steps(runs, [np.exp(line[at]) for line, at in zip(logs, runs, strict=True)], logs.shape[1])


@pytest.mark.parametrize("seed", range(3))
def test_scatter_and_the_days_of_a_card_are_no_change(seed: int) -> None:
    logs = suite(seed)
    logs[np.random.default_rng(seed).random(logs.shape) < 0.002] += 0.03
    assert not any(found(logs))


@pytest.mark.parametrize(("share", "at"), [(0.01, 150), (0.2, 150), (-0.03, 40), (0.05, RUNS - 3), (0.05, 6)])
def test_a_planted_change_is_dated(share: float, at: int) -> None:
    logs = suite()
    logs[7, at:] += np.log1p(share)
    every = found(logs)
    (step,) = every[7]
    assert abs(step.at - at) <= 1
    assert step.earliest <= step.at <= step.latest
    assert step.latest - step.earliest <= 8
    assert sum(map(len, every)) == 1


def test_the_place_of_a_small_change_is_less_certain() -> None:
    logs = suite()
    logs[7] += 0.006 * np.random.default_rng(1).standard_normal(RUNS)
    logs[7, 150:] += 0.01
    logs[8, 150:] += 0.2
    (small,), (large,) = found(logs)[7:9]
    assert (large.earliest, large.at, large.latest) == (150, 150, 150)
    assert small.earliest <= 150 <= small.latest
    assert 1 < small.latest - small.earliest < 30


def test_two_changes_and_a_short_excursion() -> None:
    logs = suite()
    logs[3, 100:200] += 0.03
    logs[4, 100:103] += 0.03
    assert [[step.at for step in own] for own in found(logs)[3:5]] == [[100, 200], []]


@pytest.mark.parametrize("seed", range(4))
def test_many_changes_close_together_keep_their_order(seed: int) -> None:
    random = np.random.default_rng(seed)
    logs = suite(seed)
    logs[:20] += (random.random((20, RUNS)) < 0.05) * 0.03 * random.choice([-1, 1], (20, RUNS))
    logs[:20] += np.repeat((random.random((20, RUNS // 3)) < 0.08) * random.normal(0, 0.03, (20, RUNS // 3)), 3, axis=1)
    for own in found(logs):
        assert all(before.at < after.at for before, after in pairwise(own))


def test_a_slope_is_one_change() -> None:
    logs = suite()
    logs[5] += np.interp(np.arange(RUNS), [100, 180], [0, 0.06])
    (step,) = found(logs)[5]
    assert step.earliest <= 115
    assert step.latest >= 165


def test_what_lasts_in_all_tests_is_a_change_of_each() -> None:
    logs = suite()
    logs[:, 120:] += 0.05
    assert [len(own) for own in found(logs)] == [1] * TESTS
    assert {abs(own[0].at - 120) <= 1 for own in found(logs)} == {True}


def test_most_tests_change_and_the_others_do_not() -> None:
    logs = suite()
    logs[: TESTS * 3 // 4, 120:] += 0.05
    assert [len(own) for own in found(logs)] == [1] * (TESTS * 3 // 4) + [0] * (TESTS // 4)


def test_tests_that_come_and_go_and_miss_runs() -> None:
    logs = suite()
    present = np.random.default_rng(0).random(logs.shape) > 0.3
    present[0, :200], present[1, 50:] = False, False
    logs[2, 150:] += 0.03
    every = found(logs, present)
    runs = np.flatnonzero(present[2])
    assert [len(own) for own in every] == [0, 0, 1] + [0] * (TESTS - 3)
    assert abs(int(runs[every[2][0].at]) - 150) <= 3


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_few_runs_show_nothing(count: int) -> None:
    logs = suite(runs=6)
    logs[0, 1:] += 0.02
    assert not any(found(logs[:, :count])) if count else steps([], [], 0) == []


def test_neighbours_that_go_together_are_no_change() -> None:
    random = np.random.default_rng(5)
    logs = np.zeros((4, 600))  # too few tests for what they have in common
    for run in range(1, 600):
        logs[:, run] = 0.8 * logs[:, run - 1] + 0.003 * random.standard_normal(4)
    assert not any(found(logs))


@pytest.mark.parametrize(
    ("values", "at"),
    [
        ([3, 3, 3, 4, 4, 4], [3]),
        ([3, 3, 4, 3, 3, 3], []),
        ([3, 3, 4, 4, 3, 3], [2, 4]),
        ([3, 3, 3, 3, 4], []),
        ([3, 3, 3, 4, 4], [3]),
        ([0, 0, 8, 8], [2]),
        ([1], []),
    ],
)
def test_exact_figures(values: list[int], at: list[int]) -> None:
    assert exact_steps(np.array(values, float)) == [Step(one, one, one) for one in at]


@pytest.mark.parametrize(("values", "earliest", "at"), [([3, 3, 4, 5, 5], 2, 3), ([3, 3, 1, 2, 4, 5, 5], 2, 5), ([3, 3, 9, 3, 5, 5], 4, 4)])
def test_a_run_between_two_exact_levels_may_have_the_change(values: list[int], earliest: int, at: int) -> None:
    assert exact_steps(np.array(values, float)) == [Step(at, earliest, at)]


def test_an_exact_figure_that_scatters_is_treated_as_one() -> None:
    random = np.random.default_rng(2)
    values = np.repeat(random.choice([1000.0, 1001.0, 1002.0], 120), 2)
    assert exact_steps(values) == []
    values[100:] += 500
    (step,) = exact_steps(values)
    assert step.at == 100
