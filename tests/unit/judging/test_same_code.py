"""The same machine code settles a doubt that noise alone leaves, and no other."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, together, what_ran

RAN = what_ran([Step(StepKind.KERNEL, "triad", code="c0de", block=(256, 1, 1), stream=0)], {})
OTHER = what_ran([Step(StepKind.KERNEL, "triad", code="0ther", block=(256, 1, 1), stream=0)], {})
UNWATCHED = what_ran(
    [Step(StepKind.KERNEL, "triad", stream=0)], {}, not_watched="its module was loaded before"
)
LIMITS = Limits(max_regression="1%", origin={"max_regression": "marker"})
CLOCKS = Conditions(sm_clock_hz=1.98e9, memory_clock_hz=2.619e9)
NOISY = {"spread": 0.002, "conditions": (CLOCKS, CLOCKS), "what_ran": RAN}


def noisy(
    bench: Any, latency: float = 268e-6, noise: float = 1.0, **changes: Any
) -> tuple[Measurement, list[Measurement]]:
    """A run and a baseline of runs that are too noisy for a limit of 1 %."""
    past = [
        bench.run(268e-6 * (1 + noise * by), day=day, **NOISY)
        for day, by in enumerate((-0.004, 0.0, 0.004, 0.0))
    ]
    return bench.run(latency, day=9, **{**NOISY, **changes}), past


def test_a_noisy_row_that_runs_the_same_code_passes(bench: Any, endless: DeviceFacts) -> None:
    now, past = noisy(bench)
    verdict = judge(now, LIMITS, endless, past, strict=False)
    assert (verdict.outcome, verdict.code) == (Outcome.PASS, Code.SAME_CODE)
    assert verdict.comparison is not None
    doubtful = judge(now, LIMITS, endless, past, strict=False, evidence=False)
    assert (doubtful.outcome, doubtful.code) == (Outcome.UNDECIDED, Code.NOISY)


def test_too_few_runs_of_the_same_code_are_enough(bench: Any, endless: DeviceFacts) -> None:
    quiet = {**NOISY, "spread": 0.0001}
    now, past = bench.run(day=9, **quiet), [bench.run(day=0, **quiet)]
    assert judge(now, LIMITS, endless, past, strict=False, evidence=False).code is Code.TOO_FEW_RUNS
    verdict = judge(now, LIMITS, endless, past, strict=False)
    assert verdict.code is Code.SAME_CODE
    assert "within the interval" not in verdict.reason  # which lies below the limit


@pytest.mark.parametrize(
    "change",
    [
        {"what_ran": OTHER},
        {"what_ran": UNWATCHED},
        {"what_ran": None},
        {"conditions": (replace(CLOCKS, sm_clock_hz=1.755e9),) * 2},
        {"during": replace(CLOCKS, sm_clock_hz=1.755e9)},
        {"during": replace(CLOCKS, memory_clock_hz=1.6e9)},
        {"during": replace(CLOCKS, memory_clock_hz=5e-324)},  # of a file; its ratio is no float
        {"conditions": (Conditions(), Conditions())},
    ],
)
def test_other_code_and_other_clocks_leave_the_doubt(
    change: dict[str, Any], bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench, **change)
    verdict = judge(now, LIMITS, endless, past, strict=False)
    assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.NOISY)


def launch(count: str) -> WhatRan:
    return what_ran([Step(StepKind.KERNEL, "axpy", code="c0de", arguments=("p256", count))], {})


def test_another_scalar_argument_is_other_code(bench: Any, endless: DeviceFacts) -> None:
    """An axpy with 3 % more elements runs the same machine code."""
    now, past = noisy(bench, what_ran=launch("100000"))
    past = [replace(one, what_ran=launch("100000")) for one in past]
    assert judge(now, LIMITS, endless, past, strict=False).code is Code.SAME_CODE
    assert (
        judge(replace(now, what_ran=launch("107ae1")), LIMITS, endless, past, strict=False).code
        is Code.NOISY
    )


def test_bytes_that_vary_between_unchanged_launches_are_not_compared_and_the_verdict_says_so(
    bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench, what_ran=launch("100000077"))
    varying = together([launch("100000000"), launch("1000000aa")])
    past = [replace(one, what_ran=varying) for one in past]
    verdict = judge(now, LIMITS, endless, past, strict=False)
    assert verdict.code is Code.SAME_CODE
    assert "but for 4 bytes of arguments that vary between unchanged launches" in verdict.reason
    assert (
        judge(replace(now, what_ran=launch("200000077")), LIMITS, endless, past, strict=False).code
        is Code.NOISY
    )


def test_one_run_of_other_code_in_the_baseline_leaves_the_doubt(
    bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench)
    for changed in (OTHER, UNWATCHED, None):
        mixed = [*past[:-1], replace(past[-1], what_ran=changed)]
        assert judge(now, LIMITS, endless, mixed, strict=False).code is Code.NOISY


def test_a_row_that_looks_slower_is_never_settled(bench: Any, endless: DeviceFacts) -> None:
    for slower in (1.008, 1.02, 1.05, 1.2):
        now, past = noisy(bench, 268e-6 * slower)
        assert judge(now, LIMITS, endless, past, strict=False).code is not Code.SAME_CODE


def test_noise_that_would_hide_a_slow_down_of_the_limit_leaves_the_doubt(
    bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench, noise=3.0)
    verdict = judge(now, LIMITS, endless, past, strict=False)
    assert (verdict.outcome, verdict.code) == (Outcome.UNDECIDED, Code.NOISY)
    # A faster run leaves more room.
    now, past = noisy(bench, 268e-6 * 0.985, noise=3.0)
    assert judge(now, LIMITS, endless, past, strict=False).code is Code.SAME_CODE


@pytest.mark.parametrize("sampler", ["host", "plain"])
def test_a_row_by_the_hosts_clock_is_never_settled(
    sampler: str, bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench, sampler=sampler)
    past = [replace(one, sampler=sampler) for one in past]
    assert judge(now, LIMITS, endless, past, strict=False).outcome is Outcome.UNDECIDED


def test_bad_conditions_and_other_limits_are_judged_as_ever(
    bench: Any, endless: DeviceFacts
) -> None:
    throttled = replace(CLOCKS, throttle_reasons=("sw_power_cap",))
    now, past = noisy(bench, conditions=(throttled, throttled))
    assert judge(now, LIMITS, endless, past, strict=False).code is Code.CONDITIONS
    now, past = noisy(bench)
    failing = judge(now, replace(LIMITS, max_latency="1 us"), endless, past, strict=False)
    assert (failing.outcome, failing.code) == (Outcome.FAIL, None)


def test_a_change_of_the_window_or_the_bytes_is_no_same_work(
    bench: Any, endless: DeviceFacts
) -> None:
    now, past = noisy(bench, moved_bytes=None)
    assert judge(now, LIMITS, endless, past, strict=False).code is Code.MEASURED_DIFFERENTLY
