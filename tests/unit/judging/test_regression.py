"""A row against its reference: what fails at the test's end, and what the screen passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from verdicts_alone import judge, on_days

from pytest_gpumem.judging.limits import repetition_margin
from pytest_gpumem.judging.slowdown import (
    against_reference,
    corrected_logs,
    same_code,
)
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Verdict
from pytest_gpumem.records.what_ran import Step, what_ran

ONE_PERCENT = Limits(max_regression="1%", origin={"max_regression": "marker"})
RAN = what_ran([Step("kernel", "triad", code="a", arguments=("device -", "7f12"))], {})
OTHER = what_ran([Step("kernel", "triad", code="b", arguments=("device -", "7f12"))], {})


def against(
    bench: Any, facts: DeviceFacts, change: float, processes: int, days: int = 1, **how: Any
) -> Verdict:
    """The verdict on a row that is slower by a share than processes that agree."""
    changes = how.pop("changes", {})
    runs = [bench.measurement(**changes) for _ in range(processes)]
    now = bench.measurement(268e-6 * (1 + change), **changes)
    return judge(now, how.pop("limits", ONE_PERCENT), facts, runs, days=days, **how)


def test_one_saved_process_passes_nothing_and_fails_what_is_far_slower(
    bench: Any, endless: DeviceFacts
) -> None:
    for change, outcome, code in [
        (0.0, Outcome.UNDECIDED, Code.TOO_FEW_RUNS),
        (0.05, Outcome.UNDECIDED, Code.LOOKS_SLOWER),
        (0.1, Outcome.UNDECIDED, Code.LOOKS_SLOWER),
        (0.12, Outcome.FAIL, Code.SLOWER),
    ]:
        verdict = against(bench, endless, change, 1)
        assert (verdict.outcome, verdict.code) == (outcome, code), change
        assert verdict.comparison is not None, change
        assert verdict.comparison.reach is None, change
        if outcome is Outcome.UNDECIDED:
            assert verdict.reason.endswith("gpumem duet BASE --test test_a decides"), change


def test_what_the_screen_passes(bench: Any, endless: DeviceFacts) -> None:
    for change, outcome, code in [
        (0.0, Outcome.PASS, None),
        (-0.009, Outcome.PASS, None),
        (0.009, Outcome.UNDECIDED, Code.NOISY),
        (0.011, Outcome.UNDECIDED, Code.LOOKS_SLOWER),
        (-0.011, Outcome.UNDECIDED, Code.NOISY),  # a gain would hide a later loss
    ]:
        verdict = against(bench, endless, change, 12, 12)
        assert (verdict.outcome, verdict.code) == (outcome, code), change


def test_the_same_code_needs_less_and_the_reason_has_the_rate(
    bench: Any, endless: DeviceFacts
) -> None:
    one_day = against(bench, endless, 0.001, 3, changes={"what_ran": RAN})
    assert one_day.outcome is Outcome.PASS
    assert one_day.reason == (
        "+0.100 % against 3 saved processes of 1 day, 8 samples on 8 placements: within "
        "max_regression 1% (marker); we are 90 % sure that it is not slower than the limit allows"
    )
    assert one_day.comparison is not None
    assert one_day.comparison.same_code
    days = against(bench, endless, 0.001, 3, 3, changes={"what_ran": RAN})
    assert "we are 95 % sure" in days.reason
    full = against(bench, endless, 0.001, 12, 12)
    assert "we are 99.5 % sure" in full.reason
    unknown = against(bench, endless, 0.001, 3)
    assert (unknown.outcome, unknown.code) == (Outcome.UNDECIDED, Code.NOISY)
    assert "needs a duet, as noise may hide 4." in unknown.reason


def test_what_is_the_same_code(bench: Any) -> None:
    now = bench.measurement(what_ran=RAN)
    assert same_code(now, now, now)
    assert not same_code(now, now, bench.measurement(what_ran=OTHER))
    assert not same_code(now, bench.measurement())
    assert not same_code(bench.measurement(), now)
    for sampler in ("host", "plain"):
        assert not same_code(replace(now, sampler=sampler), now)


def test_a_fail_is_over_the_slowest_process_and_asks_no_other_row(
    bench: Any, endless: DeviceFacts
) -> None:
    runs = [bench.measurement(), bench.measurement(268e-6 * 1.1)]
    for change, outcome in ((0.2, Outcome.UNDECIDED), (0.23, Outcome.FAIL)):
        now = bench.measurement(268e-6 * (1 + change))
        assert judge(now, ONE_PERCENT, endless, runs, others=[0.2]).outcome is outcome


def test_the_absolute_part_of_a_limit_is_added(bench: Any, endless: DeviceFacts) -> None:
    limits = Limits(max_regression="1% + 2.68 us", origin={"max_regression": "marker"})
    verdict = against(bench, endless, 0.012, 12, 12, limits=limits)
    assert verdict.outcome is Outcome.PASS
    assert "within max_regression 1% + 2.68 us (marker)" in verdict.reason


def test_why_there_is_no_reference(bench: Any, endless: DeviceFacts) -> None:
    now = bench.measurement()
    new = judge(now, ONE_PERCENT, endless, [])
    assert (new.outcome, new.code) == (Outcome.NEW, Code.NO_BASELINE)
    assert new.reason == "nothing to compare with: the baseline holds no such row"
    other = judge(now, ONE_PERCENT, endless, [bench.measurement(sampler="host")])
    assert (other.outcome, other.code) == (Outcome.UNDECIDED, Code.MEASURED_DIFFERENTLY)
    assert "sampler host → held, so a new reference begins" in other.reason


# Latencies


def test_processes_of_a_run_and_of_the_reference_count_each(bench: Any) -> None:
    now = bench.run(100e-6, 1.02)
    runs = on_days([bench.run(100e-6, 1.01), bench.run(100e-6)], days=1)
    change = against_reference(now, runs)
    assert (change.reference.processes, change.reference.days) == (3, 1)
    assert change.log_ratio == pytest.approx(math.log(1.02) / 2 - math.log(1.01) / 3)


def test_latencies_are_corrected_to_the_mean_launch_overhead(bench: Any) -> None:
    cases: list[tuple[tuple[float | None, ...], tuple[float, ...]]] = [
        ((2e-6, 3e-6), (100.5e-6, 99.5e-6)),
        ((2e-6, None), (100e-6, 100e-6)),
        ((0.0, 150e-6), (100e-6, 100e-6)),  # a correction by most of a latency is none
    ]
    for overheads, latencies in cases:
        runs = [bench.measurement(100e-6, overhead=overhead) for overhead in overheads]
        corrected = [math.exp(log) for (log,) in corrected_logs(runs)]
        assert corrected == pytest.approx(latencies), overheads


def test_a_verdict_has_the_latency_of_the_reference(bench: Any, endless: DeviceFacts) -> None:
    verdict = judge(bench.measurement(220e-6), Limits(), endless, [bench.run(100e-6, 1.21)])
    assert (verdict.base, verdict.change) == pytest.approx((110e-6, 1.0))
    now, saved = bench.measurement(22e-6, overhead=12e-6), bench.measurement(20e-6, overhead=10e-6)
    verdict = judge(now, Limits(), endless, [saved])
    # As long as the row but for the launch overhead, which its latency contains.
    assert (verdict.base, verdict.change) == pytest.approx((22e-6, 0.0))


# The margin of absolute limits


def test_a_repetition_differs_by_less_the_more_placements_agree(bench: Any) -> None:
    alone, agreeing = bench.measurement(placements=1), bench.measurement(spread=0.0001)
    apart = bench.measurement(spread=0.05)
    margins = [repetition_margin(one) for one in (agreeing, alone, apart)]
    assert margins == sorted(margins)
    assert margins[0] == pytest.approx(0.0025, rel=0.2)
    assert margins[-1] > 0.05


def test_a_short_launch_differs_by_more_and_by_most_where_its_overhead_is_unknown(
    bench: Any,
) -> None:
    short, long = bench.measurement(5.4e-6, overhead=1e-6), bench.measurement(overhead=1e-6)
    unknown = replace(short, overhead=None)
    margins = [repetition_margin(row) for row in (long, short, unknown)]
    assert margins == pytest.approx([0.00226, 0.01928, 0.03989], rel=0.002)
