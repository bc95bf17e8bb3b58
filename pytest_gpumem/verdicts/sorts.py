"""Sorts of cards: GPUs of one name, driver and clock whose DRAM answers after another time, and on which the same code takes another time.

Ten H200 cards on seven hosts fell into two sorts, seven and three, with nothing that the driver says to tell them apart: on the second DRAM
answers 3.8 % later, a reduction is 1.5 % faster, and scattered copies are 1.6 to 1.9 % slower (docs/gate.md, Cards of one name).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_time

APART = 0.015
"""Share by which the latency of DRAM differs between cards of different sorts at least: less than half of what was seen."""


def of_this_sort(measurement: Measurement, history: Sequence[Measurement]) -> list[Measurement]:
    """Those of the history that were measured on cards of this one's sort, or of an unknown one."""
    own = _latency(measurement)
    return [past for past in history if own is None or (then := _latency(past, like=measurement)) is None or _alike(own, then)]


def another_sort(measurement: Measurement, history: Sequence[Measurement]) -> str:
    """Says what tells this card from those of the history, none of which is of its sort."""
    own = _latency(measurement)
    others = sorted(then for past in history if (then := _latency(past, like=measurement)) is not None)
    assert own is not None
    assert others
    low, high = format_time(others[0]), format_time(others[-1])
    theirs = low if low == high else f"{low} to {high}"
    return (
        "this card, or its clock, is of another sort than the baseline's, and unchanged code takes another time on it: its DRAM answers in "
        f"{format_time(own)}, theirs in {theirs}; accept processes of this sort (--gpumem-save), or let gpumem duet decide"
    )


def _alike(own: float, then: float) -> bool:
    return abs(math.log(own / then)) <= math.log1p(APART)


def _latency(measurement: Measurement, like: Measurement | None = None) -> float | None:
    """Seconds of one access to DRAM; None where it was not read, or not as `like` has it."""
    controls = measurement.controls
    if controls is None or (like is not None and like.controls is not None and like.controls.source != controls.source):
        return None
    return controls.latency
