"""The verdict of a duet, with quantiles from printed tables of Student's t."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.judging.duet import LOOKS, PEAKS, judge_pairs, of_pairs, of_peaks
from pytest_gpumem.judging.finding import Check
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint

LIMIT = math.log1p(0.01)
QUANTILES = {5: 7.173, 8: 4.785, 12: 4.025, 20: 3.579, 32: 3.375}
"""Student's t at 99.9 % for each look, of one degree of freedom less than its pairs."""
LAST = 2.744
"""The same at 99.5 % for 31 degrees of freedom."""


def pairs(count: int, reaches: float, quantile: float) -> list[float]:
    """Return pairs whose mean is so many of the reaches of a quantile above the limit."""
    noise = [0.002 * (-1) ** number for number in range(count)]
    reach = quantile * statistics.stdev(noise) / math.sqrt(count)
    shift = LIMIT + reaches * reach - statistics.fmean(noise)
    return [shift + value for value in noise]


def test_the_looks_are_those_of_the_quantiles() -> None:
    assert tuple(QUANTILES) == LOOKS


def test_a_mean_beyond_its_reach_above_the_limit_fails_at_each_look() -> None:
    for look, quantile in QUANTILES.items():
        judged = judge_pairs(pairs(look, 1.001, quantile), LIMIT)
        assert (judged.outcome, len(judged.log_ratios)) == (Outcome.FAIL, look)
        assert judged.bounds[0] > 0.01
        open_still = judge_pairs(pairs(look, 0.999, quantile), LIMIT).outcome
        assert open_still is (Outcome.UNDECIDED if look == 32 else None)


def test_a_mean_beyond_its_reach_below_the_limit_passes_at_each_look() -> None:
    for look, quantile in {**QUANTILES, 32: LAST}.items():
        judged = judge_pairs(pairs(look, -1.001, quantile), LIMIT)
        assert (judged.outcome, len(judged.log_ratios)) == (Outcome.PASS, look)
        assert judged.bounds[1] < 0.01
        open_still = judge_pairs(pairs(look, -0.999, quantile), LIMIT).outcome
        assert open_still is (Outcome.UNDECIDED if look == 32 else None)


def test_between_looks_more_pairs_are_needed() -> None:
    for count in [
        0,
        4,
        31,
    ]:
        judged = judge_pairs(pairs(32, 0.5, 1.0)[:count], LIMIT)
        assert judged.outcome is None
        assert len(judged.log_ratios) == count


def test_the_first_look_that_decides_counts() -> None:
    """Later pairs, however slow, change no verdict."""
    judged = judge_pairs([*pairs(5, -2, QUANTILES[5]), *[9.0] * 27], LIMIT)
    assert (judged.outcome, len(judged.log_ratios)) == (Outcome.PASS, 5)


def test_an_open_row_says_at_which_limit_it_would_pass() -> None:
    log_ratios = pairs(32, -0.5, LAST)
    judged = judge_pairs(log_ratios, LIMIT)
    assert judged.outcome is Outcome.UNDECIDED
    low, high = judged.bounds
    assert low < judged.change < 0.01 < high
    assert judge_pairs(log_ratios, math.log1p(high + 1e-5)).outcome is Outcome.PASS
    assert judge_pairs(log_ratios, math.log1p(high - 1e-5)).outcome is Outcome.UNDECIDED
    finding = of_pairs(Check("max_regression", "1%", "marker"), judged)
    assert finding.reason.endswith(
        f": open at max_regression 1%; at {100 * high:.3g} % it would pass"
    )


def test_a_change_is_a_share_and_a_single_pair_has_no_interval() -> None:
    judged = judge_pairs([math.log(2)], LIMIT)
    assert judged.change == pytest.approx(1.0)
    assert judged.bounds == (-math.inf, math.inf)


def test_pairs_that_agree_are_decided_on_either_side_of_the_limit() -> None:
    for change, outcome in [(0.0, Outcome.PASS), (LIMIT, None), (2 * LIMIT, Outcome.FAIL)]:
        assert judge_pairs([change] * 5, LIMIT).outcome is outcome


def watched(peak: int, **fields: Any) -> Footprint:
    return Footprint(peak, **{"watched": ("CUPTI",), "driver_watched": True, **fields})


def test_the_middle_peak_of_head_is_held_to_the_greatest_of_base() -> None:
    check = Check("max_peak_regression", "2%", "marker")
    for head, base, outcome in [
        ((1020, 1020, 1020), (1000, 1000, 1000), Outcome.PASS),
        ((1021, 1021, 1000), (1000, 1000, 1000), Outcome.FAIL),
        ((9999, 1000, 1000), (1000, 1000, 1000), Outcome.PASS),
        ((1021, 1021, 1021), (1000, 1001, 1000), Outcome.PASS),
        ((1000, 1000), (1000, 1000, 1000), Outcome.UNDECIDED),  # one was not watched
        ((1000, 1000, 1000), (), Outcome.UNDECIDED),  # none of base
    ]:
        sides = [[watched(peak) for peak in peaks] for peaks in (head, base)]
        assert of_peaks(check, *sides).outcome is outcome


def test_a_peak_of_head_that_may_be_higher_does_not_pass() -> None:
    """As in a session: without CUPTI, memory that the driver gives is not seen."""
    check = Check("max_peak_regression", "0 B", "marker")
    for unseen in (
        {"driver_watched": False},
        {"driver_watched": False, "watched": ()},
        {"watched": ()},
        {"peak_bound": 1001},
    ):
        head = [watched(1000, **unseen)] * PEAKS
        base = [replace(footprint, peak_bound=None) for footprint in head]
        assert of_peaks(check, head, base).outcome is Outcome.UNDECIDED, unseen
    known = [watched(1000, peak_bound=1000)] * PEAKS
    assert of_peaks(check, known, known).outcome is Outcome.PASS
    grown = [watched(1001, driver_watched=False)] * PEAKS
    before = [watched(1000, driver_watched=False)] * PEAKS
    assert of_peaks(check, grown, before).outcome is Outcome.FAIL
