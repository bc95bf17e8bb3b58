"""Sharing out a total budget: what a measurement needs, water-filling, and the account of a session."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_devices import H100
from measurements import measurement

from pytest_gpumem.measuring.budget import FIXED, HOST, LEAST, Ledger, need, share_out
from pytest_gpumem.measuring.stopping import MOST_SAMPLES
from pytest_gpumem.records.measurement import Measurement

seconds = st.floats(1e-6, 1e4)
needs = st.lists(st.none() | seconds, min_size=1, max_size=12)


def measured(latency: float, **changes: Any) -> Measurement:
    return measurement(placements=((latency,),), **changes)


# What a measurement needs

FLUSH = 2 * H100.l2_bytes / H100.dram_peak


def test_a_need_is_the_most_samples_with_their_flush_and_what_is_fixed() -> None:
    for latency, changes, sample in [
        (200e-6, {}, 200e-6 + FLUSH),
        (200e-6, {"mode": "dirty-cold"}, 200e-6 + FLUSH),
        (200e-6, {"mode": "hot", "sampler": "blocked"}, 200e-6),
        (
            20e-6,
            {"mode": "hot", "sampler": "batched"},
            22 * 20e-6,
        ),  # twenty launches between the events, and two before
    ]:
        assert need(measured(latency, **changes), H100, math.inf) == pytest.approx(
            FIXED + MOST_SAMPLES * (sample + HOST)
        ), (latency, changes, sample)


# Water-filling


def test_who_needs_less_gets_it_and_the_others_share_the_rest() -> None:
    cases: list[tuple[float, list[float | None], list[float]]] = [
        (10, [None, 1, None, 5], [3, 1, 3, 3]),
        (10, [2, 1, None, 2], [2, 1, 5, 2]),
        (12, [None] * 4, [3, 3, 3, 3]),
        (9, [1, 2, 3], [2, 3, 4]),  # what nobody needs is shared equally
        (5, [], []),
        (0, [None, 1], [0, 0]),
    ]
    for total, needs, shares in cases:
        assert share_out(total, needs) == pytest.approx(shares), (total, needs, shares)


@given(st.floats(0, 1e4), needs)
def test_shares_add_up_to_the_total(total: float, needs: list[float | None]) -> None:
    shares = share_out(total, needs)
    assert math.fsum(shares) == pytest.approx(total)
    assert min(shares) >= 0


@given(st.floats(0, 1e4), needs)
def test_a_need_is_met_or_nobody_gets_more(total: float, needs: list[float | None]) -> None:
    shares = share_out(total, needs)
    if sum(need if need is not None else math.inf for need in needs) >= total:
        for share, own in zip(shares, needs, strict=True):
            assert own is None or share <= own * (1 + 1e-9)
            assert (own is not None and share >= own * (1 - 1e-9)) or share >= max(shares) * (
                1 - 1e-9
            )


@given(st.floats(0, 1e4), st.floats(0, 1e4), needs)
def test_a_larger_total_takes_nothing_from_anybody(
    total: float, more: float, needs: list[float | None]
) -> None:
    before, after = share_out(total, needs), share_out(total + more, needs)
    assert all(a >= b * (1 - 1e-9) - 1e-9 for a, b in zip(after, before, strict=True))


# The account


def test_shares_of_a_ledger_leave_out_what_is_no_sampling() -> None:
    ledger = Ledger(10.0, {"a": {}, "b": {"": 1.0}, "c": {"x": 0.5, "y": 0.5}})
    assert (ledger.tests, ledger.known) == (3, 2)
    assert ledger.most() == pytest.approx(8.0)
    assert ledger.share("a", "") == pytest.approx(8.0 - FIXED)
    assert ledger.share("b", "") == pytest.approx(1.0 - FIXED)
    assert ledger.share("c", "y") == pytest.approx(0.5 - FIXED)


def test_what_one_leaves_goes_to_the_others() -> None:
    ledger = Ledger(10.0, {"a": {}, "b": {}})
    ledger.took("a", "", 1.0)
    assert ledger.share("b", "") == pytest.approx(4.5 - FIXED)  # a may measure again
    ledger.ended("a")
    assert ledger.share("b", "") == pytest.approx(9.0 - FIXED)


def test_nothing_left_is_the_least() -> None:
    ledger = Ledger(1.0, {"a": {}, "b": {}})
    ledger.took("a", "", 3.0)
    assert ledger.spent == 3.0
    assert ledger.share("b", "") == LEAST
    assert ledger.most() == 0.0


@given(
    st.floats(0.5, 100),
    st.lists(
        st.dictionaries(st.sampled_from("xyz"), st.floats(1e-3, 50), max_size=3),
        min_size=1,
        max_size=6,
    ),
    st.randoms(),
)
def test_by_plan_the_total_is_never_exceeded(
    total: float, tests: list[dict[str, float]], random: Any
) -> None:
    """Measurements that each take up to their share, checks included, known and unknown labels mixed."""
    ledger = Ledger(total, {str(i): needs for i, needs in enumerate(tests)})
    for test in range(len(tests)):
        for label in random.sample("wxyz", random.randint(0, 4)):
            share = ledger.share(str(test), label)
            if share > LEAST:
                ledger.took(str(test), label, random.choice([0.2, 1.0]) * (share + FIXED))
        ledger.ended(str(test))
    assert ledger.spent <= total * (1 + 1e-9)
