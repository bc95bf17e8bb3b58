"""Holm's procedure, over a list and one row after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from verdicts_alone import judge

from pytest_gpumem.judging.screen import ALONE, ALPHA, Family
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Comparison, Verdict


def holm(p_values: list[float]) -> list[bool]:
    """Which hypotheses Holm's procedure rejects when it sees all of them, in the order given."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[index] > ALPHA / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


def test_the_reference_gives_the_example_of_the_textbooks() -> None:
    """Holm's steps at 5 %: 0.05/4, 0.05/3, then stop."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == [True, False, False, True]


def verdict(p_value: float, outcome: Outcome = Outcome.FAIL) -> Verdict:
    return Verdict(outcome, "", Comparison(0.1, 0.09, 0.11, 0.01, 3, p_value=p_value))


@given(st.lists(st.floats(0, 1) | st.floats(0, 0.02), max_size=30))
def test_one_after_another_rejects_nothing_that_holm_would_not(p_values: list[float]) -> None:
    family, rejected = Family(size=max(len(p_values), 1)), []
    for p_value in p_values:
        fails = p_value <= family.threshold
        rejected.append(fails)
        family = family.after(verdict(p_value, Outcome.FAIL if fails else Outcome.UNDECIDED))
    assert all(whole or not single for single, whole in zip(rejected, holm(p_values), strict=True))
    assert family.rejected == sum(rejected)


def test_few_suites_of_unchanged_rows_reject_any() -> None:
    random = np.random.default_rng(3)
    alarmed = sum(
        bool((random.uniform(size=300) <= Family(size=300).threshold).any()) for _ in range(2000)
    )
    assert 0.03 < alarmed / 2000 < 0.07


def test_only_a_rejected_row_leaves_more_for_the_others() -> None:
    family = Family(size=10)
    for p_value in (1e-9, family.threshold):
        assert family.after(verdict(p_value)).threshold == pytest.approx(0.05 / 9)
    assert family.after(verdict(0.02, Outcome.UNDECIDED)) == family
    # It fails by another limit, and is no slow-down beyond doubt.
    assert family.after(verdict(0.5)) == family
    assert family.after(structs.replace(verdict(1e-9), comparison=None)) == family
    assert Family(size=1, rejected=5).threshold == ALONE.threshold == 0.05


def test_a_row_that_fails_alone_is_undecided_in_a_large_suite(
    bench: Any, h100: DeviceFacts
) -> None:
    history, now, limits = (
        bench.baseline(5),
        bench.run(268e-6 * 1.015, 1, 1, day=30),
        Limits(max_regression="1%"),
    )
    alone = judge(now, limits, h100, history, strict=False)
    assert alone.outcome is Outcome.FAIL
    assert alone.comparison is not None
    assert alone.comparison.p_value is not None
    assert 0 < alone.comparison.p_value < 1e-3
    few, crowd = (Family(size=int(share / alone.comparison.p_value)) for share in (0.04, 0.06))
    assert judge(now, limits, h100, history, strict=False, family=few).outcome is Outcome.FAIL
    among = judge(now, limits, h100, history, strict=False, family=crowd)
    assert (among.outcome, among.code) == (Outcome.UNDECIDED, Code.LOOKS_SLOWER)
    # Rows that failed before leave more for it.
    assert (
        judge(
            now,
            limits,
            h100,
            history,
            strict=False,
            family=replace(crowd, rejected=crowd.size // 2),
        ).outcome
        is Outcome.FAIL
    )
