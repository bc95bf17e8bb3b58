"""How far two runs of the same code lie apart: the figures behind every interval."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_gpumem.judging.spread import (
    PRIOR,
    UNSEEN,
    Variance,
    corrected_latencies,
    day_spread,
    days,
    difference,
    moderated,
    of_repetition,
    placement_spread,
    process_spread,
    readings,
    since,
)
from pytest_gpumem.records.measurement import Measurement, Provenance, Repeat

SHORT = 25e-6
"""A kernel of 32 MiB."""


def variance(now: Measurement, history: list[Measurement], measured: int = 1) -> float:
    return dataclasses.replace(difference(now, history), measured=measured).variance().value


def blocked(bench: Any, latency: float, overhead: float | None) -> Measurement:
    measurement: Measurement = bench.measurement(latency, sampler="blocked", overhead=overhead)
    return measurement


def test_the_sum_of_variances_is_welchs() -> None:
    total = Variance(4.0, 7) + Variance(4.0, 7)
    assert (total.value, total.freedom) == (8.0, 14.0)
    # Student's t for 14 degrees of freedom, from a table.
    assert total.reach(0.999) == pytest.approx(3.787 * np.sqrt(8.0), rel=1e-3)
    assert total.chance(total.reach(0.999)) == pytest.approx(0.001)


@given(st.floats(1e-9, 1), st.floats(0, 1), st.integers(0, 40), st.integers(1, 10))
def test_a_moderated_variance_is_no_smaller_than_its_own_and_no_larger_than_both(
    prior: float, squares: float, freedom: int, weight: int
) -> None:
    value = moderated(prior, squares, freedom, weight)
    own = squares / freedom if freedom else prior
    assert min(prior, own) * (1 - 1e-9) <= value <= max(prior, own) * (1 + 1e-9)
    assert freedom < 2 or value >= own * (1 - 1e-9)


def test_the_variance_is_that_of_the_formula(bench: Any) -> None:
    """SE2 = day2 + process/M + s2/n, where neither days nor processes show more than their prior."""
    history = bench.baseline(4, 2, SHORT, spread=0.0, overhead=2e-6)
    found = difference(bench.run(SHORT, 1, 1, day=9, spread=0.0, overhead=2e-6), history)
    # Six observations of the prior beside as many of the row's own as there are placements beyond the first of each process, and processes
    # beyond the first of each day.
    process, own = (
        (
            process_spread(SHORT) ** 2
            + placement_spread(SHORT) ** 2 * PRIOR / (PRIOR + 7 * processes) / 8
        )
        * PRIOR
        / (PRIOR + further)
        for processes, further in ((8, 4), (3, 2))
    )
    day = day_spread(SHORT) ** 2
    between = (day + own / 2) * PRIOR / (PRIOR + 3)
    assert found.freedom == PRIOR + 2 * 3**2 / (
        3 * 3 - 1
    )  # three differences of successive days, which share values
    assert own > process  # the larger of both sides counts
    assert (found.base, found.day, found.process) == pytest.approx((between / 4, day, own))
    assert found.variance(seen=True).value == pytest.approx(
        found.day + found.process / 3 + found.base
    )
    assert found.unseen == pytest.approx(((UNSEEN / 3) ** 2 - day) * (1 + 1 / 4))
    assert found.variance().value == pytest.approx(found.variance(seen=True).value + found.unseen)


@pytest.mark.parametrize(("day", "least"), [(0, UNSEEN), (1, UNSEEN), (2, UNSEEN / 2), (19, 0)])
def test_days_that_nobody_saw_count_as_different(bench: Any, day: int, least: float) -> None:
    """A baseline of day 0 to `day`, and a run of another day."""
    found = difference(bench.run(268e-6, day=50), bench.baseline(day + 1))
    assert found.day + found.unseen / (1 + 1 / (day + 1)) == pytest.approx(
        max(least**2, day_spread(268e-6) ** 2)
    )
    # Runs of one day know nothing of others, and are as good as any to compare a run of their own day with.
    together = [bench.run(268e-6, day=50) for _ in range(3)]
    assert difference(bench.run(268e-6, day=50), together).unseen == 0
    assert difference(bench.run(268e-6, day=50, card="GPU-b"), together).unseen > 0


def test_a_creep_is_no_spread(bench: Any) -> None:
    """Each day 0.4 % slower than the one before: they differ by that, and not by what the last differs from the first."""
    crept = [bench.run(268e-6 * 1.004**day, day=day) for day in range(20)]
    assert difference(bench.run(268e-6, day=20), crept).day == pytest.approx(
        math.log(1.004) ** 2 / 2, rel=0.1
    )


def test_a_step_is_no_spread_of_the_runs_before_and_after_it(bench: Any) -> None:
    stepped = [bench.run(268e-6 * (1.02 if day > 9 else 1), day=day) for day in range(20)]
    found = difference(bench.run(268e-6, day=20), stepped)
    assert found.day > 0.003**2
    assert found.steady == day_spread(268e-6) ** 2


def test_the_newest_runs_less_the_first(bench: Any) -> None:
    days_ = [
        bench.run(268e-6 * factor, day=day, spread=0.0)
        for day, factor in enumerate((1, 1, 1, 1.03, 1.03, 1.03))
    ]
    now = bench.run(268e-6 * 1.03, 1, 1, day=9, spread=0.0)
    found = difference(now, days_)
    crept = since(found, [now, *days_[-2:]], days_[:3])
    assert crept.log == pytest.approx(math.log(1.03))
    assert crept.measured == 5
    expected = found.steady * 2 / 3 + found.process * (1 / 3 + 1 + 1 + 3) / 9
    assert crept.variance(seen=True).value == pytest.approx(expected)
    # Runs of one day share what it adds.
    same = [replace(one, provenance=days_[0].provenance) for one in days_[:3]]
    assert since(found, [now, *days_[-2:]], same).variance(seen=True).value == pytest.approx(
        expected + found.steady * 2 / 3
    )


def test_the_change_is_the_mean_of_logarithms_over_runs_and_not_over_processes(bench: Any) -> None:
    history = [bench.run(100e-6, 1, 1, day=1, spread=0.0), bench.run(121e-6, day=2, spread=0.0)]
    found = difference(bench.run(110e-6, 1.21, day=3, spread=0.0), history)
    assert found.log == pytest.approx(math.log(121 / 110))
    assert (found.runs, found.processes, found.measured) == (2, 4, 2)


def test_more_processes_shrink_the_process_part_alone(bench: Any) -> None:
    history = bench.baseline(3, latency=SHORT)
    found = difference(bench.run(SHORT, day=9), history)
    for measured in (3, 12):
        more = dataclasses.replace(found, measured=measured).variance().value
        assert found.variance().value - more == pytest.approx(found.process * (1 - 1 / measured))
    assert dataclasses.replace(found, measured=10**9).variance().value == pytest.approx(
        found.day + found.base + found.unseen
    )


def test_what_runs_differ_by_beyond_the_prior_does_not_shrink(bench: Any) -> None:
    """Runs 3 % apart: the next one may lie as far away, however many processes it has."""
    apart = [bench.run(SHORT * factor, day=day) for day, factor in enumerate((0.97, 1.0, 1.03))]
    now = bench.run(SHORT, day=9)
    assert variance(now, apart, 1000) == pytest.approx(0.03**2 / 2 * (1 + 1 / 3), rel=0.02)
    assert variance(now, bench.baseline(3, latency=SHORT), 1000) < 0.005**2


@pytest.mark.parametrize("runs", [3, 20])
def test_runs_of_one_day_count_as_one(bench: Any, runs: int) -> None:
    apart = bench.baseline(runs, latency=SHORT)
    together = [
        replace(one, provenance=Provenance(f"2026-11-01T10:{index:02}:00+00:00", "GPU-a"))
        for index, one in enumerate(apart)
    ]
    days_, same = (difference(bench.run(SHORT, day=50), history) for history in (apart, together))
    assert same.freedom == PRIOR
    assert same.base == pytest.approx(same.day + same.process / runs)
    assert days_.base < (days_.day + days_.process) / runs
    assert same.unseen > 5 * days_.unseen


def test_a_date_and_a_card_make_a_day(bench: Any) -> None:
    times = [
        "2026-11-21T23:00:00+00:00",
        "2026-11-21T16:00:00+00:00",
        "2026-11-22T00:10:00+00:00",
        "2026-11-21T17:00:00Z",
    ]
    times += ["2026-11-22T06:59:59", "", "yesterday"]
    cards = ["GPU-a"] * 3 + ["GPU-b"] + ["GPU-a"] * 3
    one = readings(bench.measurement())[0]

    def found(times: list[str]) -> list[Any]:
        return days(
            [
                one._replace(provenance=Provenance(utc, card) if utc else None)
                for utc, card in zip(times, cards, strict=False)
            ]
        )

    first = found(times)
    assert first[0] == first[1]
    assert first[2] == first[4]
    assert len({first[0], first[2], first[3], first[5]}) == 4
    assert first[5] is first[6] is None
    # A night's runs are of one day.
    night = found(
        ["2026-11-21T23:00:00+00:00", "2026-11-22T06:59:59+00:00", "2026-11-22T07:00:00+00:00"]
    )
    assert night[0] == night[1] != night[2]


def test_a_run_whose_processes_differ_has_a_wider_interval(bench: Any) -> None:
    for history in (bench.baseline(3, latency=SHORT), bench.baseline(3, 3, latency=SHORT)):
        calm, noisy = bench.run(SHORT, 1, 1, day=9), bench.run(SHORT, 0.97, 1.03, day=9)
        assert variance(noisy, history) > 10 * variance(calm, history)
        # Three processes are enough for a spread of their own, in full.
        assert difference(noisy, history).process == pytest.approx(0.03**2, rel=0.01)


def test_a_single_placement_has_the_spread_of_its_class(bench: Any) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"placements": 1}, {"spread": placement_spread(SHORT)})
    one, eight = (
        variance(bench.run(SHORT, day=9, **kind), bench.baseline(3, latency=SHORT, **kind))
        for kind in kinds
    )
    assert one > 1.5 * eight


def test_host_times_on_one_placement_have_their_own_spread_alone(bench: Any) -> None:
    """What stock pytest-benchmark measures: nothing is expected of it."""

    def found(*factors: float, **how: Any) -> tuple[bool, float, float]:
        history = [bench.run(1e-3 * factor, day=day, **how) for day, factor in enumerate(factors)]
        one = difference(bench.run(1e-3, day=30, **how), history)
        return one.has_prior, one.freedom, one.base

    factors = (0.98, 1.0, 1.02)
    has_prior, freedom, base = found(*factors, sampler="host", placements=1)
    assert (has_prior, freedom) == (False, 1.6)
    assert base == pytest.approx((math.log(1 / 0.98) ** 2 + math.log(1.02) ** 2) / 4 / 3)
    assert found(*factors, sampler="host")[0]
    assert found(*factors, placements=1)[0]
    # One run is compared as if the prior applied; the screen decides nothing by it.
    assert found(1.0, sampler="host", placements=1)[0] is False


@pytest.mark.parametrize("runs", [1, 3])
def test_intervals_hold_what_they_promise(runs: int, bench: Any) -> None:
    """Unchanged code with the spreads of the prior: the lower bound of 99 % lies above none in about 1 % of runs."""
    rng = np.random.default_rng(2)
    scale = (day_spread(SHORT), process_spread(SHORT), placement_spread(SHORT))

    def drawn(day: int) -> Any:
        centre = rng.normal(0, scale[0]) + rng.normal(0, scale[1])
        medians = SHORT * np.exp(centre + rng.normal(0, scale[2], 8))
        return replace(
            bench.of(tuple((float(median),) for median in medians), overhead=2e-6),
            provenance=Provenance(f"2026-11-{day:02}T10:00:00Z", None),
        )

    trials, beyond = 1500, 0
    for _ in range(trials):
        found = difference(drawn(20), [drawn(day + 1) for day in range(runs)])
        beyond += found.log > found.variance().reach(0.99)
    assert beyond <= 0.01 * trials + 3 * math.sqrt(0.01 * trials)


# Launch overhead: the process's own, not the kernel's


@pytest.mark.parametrize(
    ("pairs", "corrected"),
    [
        ([(30.0, 2.0), (30.2, 2.2), (30.6, 2.4)], [30.2, 30.2, 30.4]),
        ([(30.0, 2.0), (30.2, None), (30.6, 2.4)], [30.0, 30.2, 30.6]),  # one is unknown
        ([(4.0, 9.0), (4.0, 2.0)], [4.0, 4.0]),  # no small correction
    ],
)
def test_latencies_are_corrected_to_the_mean_overhead(
    bench: Any, pairs: list[tuple[float, float | None]], corrected: list[float]
) -> None:
    measured = [
        blocked(bench, latency * 1e-6, overhead and overhead * 1e-6) for latency, overhead in pairs
    ]
    known = [reading for one in measured for reading in readings(one)]
    assert corrected_latencies(known) == pytest.approx([latency * 1e-6 for latency in corrected])


def test_each_further_process_has_its_own_overhead(bench: Any) -> None:
    """2 us of 100 us: with the overhead no change, without it a clear one."""
    history = [blocked(bench, 100e-6, 2.0e-6) for _ in range(4)]
    one = blocked(bench, 100e-6, 2.0e-6)
    run = replace(one, further=(Repeat(tuple(median * 1.02 for median in one.medians), 4.0e-6),))
    assert difference(run, history).log == pytest.approx(0.0, abs=1e-6)
    assert difference(run, [replace(past, overhead=None) for past in history]).log == pytest.approx(
        math.log(1.02) / 2, rel=1e-3
    )


def test_an_unknown_overhead_widens_the_interval_of_a_short_kernel(bench: Any) -> None:
    known, unknown = (
        variance(blocked(bench, 6e-6, over), [blocked(bench, 6e-6, over)] * 3)
        for over in (2e-6, None)
    )
    assert unknown > 2 * known


def test_a_repetition_is_one_process_and_further_ones_tell_its_spread(bench: Any) -> None:
    one, three, apart = (
        of_repetition(bench.run(SHORT, *factors)) for factors in ((), (1, 1), (1.02, 0.98))
    )
    assert day_spread(SHORT) ** 2 < three.value < one.value
    assert apart.value > 0.02**2  # not a third of it


# The expected spreads are what real GPUs showed


@pytest.mark.parametrize(
    ("latency", "spread"),
    [(183e-6, 0.00037), (24.8e-6, 0.0012), (5.4e-6, 0.0051), (2.7e-6, 0.0102), (10e-3, 0.00037)],
)
def test_between_processes(latency: float, spread: float) -> None:
    assert process_spread(latency) == pytest.approx(spread, rel=0.16)


@pytest.mark.parametrize(
    ("latency", "spread"), [(183e-6, 0.0016), (24.8e-6, 0.0029), (5.4e-6, 0.0094)]
)
def test_between_placements(latency: float, spread: float) -> None:
    assert placement_spread(latency) == pytest.approx(spread, rel=0.1)


def test_a_launch_overhead_that_stays_in_the_latency_adds_to_a_short_kernels_spread() -> None:
    assert process_spread(6e-6, overhead_corrected=False) == pytest.approx(
        (process_spread(6e-6) ** 2 + 0.01**2) ** 0.5
    )
    assert process_spread(1e-3, overhead_corrected=False) == pytest.approx(
        process_spread(1e-3), rel=0.02
    )


@given(st.floats(1e-6, 1e-2), st.floats(1.01, 10.0))
def test_a_longer_kernel_is_never_noisier(latency: float, factor: float) -> None:
    for spread in (process_spread, placement_spread):
        assert spread(latency * factor) <= spread(latency)


def test_days_differ_by_half_of_what_short_processes_do() -> None:
    assert day_spread(5.4e-6) == pytest.approx(0.0025, rel=0.02)
    assert day_spread(24.8e-6) == pytest.approx(0.0007, rel=0.05)
    assert day_spread(1e-3) == pytest.approx(0.0004, rel=0.01)


@pytest.mark.parametrize("days", [2, 3, 8, 20])
def test_differences_of_successive_days_tell_less_than_as_many_values(
    days: int, bench: Any
) -> None:
    """Degrees of freedom are 2 * mean ** 2 / variance of what estimates a variance."""
    rng = np.random.default_rng(days)
    squares = (np.diff(rng.normal(size=(100_000, days))) ** 2).sum(axis=1)
    found = difference(bench.run(1e-3), [bench.run(1e-3, day=day) for day in range(days)])
    assert found.freedom - PRIOR == pytest.approx(2 * squares.mean() ** 2 / squares.var(), rel=0.03)
