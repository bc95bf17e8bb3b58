"""How far two runs of the same code lie apart: the figures behind every interval."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytest_gpumem.judging.spread import (
    PRIOR,
    Variance,
    corrected_latencies,
    difference,
    moderated,
    of_repetition,
    placement_spread,
    process_spread,
    readings,
    session_spread,
    sessions,
)
from pytest_gpumem.records.measurement import Measurement, Provenance, Repeat

SHORT = 25e-6
"""A kernel of 32 MiB."""


def variance(now: Measurement, history: list[Measurement], measured: int | None = None) -> float:
    return difference(now, history).variance(measured).value


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
    """SE2 = session2 + process/M + s2/S, where neither placements nor runs show more than their prior."""
    history = bench.baseline(4, 2, SHORT, spread=0.0, overhead=2e-6)
    found = difference(bench.run(SHORT, 1, 1, day=9, spread=0.0, overhead=2e-6), history)
    # Eight placements that agree count as 7 observations of the row's own in each process, beside 4 of the class.
    freedom = 7 * 8
    placement = placement_spread(SHORT) ** 2 * 4 / (4 + freedom)
    # Six observations of the prior beside as many of the row's own as there are processes beyond the first of each run.
    process = (process_spread(SHORT) ** 2 + placement / 8) * PRIOR / (PRIOR + 4)
    session = session_spread(SHORT) ** 2
    between = (session + process / 2) * PRIOR / (PRIOR + 3)
    assert found.freedom == PRIOR + 3
    assert found.base == pytest.approx(between / 4)
    assert found.session == pytest.approx(session)
    # This run's three processes have fewer placements behind them, so that their prior is the wider one.
    own = (process_spread(SHORT) ** 2 + placement_spread(SHORT) ** 2 * 4 / (4 + 21) / 8) * PRIOR / (PRIOR + 2)
    assert found.process == pytest.approx(max(own, process))
    assert found.variance().value == pytest.approx(found.session + found.process / 3 + found.base)


def test_the_change_is_the_mean_of_logarithms_over_runs_and_not_over_processes(bench: Any) -> None:
    history = [bench.run(100e-6, 1, 1, day=1, spread=0.0), bench.run(121e-6, day=2, spread=0.0)]
    found = difference(bench.run(110e-6, 1.21, day=3, spread=0.0), history)
    assert found.log == pytest.approx(math.log(121 / 110))
    assert (found.runs, found.processes, found.measured) == (2, 4, 2)


def test_more_processes_shrink_the_process_part_alone(bench: Any) -> None:
    history = bench.baseline(3, latency=SHORT)
    found = difference(bench.run(SHORT, day=9), history)
    for measured in (3, 12):
        assert found.variance(1).value - found.variance(measured).value == pytest.approx(found.process * (1 - 1 / measured))
    assert found.variance(10**9).value == pytest.approx(found.session + found.base)


def test_what_runs_differ_by_beyond_the_prior_does_not_shrink(bench: Any) -> None:
    """Runs 3 % apart: the next one may lie as far away, however many processes it has."""
    apart = [bench.run(SHORT * factor, day=day) for day, factor in enumerate((0.97, 1.0, 1.03))]
    now = bench.run(SHORT, day=9)
    assert variance(now, apart, 1000) == pytest.approx(0.03**2 * (1 + 1 / 3), rel=0.01)
    assert variance(now, bench.baseline(3, latency=SHORT), 1000) < 0.005**2


@pytest.mark.parametrize("runs", [3, 20])
def test_runs_of_one_session_count_as_one(bench: Any, runs: int) -> None:
    days = bench.baseline(runs, latency=SHORT)
    together = [replace(one, provenance=Provenance(f"2026-11-01T10:{index:02}:00+00:00", "GPU-a")) for index, one in enumerate(days)]
    unknown = [replace(one, provenance=None) for one in days]
    apart, same, nobody_knows = (difference(bench.run(SHORT, day=50), history) for history in (days, together, unknown))
    assert same.base == nobody_knows.base == pytest.approx(runs * apart.base)
    assert (same.session, same.process) == (apart.session, apart.process)


def test_an_hour_and_a_card_make_a_session(bench: Any) -> None:
    times = ["2026-11-21T10:59:00+00:00", "2026-11-21T10:00:00+00:00", "2026-11-21T11:00:01+00:00", "2026-11-21T10:10:00Z"]
    times += ["2026-11-21T10:20:00", "", "yesterday"]
    cards = ["GPU-a"] * 3 + ["GPU-b"] + ["GPU-a"] * 3
    one = readings(bench.measurement())[0]
    found = sessions([one._replace(provenance=Provenance(utc, card) if utc else None) for utc, card in zip(times, cards, strict=True)])
    assert found[0] == found[1] == found[4]
    assert len({found[0], found[2], found[3], found[5]}) == 4
    assert found[5] is found[6] is None


def test_a_row_noisier_between_placements_than_its_class_has_a_wider_interval(bench: Any) -> None:
    usual, noisy = ({"latency": SHORT, "spread": factor * placement_spread(SHORT)} for factor in (0.5, 4.0))
    quiet = variance(bench.run(**usual, day=9), bench.baseline(3, **usual))
    assert variance(bench.run(**noisy, day=9), bench.baseline(3, **noisy)) > 5 * quiet
    # It is enough that either side shows it.
    assert variance(bench.run(**noisy, day=9), bench.baseline(3, **usual)) > 2 * quiet
    assert variance(bench.run(**usual, day=9), bench.baseline(3, **noisy)) > 5 * quiet


def test_a_run_whose_processes_differ_has_a_wider_interval(bench: Any) -> None:
    for history in (bench.baseline(3, latency=SHORT), bench.baseline(3, 3, latency=SHORT)):
        calm, noisy = bench.run(SHORT, 1, 1, day=9), bench.run(SHORT, 0.97, 1.03, day=9)
        assert variance(noisy, history) > 10 * variance(calm, history)
        # Three processes are enough for a spread of their own, in full.
        assert difference(noisy, history).process == pytest.approx(0.03**2, rel=0.01)


def test_a_single_placement_has_the_spread_of_its_class(bench: Any) -> None:
    kinds: tuple[dict[str, Any], ...] = ({"placements": 1}, {"spread": placement_spread(SHORT)})
    one, eight = (variance(bench.run(SHORT, day=9, **kind), bench.baseline(3, latency=SHORT, **kind)) for kind in kinds)
    assert one > 1.5 * eight


def test_host_times_on_one_placement_have_their_own_spread_alone(bench: Any) -> None:
    """What stock pytest-benchmark measures: nothing is expected of it."""

    def found(*factors: float, **how: Any) -> tuple[bool, float, float]:
        history = [bench.run(1e-3 * factor, day=day, **how) for day, factor in enumerate(factors)]
        one = difference(bench.run(1e-3, day=30, **how), history)
        return one.has_prior, one.freedom, one.base

    factors = (0.98, 1.0, 1.02)
    has_prior, freedom, base = found(*factors, sampler="host", placements=1)
    assert (has_prior, freedom) == (False, 2)
    assert base == pytest.approx(statistics.variance(math.log(factor) for factor in factors) / 3)
    assert found(*factors, sampler="host")[0]
    assert found(*factors, placements=1)[0]
    # One run is compared as if the prior applied; the screen decides nothing by it.
    assert found(1.0, sampler="host", placements=1)[0] is False


@pytest.mark.parametrize("runs", [1, 3])
def test_intervals_hold_what_they_promise(runs: int, bench: Any) -> None:
    """Unchanged code with the spreads of the prior: the lower bound of 99 % lies above none in about 1 % of runs."""
    rng = np.random.default_rng(2)
    scale = (session_spread(SHORT), process_spread(SHORT), placement_spread(SHORT))

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
def test_latencies_are_corrected_to_the_mean_overhead(bench: Any, pairs: list[tuple[float, float | None]], corrected: list[float]) -> None:
    measured = [blocked(bench, latency * 1e-6, overhead and overhead * 1e-6) for latency, overhead in pairs]
    known = [reading for one in measured for reading in readings(one)]
    assert corrected_latencies(known) == pytest.approx([latency * 1e-6 for latency in corrected])


def test_each_further_process_has_its_own_overhead(bench: Any) -> None:
    """2 us of 100 us: with the overhead no change, without it a clear one."""
    history = [blocked(bench, 100e-6, 2.0e-6) for _ in range(4)]
    one = blocked(bench, 100e-6, 2.0e-6)
    run = replace(one, further=(Repeat(tuple(median * 1.02 for median in one.medians), 4.0e-6),))
    assert difference(run, history).log == pytest.approx(0.0, abs=1e-6)
    assert difference(run, [replace(past, overhead=None) for past in history]).log == pytest.approx(math.log(1.02) / 2, rel=1e-3)


def test_an_unknown_overhead_widens_the_interval_of_a_short_kernel(bench: Any) -> None:
    known, unknown = (variance(blocked(bench, 6e-6, over), [blocked(bench, 6e-6, over)] * 3) for over in (2e-6, None))
    assert unknown > 2 * known


def test_a_repetition_is_one_process_and_further_ones_tell_its_spread(bench: Any) -> None:
    one, three, apart = (of_repetition(bench.run(SHORT, *factors)) for factors in ((), (1, 1), (1.02, 0.98)))
    assert session_spread(SHORT) ** 2 < three.value < one.value
    assert apart.value > 0.02**2  # not a third of it


# The expected spreads are what real GPUs showed


@pytest.mark.parametrize(
    ("latency", "spread"), [(183e-6, 0.00037), (24.8e-6, 0.0012), (5.4e-6, 0.0051), (2.7e-6, 0.0102), (10e-3, 0.00037)]
)
def test_between_processes(latency: float, spread: float) -> None:
    assert process_spread(latency) == pytest.approx(spread)


@pytest.mark.parametrize(("latency", "spread"), [(183e-6, 0.0016), (24.8e-6, 0.0029), (5.4e-6, 0.0094)])
def test_between_placements(latency: float, spread: float) -> None:
    assert placement_spread(latency) == pytest.approx(spread)


def test_a_launch_overhead_that_stays_in_the_latency_adds_to_a_short_kernels_spread() -> None:
    assert process_spread(6e-6, overhead_corrected=False) == pytest.approx((process_spread(6e-6) ** 2 + 0.01**2) ** 0.5)
    assert process_spread(1e-3, overhead_corrected=False) == pytest.approx(process_spread(1e-3), rel=0.02)


@given(st.floats(1e-6, 1e-2), st.floats(1.01, 10.0))
def test_a_longer_kernel_is_never_noisier(latency: float, factor: float) -> None:
    for spread in (process_spread, placement_spread):
        assert spread(latency * factor) <= spread(latency)


def test_sessions_differ_by_half_of_what_short_processes_do() -> None:
    assert session_spread(5.4e-6) == pytest.approx(0.0025)
    assert session_spread(24.8e-6) == pytest.approx(0.0007)
    assert session_spread(1e-3) == pytest.approx(0.0004)
