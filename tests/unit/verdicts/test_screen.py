"""The screen's promises, on simulated processes: no alarm without a change, no slow-down passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits, Measurement, Repeat, Window
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.judge import judge
from pytest_gpumem.verdicts.limits import loosened
from pytest_gpumem.verdicts.screen import compare
from pytest_gpumem.verdicts.spread import Variance, between_placements, between_processes, level

ONE_PERCENT = Limits(max_regression="1%", origin={"max_regression": "marker"})

# Kernels of 30 us, as H100s show them: within a process 0.3 %, between placements 0.4 %, between processes 0.1 %.
SHORT = {"between": 0.001, "placement": 0.004, "within": 0.003, "samples": 5}
# Kernels of 268 us (256 MiB).
LONG = {"between": 0.0005, "placement": 0.0005, "within": 0.0005, "samples": 5}


def outcomes(
    bench: Any, facts: DeviceFacts, count: int, *, latency: float, processes: int, slower: float, noise: dict[str, float]
) -> Counter[Outcome]:
    seen: Counter[Outcome] = Counter()
    for _ in range(count):
        history = [bench.process(latency, **noise) for _ in range(processes)]
        verdict = judge(bench.process(latency * (1 + slower), **noise), ONE_PERCENT, facts, history, strict=False)
        seen[verdict.outcome] += 1
    return seen


@pytest.fixture
def endless(h100: DeviceFacts) -> DeviceFacts:
    """A device whose peak no made-up latency passes."""
    from dataclasses import replace

    return replace(h100, peak_bandwidth=1e18)


def test_ten_thousand_unchanged_kernels_raise_no_alarm(bench: Any, endless: DeviceFacts) -> None:
    """0 in 2995 bounds the rate at 1e-3 (95 %)."""
    seen = outcomes(bench, endless, 10_000, latency=30e-6, processes=1, slower=0.0, noise=SHORT)
    assert seen[Outcome.FAIL] == 0
    assert seen[Outcome.SUSPECT] <= 10
    assert set(seen) <= {Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.SUSPECT}


@pytest.mark.parametrize("processes", [2, 3, 10])
def test_no_alarm_with_more_processes(bench: Any, endless: DeviceFacts, processes: int) -> None:
    seen = outcomes(bench, endless, 600, latency=30e-6, processes=processes, slower=0.0, noise=SHORT)
    assert seen[Outcome.FAIL] + seen[Outcome.SUSPECT] == 0


def test_a_noisier_machine_than_expected_is_learnt(bench: Any, endless: DeviceFacts) -> None:
    """Between processes 1 % where 0.26 % is expected: ten processes show it, and unchanged kernels do not fail."""
    noisy = {**SHORT, "between": 0.01}
    seen = outcomes(bench, endless, 400, latency=30e-6, processes=10, slower=0.0, noise=noisy)
    assert seen[Outcome.FAIL] + seen[Outcome.SUSPECT] <= 1


@pytest.mark.parametrize(("latency", "noise"), [(30e-6, SHORT), (268e-6, LONG)])
@pytest.mark.parametrize("processes", [1, 3, 10])
def test_ten_percent_slower_fails(bench: Any, endless: DeviceFacts, latency: float, noise: dict[str, float], processes: int) -> None:
    """0 misses in 299 bounds the power at 99 % (95 %)."""
    seen = outcomes(bench, endless, 299, latency=latency, processes=processes, slower=0.10, noise=noise)
    assert seen == {Outcome.FAIL: 299}


def run_of(measurement: Measurement, *factors: float) -> Measurement:
    """A run of several processes: the same medians, each so many times as slow."""
    return replace(measurement, further=tuple(Repeat(tuple(m * factor for m in measurement.medians), None) for factor in factors))


@pytest.mark.parametrize(
    ("latency", "slower", "further", "outcome"),
    [
        (30e-6, 1.03, (), Outcome.SUSPECT),  # as unchanged code was seen to be
        (30e-6, 1.08, (), Outcome.FAIL),
        (200e-6, 1.03, (), Outcome.FAIL),  # nobody saw this of long launches
        (30e-6, 1.03, (1.0, 1.0), Outcome.FAIL),  # three processes that agree
        (30e-6, 1.09, (1.0 / 1.09,), Outcome.SUSPECT),  # one of two
        (30e-6, 1.0, (1.09, 1.0), Outcome.SUSPECT),  # one of three, not the first
    ],
)
def test_a_single_process_is_no_proof_of_little_where_single_ones_were_off(
    bench: Any, endless: DeviceFacts, latency: float, slower: float, further: tuple[float, ...], outcome: Outcome
) -> None:
    quiet = {"between": 1e-5, "placement": 1e-5, "within": 1e-5}
    history = [bench.process(latency, **quiet) for _ in range(20)]
    limits = Limits(max_regression="2%", origin={"max_regression": "marker"})
    verdict = judge(run_of(bench.process(latency * slower, **quiet), *further), limits, endless, history, strict=False)
    assert verdict.outcome is outcome, verdict.reason
    if outcome is Outcome.SUSPECT:
        said = "a single process may be off by 3.00 %" if not further else "without the slowest of this run's processes it is"
        assert said in verdict.reason


@pytest.mark.parametrize("processes", [1, 3, 10])
def test_one_percent_slower_is_caught_on_a_long_kernel(bench: Any, endless: DeviceFacts, processes: int) -> None:
    seen = outcomes(bench, endless, 299, latency=268e-6, processes=processes, slower=0.01, noise=LONG)
    assert seen[Outcome.PASS] <= 3
    assert seen[Outcome.FAIL] + seen[Outcome.SUSPECT] >= 280


@pytest.mark.parametrize("processes", [1, 3, 10])
def test_one_percent_slower_does_not_pass_on_a_short_kernel(bench: Any, endless: DeviceFacts, processes: int) -> None:
    """What cannot be caught must not pass either: at most 1 %."""
    seen = outcomes(bench, endless, 500, latency=30e-6, processes=processes, slower=0.01, noise=SHORT)
    assert seen[Outcome.PASS] <= 10
    assert seen[Outcome.INCONCLUSIVE] > 400


def screened(bench: Any, facts: DeviceFacts, delta: float, *, limit: str = "1%", latency: float = 268e-6) -> Verdict:
    history = [bench.measurement(latency, spread=0.0003) for _ in range(4)]
    limits = Limits(max_regression=limit, origin={"max_regression": "marker"})
    return judge(bench.measurement(latency * (1 + delta), spread=0.0003), limits, facts, history, strict=False)


@pytest.mark.parametrize(
    ("delta", "outcome"),
    [
        (-0.05, Outcome.PASS),
        (0.0, Outcome.PASS),
        (0.004, Outcome.PASS),
        (0.007, Outcome.PASS),
        (0.009, Outcome.FAIL),
        (0.01, Outcome.FAIL),
        (0.10, Outcome.FAIL),
    ],
)
def test_where_the_lines_are(bench: Any, h100: DeviceFacts, delta: float, outcome: Outcome) -> None:
    assert screened(bench, h100, delta).outcome is outcome


def test_the_comparison_and_its_sentence(bench: Any, h100: DeviceFacts) -> None:
    verdict = screened(bench, h100, 0.10)
    assert verdict.comparison is not None
    assert verdict.comparison.delta == pytest.approx(0.10, abs=1e-6)
    assert verdict.comparison.low < verdict.comparison.delta < verdict.comparison.high
    assert verdict.comparison.processes == 4
    assert verdict.reason.startswith(
        "slower than max_regression 1% (marker) allows: +10.0 % against 4 processes of the baseline, between +9."
    )
    resolves = f"{100 * verdict.comparison.resolvable:.3f} %"
    assert verdict.reason.endswith(f"margin 0.500 %, resolves {resolves}, 8 samples on 8 placements")


def test_the_absolute_part_is_added(bench: Any, h100: DeviceFacts) -> None:
    assert screened(bench, h100, 0.025).outcome is Outcome.FAIL
    # 1 % of 268 us and 5.36 us more, which are 2 % of it.
    lenient = screened(bench, h100, 0.010, limit="1% + 5.36 us")
    assert lenient.outcome is Outcome.PASS
    assert "max_regression 1% + 5.36 us = 3.00 % here (marker)" in lenient.reason
    assert screened(bench, h100, 0.04, limit="1% + 5.36 us").outcome is Outcome.FAIL


def test_inconclusive_says_what_could_have_been_resolved(bench: Any, endless: DeviceFacts) -> None:
    """A kernel of 7 us varies by 1 % between processes: 1 % cannot be seen."""
    verdict = screened(bench, endless, 0.0, latency=7e-6)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.comparison is not None
    assert 0.04 < verdict.comparison.resolvable < 0.15
    assert f"a slow-down of {100 * verdict.comparison.resolvable:.2f} % could have been resolved" in verdict.reason


def test_what_is_called_resolvable_is_caught(bench: Any, h100: DeviceFacts) -> None:
    resolvable = screened(bench, h100, 0.0).comparison
    assert resolvable is not None
    # A true slow-down of that size shows as at least this much in 99 % of runs.
    least = resolvable.resolvable - (resolvable.high - resolvable.delta)
    assert screened(bench, h100, least + 1e-5).outcome is Outcome.FAIL
    assert screened(bench, h100, least - 1e-4).outcome is Outcome.PASS


def test_one_placement_is_not_taken_for_certain(bench: Any, h100: DeviceFacts) -> None:
    """A single placement may be off by 0.4 % at 32 MiB: its spread is the expected one, not zero."""
    lone = [bench.measurement(39.5e-6, placements=1) for _ in range(2)]
    eight = [bench.measurement(39.5e-6, spread=0.0037) for _ in range(2)]
    of_lone = judge(lone[0], ONE_PERCENT, h100, lone[1:], strict=False).comparison
    of_eight = judge(eight[0], ONE_PERCENT, h100, eight[1:], strict=False).comparison
    assert of_lone is not None
    assert of_eight is not None
    assert of_lone.resolvable > 1.3 * of_eight.resolvable


def test_what_varies_between_placements_is_not_trusted_between_processes(bench: Any) -> None:
    """A pageable copy of some milliseconds varies by percents, far above what its latency alone suggests."""
    erratic = [bench.measurement(20e-3, spread=0.05)]
    assert between_processes(erratic).value > 0.015**2


def test_three_processes_speak_for_themselves(bench: Any) -> None:
    quiet = [bench.measurement(268e-6) for _ in range(3)]
    apart = [bench.measurement(268e-6 * factor) for factor in (0.97, 1.0, 1.03)]
    assert between_processes(apart).value == pytest.approx(0.03**2, rel=0.05)
    assert between_processes(apart[:2]).value == pytest.approx(between_processes(quiet[:2]).value, rel=0.05)
    # Agreement lowers the expected spread only little by little.
    assert 0.5 < between_processes(quiet).value / between_processes(quiet[:2]).value < 1


def test_host_times_on_one_placement_have_their_own_spread_alone(bench: Any, h100: DeviceFacts) -> None:
    """What a file of stock pytest-benchmark holds: three that happen to agree are no kernel timed by the device."""
    past = [bench.measurement(50e-3 * factor, placements=1, sampler="host") for factor in (0.999, 1.0, 1.001)]
    assert between_processes(past).freedom == 2
    now = bench.measurement(50e-3 * 1.01, placements=1, sampler="host")
    found = compare(now, past, 0.01)
    assert found.low < 0.005
    assert found.resolvable > 0.02
    same = [bench.measurement(50e-3, placements=1, sampler="host") for _ in range(3)]
    assert between_processes(same).value > 0
    # Twenty that agree are believed.
    assert compare(now, past * 7, 0.01).low > 0


def test_processes_of_the_run_speak_where_those_of_the_baseline_cannot(bench: Any, h100: DeviceFacts) -> None:
    base = [bench.measurement(268e-6)]
    calm, apart = ([bench.measurement(268e-6 * factor) for factor in factors] for factors in ((1.05, 1.05, 1.05), (1.0, 1.05, 1.10)))
    one, other = (replace(run[0], further=tuple(Repeat(m.medians, m.overhead) for m in run[1:])) for run in (calm, apart))
    assert compare(one, base, 0.01).low > 0.04
    assert compare(other, base, 0.01).low < 0
    # A baseline that knows its spread is asked alone: what differs in the run may be what is to be found.
    assert compare(other, base * 3, 0.01).low > 0.04


def test_what_placements_explain_is_not_counted_twice(bench: Any) -> None:
    """Processes that differ by their placements alone, by 0.4 % / sqrt(8): nothing of it is the processes' own."""
    alike = [bench.process(30e-6, between=0.0, placement=0.004, within=0.0) for _ in range(60)]
    assert between_processes(alike).value < 0.7 * 0.004**2 / 8


def test_placement_variance_is_recovered(bench: Any) -> None:
    many = [bench.process(30e-6, between=0.0, placement=0.004, within=0.0) for _ in range(50)]
    assert between_placements(many).value ** 0.5 == pytest.approx(0.004, rel=0.1)


def test_the_sum_of_variances_is_welchs(bench: Any) -> None:
    total = Variance(4.0, 7) + Variance(4.0, 7)
    assert (total.value, total.freedom) == (8.0, 14.0)
    # Student's t for 14 degrees of freedom, from a table.
    assert total.reach(0.999) == pytest.approx(3.787 * np.sqrt(8.0), rel=1e-3)


def test_a_history_in_another_mode_is_none(bench: Any, h100: DeviceFacts) -> None:
    verdict = judge(bench.measurement(), ONE_PERCENT, h100, [bench.measurement(mode="hot")], strict=False)
    assert verdict.outcome is Outcome.NO_BASELINE
    assert verdict.comparison is None


def test_another_sampler_or_target_is_suspect_because_it_may_hide_a_slow_down(bench: Any, h100: DeviceFacts) -> None:
    now: Measurement = bench.measurement()
    for other in (bench.measurement(sampler="blocked"), replace(now, target="other")):
        verdict = judge(now, ONE_PERCENT, h100, [other], strict=False)
        assert verdict.outcome is Outcome.SUSPECT
        assert f"its rows are {other.target}, {other.sampler}; this one is {now.target}, {now.sampler}" in verdict.reason
        assert verdict.comparison is None


@pytest.mark.parametrize(("processes", "outcome"), [(1, Outcome.SUSPECT), (2, Outcome.SUSPECT), (3, Outcome.FAIL)])
def test_host_times_fail_only_against_a_baseline_that_knows_its_spread(
    bench: Any, h100: DeviceFacts, processes: int, outcome: Outcome
) -> None:
    past = [bench.measurement(1e-3, sampler="host") for _ in range(processes)]
    slower = bench.measurement(1.5e-3, sampler="host")
    assert judge(slower, ONE_PERCENT, h100, past, strict=False).outcome is outcome


def test_fewer_bytes_cannot_hide_a_slow_down(bench: Any, h100: DeviceFacts) -> None:
    past: Measurement = bench.measurement(100e-6)
    assert past.traffic is not None
    fewer = replace(bench.measurement(75e-6), traffic=replace(past.traffic, reads=past.traffic.reads // 4, writes=past.traffic.writes // 4))
    verdict = judge(fewer, ONE_PERCENT, h100, [past], strict=False)
    assert verdict.outcome is Outcome.SUSPECT
    assert "its traffic from" in verdict.reason
    slower = replace(fewer, placements=tuple(tuple(2 * s for s in p) for p in fewer.placements))
    verdict = judge(slower, ONE_PERCENT, h100, [past], strict=False)
    assert verdict.outcome is Outcome.FAIL
    assert "its traffic from" in verdict.reason


def test_another_window_is_said(bench: Any, h100: DeviceFacts) -> None:
    past, now = (replace(bench.measurement(), window=Window(8 << 20, ratio, 10 << 20)) for ratio in (1.0, 0.7))
    verdict = judge(now, ONE_PERCENT, h100, [past], strict=False)
    assert verdict.outcome is Outcome.SUSPECT
    assert "its window from 8 MiB at hit ratio 1 and a set-aside of 10 MiB to 8 MiB at hit ratio 0.7" in verdict.reason
    gone = judge(replace(now, window=None), ONE_PERCENT, h100, [past], strict=False)
    assert "to none" in gone.reason


# Launch overhead: the process's own, not the kernel's


def blocked(bench: Any, latency: float, overhead: float | None, *, spread: float = 0.0003) -> Measurement:
    measurement: Measurement = bench.measurement(latency, spread=spread, sampler="blocked", overhead=overhead)
    return measurement


def test_levelled_latencies_have_the_mean_overhead(bench: Any) -> None:
    measurements = [blocked(bench, 30.0e-6, 2.0e-6), blocked(bench, 30.2e-6, 2.2e-6), blocked(bench, 30.6e-6, 2.4e-6)]
    assert level(measurements) == pytest.approx([30.2e-6, 30.2e-6, 30.4e-6])


def test_an_unknown_overhead_leaves_all_as_they_are(bench: Any) -> None:
    measurements = [blocked(bench, 30.0e-6, 2.0e-6), blocked(bench, 30.2e-6, None), blocked(bench, 30.6e-6, 2.4e-6)]
    assert level(measurements) == [m.latency for m in measurements]


def test_a_correction_that_is_no_small_one_is_not_made(bench: Any) -> None:
    measurements = [blocked(bench, 4.0e-6, 9.0e-6), blocked(bench, 4.0e-6, 2.0e-6)]
    assert level(measurements) == [m.latency for m in measurements]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_slower_launch_of_the_process_is_no_slow_down(bench: Any, endless: DeviceFacts, processes: int) -> None:
    """2 us of 100 us: without the overhead a clear change, with it none."""
    history = [blocked(bench, 100e-6, 2.0e-6) for _ in range(processes)]
    same = judge(blocked(bench, 102e-6, 4.0e-6), ONE_PERCENT, endless, history, strict=False)
    assert same.comparison is not None
    assert abs(same.comparison.delta) < 1e-9
    assert same.outcome not in (Outcome.FAIL, Outcome.SUSPECT)
    unknown = [replace(m, overhead=None) for m in history]
    moved = judge(blocked(bench, 102e-6, 4.0e-6), ONE_PERCENT, endless, unknown, strict=False)
    assert moved.comparison is not None
    assert moved.comparison.delta == pytest.approx(0.02)
    assert moved.outcome in (Outcome.FAIL, Outcome.SUSPECT)


@pytest.mark.parametrize("overhead", [1.5e-6, 2.0e-6, 4.0e-6])
def test_a_slower_kernel_is_one_whatever_its_launch_costs(bench: Any, h100: DeviceFacts, overhead: float) -> None:
    history = [blocked(bench, 268e-6, 2.0e-6) for _ in range(4)]
    slower = blocked(bench, 268e-6 * 1.05 + overhead - 2.0e-6, overhead)
    verdict = judge(slower, ONE_PERCENT, h100, history, strict=False)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.comparison is not None
    assert verdict.comparison.delta == pytest.approx(0.05, abs=0.001)


def test_processes_that_differ_by_their_launches_alone_do_not_widen_the_interval(bench: Any) -> None:
    """As on an H200: what a launch costs varies from process to process more than what the kernel takes."""
    overheads = [1.6e-6, 2.0e-6, 2.4e-6, 1.8e-6, 2.2e-6]
    known = [blocked(bench, 28e-6 + overhead, overhead) for overhead in overheads]
    assert between_processes(known).value < 0.5 * between_processes([replace(m, overhead=None) for m in known]).value


def test_limits_judge_what_was_read(bench: Any, endless: DeviceFacts) -> None:
    """An absolute limit is one on the reading; only comparisons take launch overhead out."""
    limit = Limits(max_latency="101 us", origin={"max_latency": "marker"})
    history = [blocked(bench, 100e-6, 2.0e-6)]
    assert judge(blocked(bench, 102e-6, 4.0e-6), limit, endless, history, strict=False).outcome in (Outcome.FAIL, Outcome.SUSPECT)


# Gains


@pytest.mark.parametrize(("delta", "outcome"), [(0.0, Outcome.PASS), (-0.02, Outcome.PASS), (-0.04, Outcome.FAIL), (0.04, Outcome.PASS)])
def test_a_gain_makes_the_baseline_stale(bench: Any, h100: DeviceFacts, delta: float, outcome: Outcome) -> None:
    history = [bench.measurement(268e-6, spread=0.0003) for _ in range(4)]
    limits = Limits(fail_if_faster="5%", origin={"fail_if_faster": "marker"})
    verdict = judge(bench.measurement(268e-6 * (1 + delta), spread=0.0003), limits, h100, history, strict=False)
    assert verdict.outcome is outcome
    if outcome is Outcome.FAIL:
        assert "faster than fail_if_faster 5% (marker) takes for the same code: -4.00 % against 4 processes" in verdict.reason
        assert "the baseline is stale" in verdict.reason


def test_noise_is_no_gain(bench: Any, endless: DeviceFacts) -> None:
    """A kernel of 7 us: 4 % faster is within what processes differ by."""
    history = [bench.measurement(7e-6) for _ in range(3)]
    limits = Limits(fail_if_faster="5%")
    assert judge(bench.measurement(7e-6 * 0.96), limits, endless, history, strict=False).outcome is Outcome.PASS


# What is not resolved does not pass, what is known too little of does not fail


def test_a_baseline_that_cannot_resolve_the_limit_passes_nothing(bench: Any, endless: DeviceFacts) -> None:
    """Not even a kernel that looks faster: nobody could have seen a slow-down of the size asked about."""
    verdict = screened(bench, endless, -0.2, latency=7e-6)
    assert verdict.outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(("delta", "outcome"), [(0.0100, Outcome.SUSPECT), (0.02, Outcome.FAIL)])
def test_two_processes_fail_only_beyond_the_limit_itself(bench: Any, h100: DeviceFacts, delta: float, outcome: Outcome) -> None:
    history = [bench.measurement(268e-6, spread=0.0003) for _ in range(2)]
    verdict = judge(bench.measurement(268e-6 * (1 + delta), spread=0.0003), ONE_PERCENT, h100, history, strict=False)
    assert verdict.outcome is outcome
    assert ("needs a baseline of 3 processes to be beyond doubt" in verdict.reason) is (outcome is Outcome.SUSPECT)


def test_what_a_heavy_tail_may_reach_is_suspect(bench: Any, endless: DeviceFacts) -> None:
    """A kernel of 7 us: its spread is as large as the margin, so that the bound alone is no more than five standard errors from none."""
    history = [bench.measurement(7e-6, spread=0.009) for _ in range(10)]
    seen = {}
    for delta in (0.045, 0.10):
        verdict = judge(bench.measurement(7e-6 * (1 + delta), spread=0.009), ONE_PERCENT, endless, history, strict=False)
        assert verdict.comparison is not None
        assert verdict.comparison.low > 0.005
        seen[delta] = verdict
    assert seen[0.045].outcome is Outcome.SUSPECT
    assert "standard errors it may be the tail of what processes differ by, from 7.5 on it is not" in seen[0.045].reason
    assert seen[0.10].outcome is Outcome.FAIL


# Limits of a test that ask less than the run's


@pytest.mark.parametrize(
    ("here", "default", "said"),
    [
        ({"max_regression": "2%"}, {"max_regression": "1%"}, "max_regression 2% (marker) asks less than 1% (--gpumem-max-regression)"),
        ({"max_regression": "0.5% + 1 us"}, {"max_regression": "1%"}, "asks less than"),
        ({"max_regression": "0.5%"}, {"max_regression": "1%"}, None),
        ({"max_regression": None}, {"max_regression": "1%"}, "max_regression 1% (--gpumem-max-regression) is lifted (marker)"),
        ({"max_latency": "2 us"}, {"max_latency": "1 us"}, "asks less than"),
        ({"max_latency": "1 us"}, {"max_latency": "2 us"}, None),
        ({"min_bandwidth": "80% of peak"}, {"min_bandwidth": "85% of peak"}, "asks less than"),
        ({"min_bandwidth": "90% of peak"}, {"min_bandwidth": "85% of peak"}, None),
        ({"min_bandwidth": "90% of peak"}, {"min_bandwidth": "1 TB/s"}, "asks less than"),
        ({"fail_if_faster": "10%"}, {"fail_if_faster": "5%"}, "asks less than"),
        ({}, {"max_regression": "1%"}, None),
    ],
)
def test_a_looser_limit_is_said(here: dict[str, Any], default: dict[str, Any], said: str | None) -> None:
    origins = {name: f"--gpumem-{name.replace('_', '-')}" for name in default}
    limits = Limits(**{**(default if not here else {}), **here}, origin=dict.fromkeys(here, "marker"))
    found = loosened(limits, default, origins)
    assert found == [] if said is None else said in found[0]
    # An ini file's default is there to be adjusted.
    assert loosened(limits, default, {name: f"gpumem_{name} in pytest.ini" for name in default}) == []
