"""Drift of the device is taken out by control kernels; a change of the code is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls, Limits, Measurement, Taken
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.drift import between, drift_of, kind_of
from pytest_gpumem.verdicts.judge import judge

ONE_PERCENT = Limits(max_regression="1%", origin={"max_regression": "marker"})


def controlled(measurement: Measurement, dram: float, day: int = 1, source: str = "1") -> Measurement:
    taken = Taken(f"2026-11-{day:02}T10:00:00+00:00", "GPU-a", Controls(dram=dram, l2=20e-6, launch=3e-6, source=source))
    return replace(measurement, taken=taken)


def judged(bench: Any, facts: DeviceFacts, *, code: float, device: float, source: str = "1") -> Verdict:
    """A DRAM-bound kernel of 268 us; `code` and `device` are slower by these shares."""
    random = np.random.default_rng(5)
    wobble = random.normal(1, 2e-4, 8)
    history = [controlled(bench.measurement(268e-6), 60e-6 * w, day=1 + i % 4) for i, w in enumerate(wobble)]
    now = controlled(bench.measurement(268e-6 * (1 + code) * (1 + device)), 60e-6 * (1 + device), day=20, source=source)
    return judge(now, ONE_PERCENT, facts, history, strict=False)


def test_a_slower_device_is_no_slower_code(bench: Any, h100: DeviceFacts) -> None:
    verdict = judged(bench, h100, code=0.0, device=0.015)
    assert verdict.outcome in (Outcome.PASS, Outcome.INCONCLUSIVE)
    assert "a drift of the device of +1.5" in verdict.reason
    assert verdict.comparison is not None
    assert verdict.comparison.delta == pytest.approx(0.0, abs=2e-4)


def test_slower_code_is_caught_on_a_slower_device(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, code=0.02, device=0.015).outcome is Outcome.FAIL


def test_code_that_is_slower_everywhere_is_caught(bench: Any, h100: DeviceFacts) -> None:
    """Every test of a suite by the same share: what runs no code of the project did not change, so nothing is taken out."""
    verdict = judged(bench, h100, code=0.012, device=0.0)
    assert verdict.outcome is Outcome.FAIL
    assert "drift" not in verdict.reason


def test_a_faster_device_hides_no_slow_down(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, code=0.015, device=-0.015).outcome is Outcome.FAIL


def test_a_drift_within_the_noise_of_the_controls_is_none(bench: Any, h100: DeviceFacts) -> None:
    verdict = judged(bench, h100, code=0.0, device=0.0005)
    assert verdict.comparison is not None
    assert verdict.comparison.drift == 0.0
    assert verdict.comparison.delta == pytest.approx(0.0005, abs=1e-6)


@pytest.mark.parametrize("device", [0.03, -0.03])
def test_too_large_a_drift_is_unreliable(bench: Any, h100: DeviceFacts, device: float) -> None:
    verdict = judged(bench, h100, code=0.0, device=device)
    assert verdict.outcome is Outcome.UNRELIABLE
    assert f"a read of DRAM that runs no code of the project changed by {100 * device:+.1f}" in verdict.reason


def test_other_control_kernels_do_not_compare(bench: Any, h100: DeviceFacts) -> None:
    verdict = judged(bench, h100, code=0.0, device=0.03, source="2")
    assert verdict.outcome is Outcome.FAIL


def test_what_a_drift_is_taken_out_of(bench: Any, h100: DeviceFacts) -> None:
    bound: Measurement = bench.measurement(268e-6)
    assert kind_of(bound, h100) == "dram"
    assert kind_of(replace(bound, mode="hot", footprint=h100.l2_bytes // 4), h100) == "l2"
    for other in (
        replace(bound, mode="hot"),  # does not fit in L2
        bench.measurement(2.68e-3),  # a tenth of the bandwidth: bound by something else
        replace(bound, sampler="host"),
        replace(bound, traffic=None),
        replace(bound, traffic=replace(bound.traffic, link=True)),
    ):
        assert kind_of(other, h100) is None
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
    assert alone.variance.value == pytest.approx(of_three.variance.value * (1 + 1 / 20) / (1 / 3 + 1 / 20))
