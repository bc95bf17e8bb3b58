"""Cards of one name may be of several sorts: what was measured on one is no baseline for another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls, Limits, Measurement, Taken
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.creep import creep
from pytest_gpumem.verdicts.judge import judge
from pytest_gpumem.verdicts.sorts import of_this_sort

ONE_PERCENT = Limits(max_regression="1%", origin={"max_regression": "marker"})
SEEN, OTHER = 340e-9, 353e-9
"""Seconds that DRAM of two H200 cards takes to answer."""


def on_card(measurement: Measurement, latency: float | None, day: int = 1, source: str = "1") -> Measurement:
    controls = Controls(dram=60e-6, l2=20e-6, launch=3e-6, latency=latency, source=source)
    return replace(measurement, taken=Taken(f"2026-11-{day:02}T10:00:00+00:00", f"GPU-{latency}", controls))


def judged(bench: Any, facts: DeviceFacts, latency: float | None, *baseline: float | None, code: float = 0.019) -> Verdict:
    """Code that takes 1.9 % longer, as it does unchanged on the other sort; 20 processes for each card of the baseline."""
    history = [on_card(bench.measurement(268e-6), card, day=1 + i % 4) for card in baseline for i in range(20)]
    return judge(on_card(bench.measurement(268e-6 * (1 + code)), latency, day=20), ONE_PERCENT, facts, history, strict=False)


def test_unchanged_code_on_another_sort_of_card_is_no_slow_down(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, SEEN, SEEN).outcome is Outcome.FAIL
    verdict = judged(bench, h100, OTHER, SEEN)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.comparison is None
    assert verdict.another_sort
    assert "max_regression 1% (marker) cannot be decided: this card, or its clock, is of another sort" in verdict.reason
    assert "its DRAM answers in 353.0 ns, theirs in 340.0 ns" in verdict.reason


def test_what_the_baseline_has_of_this_sort_is_what_counts(bench: Any, h100: DeviceFacts) -> None:
    verdict = judged(bench, h100, OTHER, SEEN, OTHER)
    assert verdict.outcome is Outcome.FAIL
    assert not verdict.another_sort
    assert verdict.comparison is not None
    assert verdict.comparison.processes == 20


@pytest.mark.parametrize(("own", "then"), [(None, SEEN), (SEEN, None), (SEEN, 1.01 * SEEN)])
def test_a_latency_that_is_unknown_or_nearly_the_same_sets_nobody_apart(
    bench: Any, h100: DeviceFacts, own: float | None, then: float | None
) -> None:
    assert judged(bench, h100, own, then).outcome is Outcome.FAIL


def test_another_way_of_reading_it_says_nothing(bench: Any) -> None:
    now, past = on_card(bench.measurement(268e-6), OTHER), on_card(bench.measurement(268e-6), SEEN, source="2")
    assert of_this_sort(now, [past]) == [past]


def test_without_a_limit_the_sort_is_no_matter(bench: Any, h100: DeviceFacts) -> None:
    verdict = judge(
        on_card(bench.measurement(268e-6), OTHER), Limits(), h100, [on_card(bench.measurement(268e-6), SEEN)] * 20, strict=False
    )
    assert verdict.outcome is Outcome.PASS


def test_another_sort_of_card_is_no_creep(bench: Any, h100: DeviceFacts) -> None:
    anchor = [on_card(bench.measurement(268e-6), SEEN, day=1 + i) for i in range(5)]
    assert creep(on_card(bench.measurement(280e-6), SEEN, day=20), anchor, 30, h100) is not None
    assert creep(on_card(bench.measurement(280e-6), OTHER, day=20), anchor, 30, h100) is None
