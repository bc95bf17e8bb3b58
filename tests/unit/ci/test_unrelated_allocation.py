"""Base and head that differ by an unrelated allocation: the draws and the differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import unrelated_allocation


def record(heads: dict[int, list[float]], base: list[float], plan: str = "default") -> dict[str, Any]:
    """Values are seconds; a case's placements all have its value."""
    runs = [
        {
            "round": number,
            "extra": extra,
            "error": None,
            "cases": [
                {"plan": plan, "mib": 2, "value": value, "medians": [value] * (1 if plan == "one placement" else 16), "overhead": None}
            ],
        }
        for extra, values in {0: base, **heads}.items()
        for number, value in enumerate(values, 1)
    ]
    return {"device": {"name": "NVIDIA H200", "simulated": False, "driver": "580"}, "ended": "2026-11-21T00:00:00", "runs": runs}


def test_a_shift_is_found_and_its_interval_is_students() -> None:
    base = [1.0, 1.01, 0.99, 1.0]
    head = [1.02 * base[0], 1.03 * base[1], 1.02 * base[2], 1.01 * base[3]]
    (found,) = unrelated_allocation.differences(record({3: head}, base))
    assert found["difference"] == pytest.approx(0.02)
    # t(0.975, 3) = 3.182; the ratios deviate by 0.00816
    assert found["high"] - found["low"] == pytest.approx(2 * 3.182 * 0.008165 / 2, rel=1e-3)
    assert found["differs"]


def test_the_interval_for_all_heads_at_once_is_wider() -> None:
    random = np.random.default_rng(0)
    base, head = list(random.normal(1, 0.01, 20)), list(random.normal(1, 0.01, 20))
    (alone,) = unrelated_allocation.differences(record({3: head}, base))
    both = unrelated_allocation.differences(record({3: head, 37: head}, base))
    assert alone["low_all"] == pytest.approx(alone["low"])
    assert all(one["low_all"] < one["low"] < one["high"] < one["high_all"] for one in both)


def test_pairs_are_held_against_the_interval_that_a_run_states() -> None:
    """At 200 us processes are expected to differ by 0.037 %, and placements by 0.16 %: a quarter of that is left by sixteen of them."""
    base = [200e-6] * 3
    (found,) = unrelated_allocation.differences(record({3: [200.1e-6, 200.2e-6, 202e-6]}, base))
    assert 0.0011 < found["stated"] < 0.0025
    assert found["beyond_stated"] == 1


def test_the_launch_overhead_of_a_process_is_no_difference() -> None:
    held = record({3: [1.05, 1.05]}, [1.0, 1.0])
    for run in held["runs"]:
        run["cases"][0]["overhead"] = 0.35 if run["extra"] else 0.30
    (found,) = unrelated_allocation.differences(held)
    assert found["difference"] == pytest.approx(0)


def test_a_worker_measures_one_placement_and_the_default_plan() -> None:
    from pytest_gpumem.devices.opening import choose

    answer = unrelated_allocation.answer(choose("sim"), {"device": "sim", "extra": 3, "mib": [256]})
    one, default = answer["cases"]
    assert (one["plan"], len(one["medians"]), one["half_width"]) == ("one placement", 1, None)
    assert (default["plan"], len(default["medians"]) >= 8) == ("default", True)
    base = unrelated_allocation.answer(choose("sim"), {"device": "sim", "extra": 0, "mib": [256]})
    assert base["cases"][0]["addresses"] != one["addresses"]
