"""One measurement of a test against another."""

from __future__ import annotations

from typing import Any

import pytest
from cases import naming
from msgspec.structs import replace
from verdicts_alone import judge

from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Verdict
from pytest_gpumem.units import QuantityError, parse_claim


def judged(
    bench: Any,
    facts: DeviceFacts,
    times: float,
    written: str,
    *,
    slow: str = "faulting",
    spread: float = 0.0005,
) -> Verdict:
    fast: Measurement = bench.measurement(300e-6, spread=spread, label="prefetched")
    other: Measurement = bench.measurement(300e-6 * times, spread=spread, label=slow)
    limits = Limits(faster_than=written, origin={"faster_than": "call"})
    siblings = {m.label: m for m in (fast, other)}
    return judge(fast, limits, facts, [], strict=False, siblings=siblings)


def test_the_claim_must_hold_beyond_its_interval(bench: Any, h100: DeviceFacts) -> None:
    for times, outcome in [
        (25.0, Outcome.PASS),
        (20.001, Outcome.FAIL),
        (19.999, Outcome.FAIL),
        (15.0, Outcome.FAIL),
    ]:
        verdict = judged(bench, h100, times, "20 x faulting")
        assert verdict.outcome is outcome, times
        assert f"is {times:.4g} times as fast, between " in verdict.reason, times
        assert "faster_than 20 x faulting (call)" in verdict.reason, times


def test_noise_widens_the_interval(bench: Any, h100: DeviceFacts) -> None:
    assert judged(bench, h100, 1.02, "faulting").outcome is Outcome.PASS
    noisy = judged(bench, h100, 1.02, "faulting", spread=0.05)
    assert noisy.outcome is Outcome.FAIL
    assert "is not beyond doubt" in noisy.reason


def test_a_label_that_the_test_has_not_is_a_failure(bench: Any, h100: DeviceFacts) -> None:
    for written, label in [("20 x fautling", "fautling"), ("2 times faulting", "2 times faulting")]:
        verdict = judged(bench, h100, 25.0, written)
        assert verdict.outcome is Outcome.FAIL
        assert verdict.reason == (
            f"faster_than {written} (call) cannot be judged: the test has no measurement "
            f"{label!r} (a factor: \"20 x LABEL\"); others are 'faulting'"
        )


def test_a_markers_claim_is_none_about_the_other_itself(bench: Any, h100: DeviceFacts) -> None:
    other: Measurement = replace(bench.measurement(), label="faulting")
    verdict = judge(
        other,
        Limits(faster_than="20 x faulting"),
        h100,
        [],
        strict=False,
        siblings={"faulting": other},
    )
    assert verdict.outcome is Outcome.MEASURED


def test_how_claims_are_written() -> None:
    for written, claim in [
        ("faulting", (1.0, "faulting")),
        ("20 x faulting", (20.0, "faulting")),
        ("1.5x a b", (1.5, "a b")),
        ("x", (1.0, "x")),
        ("1e+03 x of L2", (1000.0, "of L2")),
        ("1 of L2", (1.0, "1 of L2")),
    ]:
        assert parse_claim(written) == claim, written


def test_what_is_no_claim() -> None:
    cases: list[Any] = ["", " ", "0.9 x a", 3, None, "1e999 x a"]
    for written in cases:
        with (
            naming(written),
            pytest.raises(QuantityError, match="accepted is the label of another measurement"),
        ):
            parse_claim(written)
