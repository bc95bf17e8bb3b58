"""Control kernels show whether the device has changed; where it has, little is decided."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from measurements import controlled
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.judging.drift import (
    between,
    clock_drift,
    control_of,
    drift_of,
    same_variant,
    since_start,
)
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Controls, Limits, Measurement, Provenance
from pytest_gpumem.records.row import Verdict
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran
from pytest_gpumem.units import format_share


def judged(
    bench: Any, facts: DeviceFacts, *, row: float, control: float, source: str = "1"
) -> Verdict:
    """A DRAM-bound kernel and the control; both are slower by these shares."""
    wobble = 1 + 2e-4 * np.sin(np.arange(8))
    history = [controlled(run, 60e-6 * w) for run, w in zip(bench.baseline(8), wobble, strict=True)]
    now = controlled(bench.run(268e-6 * (1 + row), 1, 1, day=20), 60e-6 * (1 + control), source)
    return judge(
        now, Limits(max_regression="1%", fail_if_faster="4%"), facts, history, strict=False
    )


@pytest.mark.parametrize(
    ("row", "control", "outcome", "code"),
    [
        (0.0, 0.0, Outcome.PASS, None),
        (0.0, 0.004, Outcome.PASS, None),
        (0.03, 0.004, Outcome.FAIL, Code.SLOWER),
        (0.0, 0.015, Outcome.PASS, None),  # no slower, whether it follows the device or not
        (0.0, -0.015, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.015, 0.015, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.02, 0.015, Outcome.UNDECIDED, Code.CONDITIONS),  # 0.5 % may be all that is the code's
        (0.04, 0.015, Outcome.FAIL, Code.SLOWER),
        (0.04, -0.015, Outcome.FAIL, Code.SLOWER),
        (0.5, 0.015, Outcome.FAIL, Code.SLOWER),
        (0.5, 0.03, Outcome.UNDECIDED, Code.CONDITIONS),  # beyond 2 % nothing is judged
        (0.5, -0.03, Outcome.UNDECIDED, Code.CONDITIONS),
        (-0.08, 0.03, Outcome.UNDECIDED, Code.CONDITIONS),
        # A gain is the code's only where it is one whatever the device did.
        (-0.08, 0.0, Outcome.FAIL, Code.FASTER),
        (-0.08, -0.015, Outcome.FAIL, Code.FASTER),
        (-0.05, -0.015, Outcome.UNDECIDED, Code.CONDITIONS),
        (
            -0.0567,
            -0.015,
            Outcome.UNDECIDED,
            Code.CONDITIONS,
        ),  # its bound of 99.5 % alone lies beyond what the device may explain
    ],
)
def test_on_a_changed_device_only_what_the_device_cannot_explain_fails(
    bench: Any, h100: DeviceFacts, row: float, control: float, outcome: Outcome, code: Code | None
) -> None:
    verdict = judged(bench, h100, row=row, control=control)
    assert (verdict.outcome, verdict.code) == (outcome, code)
    # Nothing is corrected by it.
    if verdict.comparison is not None:
        assert verdict.comparison.delta == pytest.approx(row)
    else:
        assert abs(control) > 0.02


@pytest.mark.parametrize(
    ("row", "clock", "outcome", "code"),
    [
        (0.04, 0.0, Outcome.FAIL, Code.SLOWER),
        (0.04, -0.005, Outcome.FAIL, Code.SLOWER),  # a step of the clock is none
        (0.02, -0.0099, Outcome.FAIL, Code.SLOWER),
        (0.02, -0.01, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.02, -0.015, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.04, -0.038, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.08, -0.038, Outcome.FAIL, Code.SLOWER),  # more than the clock explains
        (0.04, 0.038, Outcome.FAIL, Code.SLOWER),
        (0.0, -0.038, Outcome.PASS, None),
        (0.0, 0.038, Outcome.UNDECIDED, Code.CONDITIONS),  # a faster clock may hide a slow-down
        (-0.08, 0.0, Outcome.FAIL, Code.FASTER),
        (-0.06, 0.038, Outcome.UNDECIDED, Code.CONDITIONS),
        (0.5, -0.038, Outcome.FAIL, Code.SLOWER),
        (0.5, -1.0, Outcome.UNDECIDED, Code.CONDITIONS),  # of a file: 5e-324 Hz
    ],
)
@pytest.mark.parametrize("how", ["reported", "ran"])
def test_another_sm_clock_decides_no_row_that_it_explains(
    bench: Any,
    endless: DeviceFacts,
    how: str,
    row: float,
    clock: float,
    outcome: Outcome,
    code: Code | None,
) -> None:
    def at(run: Measurement, hertz: float) -> Measurement:
        if how == "ran":  # by the device's own timer; what the driver reports does not count then
            return replace(run, ran_at_hz=hertz, conditions=(Conditions(sm_clock_hz=1e9),) * 2)
        return replace(run, conditions=(Conditions(sm_clock_hz=hertz),) * 2)

    history = [at(run, 1.98e9) for run in bench.baseline(8)]
    now = at(bench.run(268e-6 * (1 + row), 1, 1, day=20), max(1.98e9 * (1 + clock), 5e-324))
    limits = Limits(max_regression="1%", fail_if_faster="4%")
    verdict = judge(now, limits, endless, history, strict=False)
    assert (verdict.outcome, verdict.code) == (outcome, code)
    assert ("SM clock" in verdict.reason) == (code is Code.CONDITIONS)
    if code is Code.CONDITIONS and -1 < clock < 0:
        share = format_share(1 / (1 + clock) - 1, sign=True)
        assert verdict.reason.endswith(
            f"; the device has changed since the baseline: a cycle of the SM clock takes {share}"
        )
    # A clock of one earlier run is no clock of the baseline; where one is unknown, nothing is.
    odd = [at(history[0], 1.5e9), *history[1:]]
    assert judge(now, limits, endless, odd, strict=False).outcome is outcome


def test_the_sm_clock_explains_no_row_that_a_bandwidth_bounds(
    bench: Any, h100: DeviceFacts
) -> None:
    past, now = bench.baseline(8), bench.run(268e-6 * 1.04, 1, 1, day=20)
    history = [replace(run, conditions=(Conditions(sm_clock_hz=1.98e9),) * 2) for run in past]
    slow = replace(now, conditions=(Conditions(sm_clock_hz=1.905e9),) * 2)
    assert clock_drift(slow, history, h100) is None
    assert judge(slow, Limits(max_regression="1%"), h100, history, strict=False).code is Code.SLOWER


def test_the_sentence_names_the_control_and_its_change(bench: Any, h100: DeviceFacts) -> None:
    changed = "; the device has changed since the baseline: a read of DRAM that runs no code of the project takes +3.0"
    assert changed in judged(bench, h100, row=0.0, control=0.03).reason


@pytest.mark.parametrize(
    ("cards", "drifts", "words"),
    [
        (("GPU-a",) * 8, (0.0,) * 8, "against its own runs this card drifted by +3.3"),
        (("GPU-b",) * 8, (0.0,) * 8, "no run of this card"),
        # One of many runs is of this card, which was as slow then.
        (("GPU-b",) * 23 + ("GPU-a",), (0.0,) * 23 + (0.033,), "as in its own runs"),
        ((None,) * 8, (0.0,) * 8, None),
    ],
)
def test_it_says_whether_this_card_drifted_or_others_differ(
    bench: Any,
    h100: DeviceFacts,
    cards: tuple[str | None, ...],
    drifts: tuple[float, ...],
    words: str | None,
) -> None:
    def on(run: Measurement, card: str | None, control: float) -> Measurement:
        of_card = replace(run, provenance=Provenance("2026-11-01T10:00:00+00:00", card))
        return controlled(of_card, 60e-6 * (1 + control))

    history = [
        on(run, card, drift)
        for run, card, drift in zip(bench.baseline(len(cards)), cards, drifts, strict=True)
    ]
    own = "GPU-a" if words else None
    verdict = judge(
        on(bench.run(268e-6, 1, 1, day=20), own, 0.033),
        Limits(max_regression="1%"),
        h100,
        history,
        strict=False,
    )
    assert verdict.code is Code.CONDITIONS
    assert "the device has changed since the baseline" in verdict.reason
    if words is None:
        assert "this card" not in verdict.reason
    else:
        assert words in verdict.reason


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"max_kernels": "1"}, Outcome.PASS),
        ({"max_kernels": "0"}, Outcome.FAIL),
        ({"max_kernels": "1", "max_regression": "1%"}, Outcome.UNDECIDED),
        ({"max_kernels": "0", "max_regression": "1%"}, Outcome.FAIL),
    ],
)
def test_counts_of_a_launch_are_judged_on_a_changed_device(
    bench: Any, h100: DeviceFacts, limits: dict[str, Any], outcome: Outcome
) -> None:
    ran = what_ran([Step(StepKind.KERNEL, "triad", code="a")], {})
    history = [controlled(run, 60e-6) for run in bench.baseline(8)]
    now = controlled(bench.run(268e-6, day=20, what_ran=ran), 63e-6)
    assert judge(now, Limits(**limits), h100, history, strict=False).outcome is outcome


def test_other_control_kernels_do_not_compare(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, row=0.0, control=0.03, source="2").outcome is Outcome.PASS


def test_rows_bound_by_dram_or_l2_follow_a_control(bench: Any, h100: DeviceFacts) -> None:
    bound: Measurement = bench.measurement(268e-6)
    assert bound.moved_bytes is not None
    assert control_of(bound, h100) == "dram"
    assert control_of(replace(bound, mode="hot", footprint=h100.l2_bytes // 4), h100) == "l2"
    for other in (
        replace(bound, mode="hot"),  # does not fit in L2
        bench.measurement(2.68e-3),  # a tenth of the bandwidth: bound by something else
        replace(bound, sampler="host"),
        replace(bound, moved_bytes=None),
        replace(bound, moved_bytes=replace(bound.moved_bytes, link=True)),
    ):
        assert control_of(other, h100) is None
    assert drift_of(bound, [controlled(bound, 60e-6)], h100) is None
    assert drift_of(controlled(bound, 60e-6), [bound], h100) is None


def test_a_drift_has_the_variance_of_two_readings() -> None:
    few, many = between([60e-6], [60e-6], "dram"), between([60e-6], [60e-6] * 30, "dram")
    assert few is not None
    assert many is not None
    assert few.variance.value > 1.9 * many.variance.value
    assert between([], [60e-6], "dram") is None
    assert between([60e-6], [], "dram") is None


def test_every_process_of_a_run_has_read_the_controls(bench: Any, h100: DeviceFacts) -> None:
    """One of three that reads them 3 % slower is no device that is 3 % slower."""
    bound: Measurement = bench.measurement(268e-6)
    history = [controlled(bound, 60e-6)] * 20
    strange, usual = controlled(bound, 61.8e-6), controlled(bound, 60e-6)
    alone = drift_of(strange, history, h100)
    of_three = drift_of(replace(strange, further=(usual.repeat, usual.repeat)), history, h100)
    assert alone is not None
    assert of_three is not None
    assert alone.log == pytest.approx(3 * of_three.log)
    assert alone.variance.value == pytest.approx(
        of_three.variance.value * (1 + 1 / 20) / (1 / 3 + 1 / 20)
    )


@pytest.mark.parametrize(("kind", "share"), [("dram", 0.02), ("l2", 0.04)])
def test_each_control_has_its_own_limit(kind: str, share: float) -> None:
    assert since_start(kind, math.log1p(0.95 * share)) is None
    assert since_start(kind, math.log1p(1.05 * share)) is not None
    assert between([60e-6 * (1 + 1.05 * share)] * 40, [60e-6] * 40, kind).too_large  # type: ignore[union-attr]
    assert not between([60e-6 * (1 + 0.95 * share)] * 40, [60e-6] * 40, kind).too_large  # type: ignore[union-attr]


# Cards of one name may be of several variants: runs on one are no baseline for another


SEEN, OTHER = 340e-9, 353e-9
"""Seconds in which DRAM of two H200 cards answers."""


def on_card(run: Measurement, latency: float | None, source: str = "1") -> Measurement:
    assert run.provenance is not None
    controls = Controls(dram=60e-6, l2=20e-6, launch=3e-6, latency=latency, source=source)
    return replace(
        run, provenance=replace(run.provenance, card=f"GPU-{latency}", controls=controls)
    )


def on_variants(
    bench: Any,
    facts: DeviceFacts,
    latency: float | None,
    *cards: float | None,
    limit: str | None = "1%",
) -> Verdict:
    """Code that takes 1.9 % longer, as it does unchanged on the other variant, against 20 runs for each card."""
    history = [on_card(one, card) for card in cards for one in bench.baseline(20)]
    now = on_card(bench.run(268e-6 * 1.019, 1, 1, day=30), latency)
    return judge(now, Limits(max_regression=limit), facts, history, strict=False)


@pytest.mark.parametrize(
    ("own", "cards", "code", "runs"),
    [
        (SEEN, (SEEN,), Code.SLOWER, 20),
        (OTHER, (SEEN,), Code.OTHER_CARD_VARIANT, None),
        (OTHER, (SEEN, OTHER), Code.SLOWER, 20),  # only runs of this variant count
        # Unknown latencies, and nearly equal ones, tell no variants apart.
        (None, (SEEN,), Code.SLOWER, 20),
        (SEEN, (None,), Code.SLOWER, 20),
        (SEEN, (1.01 * SEEN, SEEN), Code.SLOWER, 40),
    ],
)
def test_only_runs_of_the_same_variant_are_compared_with(
    bench: Any,
    h100: DeviceFacts,
    own: float | None,
    cards: tuple[float | None, ...],
    code: Code,
    runs: int | None,
) -> None:
    verdict = on_variants(bench, h100, own, *cards)
    assert verdict.code is code
    assert verdict.outcome is (
        Outcome.UNDECIDED if code is Code.OTHER_CARD_VARIANT else Outcome.FAIL
    )
    assert (verdict.comparison.runs if verdict.comparison is not None else None) == runs


def test_the_sentence_names_both_latencies(bench: Any, h100: DeviceFacts) -> None:
    reason = on_variants(bench, h100, OTHER, SEEN, 0.99 * SEEN).reason
    assert "DRAM answers in 353.0 ns here and in 336.6 ns to 340.0 ns there" in reason


def test_a_latency_that_was_read_in_another_way_tells_nothing(bench: Any) -> None:
    assert same_variant(
        on_card(bench.run(day=1), OTHER), on_card(bench.run(day=0), SEEN, source="2")
    )


def test_without_a_limit_the_variant_does_not_matter(bench: Any, h100: DeviceFacts) -> None:
    assert on_variants(bench, h100, OTHER, SEEN, limit=None).outcome is Outcome.MEASURED


def test_a_first_run_of_another_variant_shows_no_creep(bench: Any, h100: DeviceFacts) -> None:
    window = [on_card(bench.run(280e-6, day=day), SEEN) for day in range(1, 21)]
    now = on_card(bench.run(280e-6, 1, 1, day=30), SEEN)
    for card, code in ((SEEN, Code.CREPT), (OTHER, None)):
        first = [on_card(bench.run(268e-6, day=0), card)]
        assert (
            judge(now, Limits(max_regression="1%"), h100, window, strict=False, first=first).code
            is code
        )
