"""Creep: what the window has followed is seen from the anchor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Repeat
from pytest_gpumem.verdicts.creep import creep

START = 268e-6


def test_many_small_slow_downs_are_seen_together(bench: Any, h100: DeviceFacts) -> None:
    anchor = [bench.measurement(START) for _ in range(3)]
    window = [bench.measurement(START * 1.003**step) for step in range(1, 8)]
    said = creep(window[-1], anchor, 10, h100)
    assert said is not None
    assert said.startswith("since the anchor +2.12 %: slower than the first 3 of 10 processes of its epoch by ")
    assert said.endswith(" or more with 99.9 %")


def test_processes_of_one_run_count_each(bench: Any, h100: DeviceFacts) -> None:
    one = bench.measurement(START)
    said = creep(bench.measurement(START * 1.02), [replace(one, further=(Repeat(one.medians, None),) * 2)], 30, h100)
    assert said is not None
    assert "slower than the first 3 of 30 processes of its epoch" in said


def test_what_is_not_beyond_doubt_is_not_said(bench: Any, h100: DeviceFacts) -> None:
    anchor = [bench.measurement(START) for _ in range(3)]
    assert creep(bench.measurement(START * 1.0001), anchor, 10, h100) is None
    assert creep(bench.measurement(START * 0.9), anchor, 10, h100) is None
    assert creep(bench.measurement(START * 1.1), [], 10, h100) is None


def test_an_anchor_that_was_measured_in_another_way_says_nothing(bench: Any, h100: DeviceFacts) -> None:
    anchor = [replace(bench.measurement(START), sampler="graph") for _ in range(3)]
    assert creep(replace(bench.measurement(START * 1.1), sampler="blocked"), anchor, 10, h100) is None
