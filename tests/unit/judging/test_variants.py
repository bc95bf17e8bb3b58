"""Cards of one name may be of several variants: what was measured on one is no baseline for another."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.drift import same_variant
from pytest_gpumem.judging.judge import judge
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Controls, Limits, Measurement
from pytest_gpumem.records.row import Verdict

SEEN, OTHER = 340e-9, 353e-9
"""Seconds in which DRAM of two H200 cards answers."""


def on_card(run: Measurement, latency: float | None, source: str = "1") -> Measurement:
    assert run.provenance is not None
    controls = Controls(dram=60e-6, l2=20e-6, launch=3e-6, latency=latency, source=source)
    return replace(run, provenance=replace(run.provenance, card=f"GPU-{latency}", controls=controls))


def judged(bench: Any, facts: DeviceFacts, latency: float | None, *cards: float | None, limit: str | None = "1%") -> Verdict:
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
    bench: Any, h100: DeviceFacts, own: float | None, cards: tuple[float | None, ...], code: Code, runs: int | None
) -> None:
    verdict = judged(bench, h100, own, *cards)
    assert verdict.code is code
    assert verdict.outcome is (Outcome.UNDECIDED if code is Code.OTHER_CARD_VARIANT else Outcome.FAIL)
    assert (verdict.comparison.runs if verdict.comparison is not None else None) == runs


def test_the_sentence_names_both_latencies(bench: Any, h100: DeviceFacts) -> None:
    reason = judged(bench, h100, OTHER, SEEN, 0.99 * SEEN).reason
    assert "DRAM answers in 353.0 ns here and in 336.6 ns to 340.0 ns there" in reason


def test_a_latency_that_was_read_in_another_way_tells_nothing(bench: Any) -> None:
    assert same_variant(on_card(bench.run(day=1), OTHER), on_card(bench.run(day=0), SEEN, source="2"))


def test_without_a_limit_the_variant_does_not_matter(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, OTHER, SEEN, limit=None).outcome is Outcome.PASS


def test_a_first_run_of_another_variant_shows_no_creep(bench: Any, h100: DeviceFacts) -> None:
    window = [on_card(bench.run(280e-6, day=day), SEEN) for day in range(1, 21)]
    now = on_card(bench.run(280e-6, 1, 1, day=30), SEEN)
    for card, code in ((SEEN, Code.CREPT), (OTHER, None)):
        first = on_card(bench.run(268e-6, day=0), card)
        assert judge(now, Limits(max_regression="1%"), h100, window, strict=False, first=first).code is code
