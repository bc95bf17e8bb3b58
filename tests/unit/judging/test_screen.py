"""The screen's rules: what passes, what fails, what stays undecided, and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.judging.finding import Finding
from pytest_gpumem.judging.screen import (
    ALONE,
    Family,
    base_latency,
    compared,
    judge_change,
    mean_latency,
)
from pytest_gpumem.judging.spread import Difference, difference
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Window
from pytest_gpumem.records.record import LEAST_TIME, LONGEST_TIME
from pytest_gpumem.records.row import Verdict
from pytest_gpumem.units import format_share

SHORT, LONG = 25e-6, 268e-6
"""Kernels of 32 and 256 MiB."""
PASS, FAIL, UNDECIDED = Outcome.PASS, Outcome.FAIL, Outcome.UNDECIDED
CALM = (Conditions(), Conditions())
Decision = tuple[Outcome, Code | None]


def limited(written: str = "1%") -> Limits:
    return Limits(max_regression=written, origin={"max_regression": "marker"})


def changed(now: Measurement, found: Difference, delta: float, family: Family = ALONE) -> Finding:
    return judge_change(now, found, compared(found, delta), delta, "limit", family)


def decided(verdict: Verdict) -> Decision:
    return verdict.outcome, verdict.code


@pytest.mark.parametrize(
    ("latency", "slower", "limit", "one", "three"),
    [
        (SHORT, -0.05, "1%", (PASS, None), (PASS, None)),
        (SHORT, 0.032, "5%", (PASS, None), (PASS, None)),
        (SHORT, 0.07, "5%", (UNDECIDED, Code.LOOKS_SLOWER), (FAIL, Code.SLOWER)),
        (SHORT, 0.0098, "1%", (UNDECIDED, Code.NOISY), (UNDECIDED, Code.NOISY)),
        (
            SHORT,
            0.0102,
            "1%",
            (UNDECIDED, Code.NOISY),
            (UNDECIDED, Code.LOOKS_SLOWER),
        ),  # by one process it may be no slower at all
        (SHORT, 0.0, "0.1%", (UNDECIDED, Code.NOISY), (UNDECIDED, Code.NOISY)),
        (LONG, 0.007, "1%", (PASS, None), (PASS, None)),
        (LONG, 0.015, "1%", (UNDECIDED, Code.LOOKS_SLOWER), (FAIL, Code.SLOWER)),
        # One process may be off: it proves what lies 10 % beyond the limit.
        (SHORT, 0.16, "5%", (UNDECIDED, Code.LOOKS_SLOWER), (FAIL, Code.SLOWER)),
        (SHORT, 0.18, "5%", (FAIL, Code.SLOWER), (FAIL, Code.SLOWER)),
        (SHORT, 0.55, "5%", (FAIL, Code.SLOWER), (FAIL, Code.SLOWER)),
    ],
)
def test_where_the_lines_are(
    bench: Any,
    endless: DeviceFacts,
    latency: float,
    slower: float,
    limit: str,
    one: Decision,
    three: Decision,
) -> None:
    """Eight quiet runs of one process; a run of one process and of three that agree."""
    history = bench.baseline(8, latency=latency, spread=2e-4)
    for further, expected in (((), one), ((1.0, 1.0), three)):
        now = bench.run(latency * (1 + slower), *further, day=30, spread=2e-4)
        assert decided(judge(now, limited(limit), endless, history, strict=False)) == expected


def test_a_doubt_by_noise_says_what_a_pass_would_miss(bench: Any, endless: DeviceFacts) -> None:
    """The figure that a PASS of the same code has."""
    verdict = judge(
        bench.run(SHORT * 1.0098, day=30, spread=2e-4),
        limited("1%"),
        endless,
        bench.baseline(8, latency=SHORT),
        strict=False,
    )
    assert verdict.code is Code.NOISY
    assert verdict.comparison is not None
    assert (
        f"; a PASS would miss up to {format_share(verdict.comparison.catches)}; " in verdict.reason
    )


@pytest.mark.parametrize(
    ("runs", "processes", "measured", "expected"),
    [
        (1, 1, 1, (UNDECIDED, Code.TOO_FEW_RUNS)),
        (1, 3, 12, (UNDECIDED, Code.TOO_FEW_RUNS)),
        (2, 3, 12, (UNDECIDED, Code.TOO_FEW_RUNS)),
        (3, 1, 1, (PASS, None)),
    ],
)
def test_how_many_days_a_pass_takes(
    bench: Any, endless: DeviceFacts, runs: int, processes: int, measured: int, expected: Decision
) -> None:
    now = bench.run(LONG, *[1.0] * (measured - 1), day=30)
    verdict = judge(now, limited(), endless, bench.baseline(runs, processes), strict=False)
    assert decided(verdict) == expected
    assert ("the baseline is of" in verdict.reason) is (expected[0] is UNDECIDED)
    # A larger limit, or runs of this run's own day, take no others.
    assert (
        judge(now, limited("5%"), endless, bench.baseline(runs, processes), strict=False).outcome
        is PASS
    )
    today = [bench.run(LONG, *[1.0] * (processes - 1), day=30) for _ in range(runs)]
    assert judge(now, limited(), endless, today, strict=False).outcome is PASS
    assert verdict.comparison is not None
    assert (verdict.comparison.runs, verdict.comparison.processes, verdict.comparison.measured) == (
        runs,
        runs * processes,
        measured,
    )


@pytest.mark.parametrize(
    ("slower", "expected"), [(1.02, Code.NOISY), (1.05, Code.SLOWER), (1.5, Code.SLOWER)]
)
def test_a_baseline_of_one_day_fails_what_lies_far_beyond_the_limit(
    bench: Any, endless: DeviceFacts, slower: float, expected: Code
) -> None:
    now = bench.run(LONG * slower, 1.0, 1.0, day=30)
    assert judge(now, limited(), endless, bench.baseline(1, 3), strict=False).code is expected
    today = bench.run(LONG, 1.0, 1.0, day=30)
    assert judge(now, limited(), endless, [today], strict=False).code is Code.SLOWER


@pytest.mark.parametrize(
    ("runs", "slower", "expected"),
    [
        (1, 0.0, (UNDECIDED, Code.TOO_FEW_RUNS)),
        (2, 0.0, (UNDECIDED, Code.TOO_FEW_RUNS)),
        (2, 2.0, (UNDECIDED, Code.LOOKS_SLOWER)),  # however much: nobody knows how they differ
        (3, 0.0, (PASS, None)),
        (3, 2.0, (FAIL, Code.SLOWER)),
    ],
)
def test_host_times_are_judged_by_three_runs(
    bench: Any, endless: DeviceFacts, runs: int, slower: float, expected: Decision
) -> None:
    past = [
        bench.run(1e-3 * factor, sampler="host", placements=1)
        for factor in (1.0, 1.001, 0.999)[:runs]
    ]
    now = bench.run(1e-3 * (1 + slower), sampler="host", placements=1)
    assert decided(judge(now, limited("20%"), endless, past, strict=False)) == expected


def test_runs_of_one_day_leave_undecided_what_as_many_days_decide(
    bench: Any, endless: DeviceFacts
) -> None:
    apart = bench.baseline(5, 3, SHORT)
    now = bench.run(SHORT * 1.003, 1, 1, day=30)
    together = [replace(one, provenance=apart[0].provenance) for one in apart]
    verdicts = [
        judge(now, limited(), endless, history, strict=False) for history in (apart, together)
    ]
    assert [decided(one) for one in verdicts] == [(PASS, None), (UNDECIDED, Code.TOO_FEW_RUNS)]


def test_the_comparison_and_its_sentence(bench: Any, endless: DeviceFacts) -> None:
    verdict = judge(
        bench.run(LONG * 1.1, 1, 1, day=30), limited(), endless, bench.baseline(4, 2), strict=False
    )
    found = verdict.comparison
    assert found is not None
    assert found.delta == pytest.approx(0.1)
    assert 0.09 < found.low < found.delta < found.high < 0.11
    # The same run is 99.9 % below and 99.5 % above.
    assert math.log1p(found.delta) - math.log1p(found.low) > math.log1p(found.high) - math.log1p(
        found.delta
    )
    assert verdict.reason == (
        "+10.0 % against 4 saved runs of 8 processes, between "
        f"+{100 * found.low:.2f} % and +{100 * found.high:.1f} %, over 3 processes of this run, 8 samples on 8 placements: "
        "slower than max_regression 1% (marker) allows"
    )


def test_the_absolute_part_of_a_limit_is_added(bench: Any, endless: DeviceFacts) -> None:
    # 1 % of 268 us and 5.36 us more, which are 2 % of it.
    lenient, history = limited("1% + 5.36 us"), bench.baseline(4)
    seen = [
        judge(bench.run(LONG * (1 + by), 1, 1, day=30), lenient, endless, history, strict=False)
        for by in (0.024, 0.037)
    ]
    assert [decided(one) for one in seen] == [(PASS, None), (FAIL, Code.SLOWER)]
    assert "max_regression 1% + 5.36 us = 3.00 % here (marker)" in seen[0].reason


@pytest.mark.parametrize(("latency", "measured"), [(SHORT, 3), (LONG, 12)])
def test_what_it_catches_fails_and_what_it_just_does_not_allow_never_passes(
    bench: Any, latency: float, measured: int
) -> None:
    history, further = bench.baseline(5, latency=latency), [1.0] * (measured - 1)
    unchanged = compared(difference(bench.run(latency, *further, day=30), history), 0.01)
    # A true slow-down of `catches` is measured as at least this much in 99 % of runs.
    variance = difference(bench.run(latency, *further, day=30), history).variance()
    least = (1 + unchanged.catches) * math.exp(-variance.reach(0.99))
    for slower, expected in ((least * 1.0001, FAIL), (least * 0.9999, UNDECIDED)):
        now = bench.run(latency * slower, *further, day=30)
        assert changed(now, difference(now, history), 0.01).outcome is expected


DIFFERENCES = st.builds(
    Difference,
    log=st.floats(-0.5, 0.5),
    day=st.floats(1e-8, 1e-3),
    process=st.floats(1e-8, 1e-3),
    base=st.floats(1e-8, 1e-3),
    unseen=st.floats(0, 1e-4),
    steady=st.floats(1e-8, 1e-3),
    days=st.integers(1, 20),
    freedom=st.floats(1, 60),
    runs=st.integers(1, 20),
    processes=st.integers(1, 60),
    measured=st.sampled_from((1, 3, 12)),
    has_prior=st.booleans(),
)


@given(DIFFERENCES, st.floats(0.001, 0.3), st.integers(1, 500))
def test_the_rules_hold_for_every_difference(found: Difference, delta: float, size: int) -> None:
    now = Measurement("", "t", "clean-cold", "held", "", ((1e-4,),), None, None, None, 1e-6, CALM)
    result, comparison = changed(now, found, delta, Family(size)), compared(found, delta)
    assert comparison.low < comparison.delta < comparison.high
    if result.outcome is PASS:
        assert comparison.high < delta
        assert found.runs >= 3 or found.has_prior
    elif result.outcome is FAIL:
        assert result.code is Code.SLOWER
        assert comparison.low > delta
        assert comparison.p_value is not None
        assert comparison.p_value <= 0.05 / size
        assert found.has_prior or found.runs >= 3
        assert found.measured >= 3 or comparison.low > delta + 0.1
    else:
        assert result.code in (Code.NOISY, Code.LOOKS_SLOWER, Code.TOO_FEW_RUNS)
        looks_slower = comparison.delta > delta and comparison.low > 0
        assert (result.code is Code.LOOKS_SLOWER) == (
            looks_slower and result.code is not Code.TOO_FEW_RUNS
        )
    # Either bound is decisive for no larger and no smaller family than it is alone.
    if result.outcome is FAIL:
        assert changed(now, found, delta).outcome is FAIL


def test_the_baselines_latency_is_the_geometric_mean_over_runs(bench: Any) -> None:
    slow = bench.run(121e-6, spread=0.0)
    for fast in (bench.run(100e-6, 1.0, 1.0, spread=0.0), bench.run(100e-6, spread=0.0)):
        assert mean_latency([fast, slow]) == pytest.approx(110e-6)
    assert mean_latency([bench.run(100e-6, 1.21, spread=0.0)]) == pytest.approx(110e-6)


@pytest.mark.parametrize("latency", [25e-6, 100e-6, 121e-6, 268e-6])
def test_the_latency_of_one_process_is_its_own_to_the_last_digit(
    bench: Any, latency: float
) -> None:
    one = bench.run(latency)
    assert mean_latency([one]) == one.latency


# Creep


def creeping(bench: Any, crept: float) -> tuple[list[Measurement], list[Measurement]]:
    """The first three runs, and a window that has moved on from them."""
    return [bench.run(LONG, day=day) for day in range(3)], [
        bench.run(LONG * (1 + crept), day=day) for day in range(5, 25)
    ]


@pytest.mark.parametrize(
    ("crept", "now", "expected"),
    [
        (0.005, 0.005, (PASS, None)),
        (
            0.0104,
            0.0104,
            (UNDECIDED, Code.LOOKS_SLOWER),
        ),  # within the limit of the window, and not of the first runs
        (0.02, 0.02, (FAIL, Code.CREPT)),
        (0.02, 0.0, (PASS, None)),  # it is gone again
        (0.0, 0.02, (FAIL, Code.SLOWER)),
        (0.0, 0.0, (PASS, None)),
    ],
)
def test_a_window_that_crept_away_from_the_first_runs(
    bench: Any, endless: DeviceFacts, crept: float, now: float, expected: Decision
) -> None:
    first, window = creeping(bench, crept)
    run = bench.run(LONG * (1 + now), 1, 1, day=30)
    assert decided(judge(run, limited(), endless, window, strict=False, first=first)) == expected


def test_a_creep_takes_as_much_proof_as_a_slow_down(bench: Any, endless: DeviceFacts) -> None:
    first, window = creeping(bench, 0.02)
    now = bench.run(LONG * 1.02, day=30)  # of one process; the two runs before it count too
    crowd = Family(size=10**15)
    assert (
        judge(now, limited(), endless, window, strict=False, first=first, family=crowd).code
        is Code.LOOKS_SLOWER
    )
    assert decided(judge(now, limited(), endless, window, strict=False, first=first)) == (
        FAIL,
        Code.CREPT,
    )
    # First runs that measured something else are none.
    other = [replace(one, sampler="blocked") for one in first]
    assert judge(now, limited(), endless, window, strict=False, first=other).outcome is PASS


# What is not measured in the same way


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mode": "hot"}, (Outcome.NEW, Code.NO_BASELINE)),
        ({"profiled": True}, (Outcome.NEW, Code.NO_BASELINE)),
        ({"sampler": "blocked"}, (UNDECIDED, Code.MEASURED_DIFFERENTLY)),
        ({"target": "other"}, (UNDECIDED, Code.MEASURED_DIFFERENTLY)),
    ],
)
def test_what_cannot_be_compared(
    bench: Any, endless: DeviceFacts, changes: dict[str, Any], expected: Decision
) -> None:
    verdict = judge(
        bench.run(day=30),
        limited(),
        endless,
        [replace(one, **changes) for one in bench.baseline(5)],
        strict=False,
    )
    assert decided(verdict) == expected
    assert verdict.comparison is None


@pytest.mark.parametrize("change", ["bytes", "window", "no window"])
@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        (-0.25, (UNDECIDED, Code.MEASURED_DIFFERENTLY)),
        (0.0, (UNDECIDED, Code.MEASURED_DIFFERENTLY)),
        (0.5, (FAIL, Code.SLOWER)),
    ],
)
def test_other_work_hides_no_slow_down(
    bench: Any, endless: DeviceFacts, change: str, slower: float, expected: Decision
) -> None:
    window = Window(8 << 20, 1.0, 10 << 20)
    history = bench.baseline(5, window=window)
    now = bench.run(LONG * (1 + slower), 1, 1, day=30, window=window)
    if change == "bytes":
        now = replace(now, moved_bytes=replace(now.moved_bytes, reads=now.moved_bytes.reads // 4))
    else:
        now = replace(now, window=replace(window, hit_ratio=0.7) if change == "window" else None)
    assert decided(judge(now, limited(), endless, history, strict=False)) == expected


@pytest.mark.parametrize(
    ("latency", "slower", "expected"),
    [
        (LONG, 0.0, (PASS, None)),
        (SHORT, 0.0098, (UNDECIDED, Code.NOISY)),
        (SHORT, 0.0102, (UNDECIDED, Code.LOOKS_SLOWER)),
        (LONG, 0.5, (FAIL, Code.SLOWER)),
    ],
)
def test_a_launch_that_moves_more_bytes_is_judged_by_its_time(
    bench: Any, endless: DeviceFacts, latency: float, slower: float, expected: Decision
) -> None:
    history, now = (
        bench.baseline(5, latency=latency),
        bench.run(latency * (1 + slower), 1, 1, day=30),
    )
    more = replace(now, moved_bytes=replace(now.moved_bytes, reads=now.moved_bytes.reads * 2))
    verdict = judge(more, limited(), endless, history, strict=False)
    assert decided(verdict) == expected


def test_absolute_limits_judge_what_was_read(bench: Any, endless: DeviceFacts) -> None:
    """Only comparisons take launch overhead out."""
    how = {"sampler": "blocked", "spread": 1e-5}
    history = bench.baseline(4, latency=100e-6, overhead=2e-6, **how)
    slower = bench.run(106e-6, 1.0, 1.0, day=30, overhead=8e-6, **how)
    assert decided(judge(slower, limited(), endless, history, strict=False)) == (PASS, None)
    assert (
        judge(
            slower, replace(limited(), max_latency="101 us"), endless, history, strict=False
        ).outcome
        is FAIL
    )


@pytest.mark.parametrize("then", [LEAST_TIME, 1e-6, LONGEST_TIME])
@pytest.mark.parametrize("now", [LEAST_TIME, 1e-6, LONGEST_TIME])
def test_times_at_the_ends_of_what_a_record_holds_have_finite_figures(
    bench: Any, endless: DeviceFacts, then: float, now: float
) -> None:
    limits = Limits(max_regression="1% + 1 ns", max_latency="1 us")
    measured = bench.run(now, 1, 1, day=9, placements=1, overhead=None, floor=0.0)
    found = judge(
        measured,
        limits,
        endless,
        [bench.run(then, day=0, placements=1, overhead=None)],
        strict=False,
    )
    assert found.comparison is not None
    assert all(
        math.isfinite(figure)
        for figure in (found.comparison.low, found.comparison.high, found.comparison.catches)
    )
    assert found.comparison.low <= found.comparison.delta <= found.comparison.high
    assert base_latency(measured, found.comparison) > 0
