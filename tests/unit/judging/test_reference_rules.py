"""The reference of a row and the screen, with quantiles from printed tables of Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from datetime import date, timedelta

import pytest

from pytest_gpumem.judging.slowdown import Reference, fails_in_plain_session, gains_restart, screen
from pytest_gpumem.outcomes import Outcome

FIRST = date(2026, 11, 1)
LATENCY = 183e-6
LOG = math.log(LATENCY)
LIMIT = math.log1p(0.01)


def reference(*days: Sequence[float], latency: float = LATENCY) -> Reference:
    """Return the reference of days in order: of each, the changes of its processes as log-ratios."""
    runs = []
    for number, changes in enumerate(days):
        logs = [math.log(latency) + change for change in changes]
        runs.append((FIRST + timedelta(days=number), logs))
    return Reference(runs)


def even(days: int, processes: int, spread: float = 0.002) -> Reference:
    """Return a reference whose processes lie at `spread` above and below its latency in turn."""
    return reference(
        *[[spread * (-1) ** (day + p) for p in range(processes)] for day in range(days)]
    )


def test_the_first_twelve_dates_count() -> None:
    later = [(FIRST + timedelta(days=20 + day), [9 * LOG]) for day in range(3)]
    first = [(FIRST + timedelta(days=day), [LOG, LOG]) for day in range(12)]
    whole = Reference([*later, *first])
    assert (whole.days, whole.processes) == (12, 24)
    assert whole.latency == pytest.approx(LATENCY)
    assert whole.slowest == pytest.approx(math.log(LATENCY))


def test_runs_of_a_date_are_of_one_day() -> None:
    same_day = Reference([(FIRST, [LOG]), (FIRST, [LOG + math.log(2)])])
    assert (same_day.days, same_day.processes) == (1, 2)
    assert same_day.latency == pytest.approx(math.sqrt(2) * LATENCY)


def test_the_least_noise_is_of_processes_and_days() -> None:
    for days, latency, noise in [
        (1, 1.0, 0.003),
        (9, 1.0, 0.001),
        (1, 5.5e-6, math.hypot(0.005, 0.003)),
    ]:
        assert reference(*[[0.0]] * days, latency=latency).noise == pytest.approx(noise)


def test_a_larger_spread_of_the_processes_is_the_noise() -> None:
    for changes in ([-0.02, 0.0, 0.01], [-0.02, 0.01]):
        assert reference(changes).noise == pytest.approx(statistics.stdev(changes))


def test_the_reach_is_a_quantile_of_the_noise_of_both_sides() -> None:
    for days, processes, same_code, quantile in [
        (1, 3, False, 9.925),
        (3, 3, False, 3.355),
        (3, 3, True, 1.860),
        (1, 3, True, 1.2816),
    ]:
        row = even(days, processes)
        noise = row.noise * math.sqrt(1 + 1 / days)
        assert row.reach(same_code) / noise == pytest.approx(quantile, abs=5e-4)


def test_a_single_process_knows_no_noise() -> None:
    single = reference([0.0])
    assert single.reach(same_code=True) == math.inf
    assert screen(0.0, 10.0, single, (), same_code=True) is Outcome.UNDECIDED


REGULAR = (-0.002, -0.001, 0.0, 0.001, 0.002)  # their standard deviation is 0.00158


@pytest.mark.parametrize("far", [0.0080, -0.0080])
def test_of_six_processes_the_farthest_counts_for_the_slowest_alone(far: float) -> None:
    row = reference([*REGULAR, far])
    assert row.processes == 5
    assert row.latency == pytest.approx(LATENCY)
    assert row.slowest == pytest.approx(math.log(LATENCY) + max(0.002, far))


@pytest.mark.parametrize("changes", [(*REGULAR, 0.0078), (*REGULAR[1:], 0.0800)])
def test_a_process_counts_within_five_deviations_or_among_five(changes: Sequence[float]) -> None:
    row = reference(changes)
    assert row.processes == len(changes)
    assert math.log(row.latency / LATENCY) == pytest.approx(statistics.fmean(changes))


def test_two_far_processes_both_count() -> None:
    assert reference([*REGULAR, 0.05, 0.05]).processes == 7


ROW = even(12, 1)
REACH = ROW.reach(same_code=False)


def test_the_screen_passes_what_is_beyond_doubt_below_the_limit() -> None:
    for change, others, outcome in [
        (LIMIT - REACH - 1e-6, (), Outcome.PASS),
        (LIMIT - REACH + 1e-6, (), Outcome.UNDECIDED),
        (-LIMIT + 1e-6, (), Outcome.PASS),
        (-LIMIT - 1e-6, (), Outcome.UNDECIDED),
        (0.0, (0.0049, 0.0049), Outcome.PASS),
        (0.0, (0.0, 0.006, 0.9), Outcome.UNDECIDED),
        (0.0, (-0.006,), Outcome.UNDECIDED),
    ]:
        assert screen(change, LIMIT, ROW, others, same_code=False) is outcome


def test_the_same_code_settles_a_doubt() -> None:
    change = LIMIT - REACH + 1e-6
    assert screen(change, LIMIT, ROW, (), same_code=True) is Outcome.PASS


@pytest.mark.parametrize(("factor", "fails"), [(1.11, False), (1.112, True)])
def test_a_plain_session_fails_ten_percent_beyond_the_limit_over_the_slowest(
    factor: float, fails: bool
) -> None:
    row = reference([0.0, 0.02, 0.01])
    assert fails_in_plain_session(LOG + 0.02 + math.log(factor), LIMIT, row) is fails


def test_three_days_each_faster_by_more_than_the_limit_begin_anew() -> None:
    for changes, restarts in [
        ((-0.012, -0.011, -0.2), True),
        ((-0.012, -0.011), False),
        ((-0.2, -0.009, -0.2), False),
        ((0.2, 0.2, 0.2), False),
    ]:
        row = reference([0.0], [0.0])
        newest = [row.mean + change for change in changes]
        assert gains_restart(row, newest, LIMIT) is restarts
