"""Variants of a card: GPUs of one name, driver and clock whose DRAM answers after another time, and on which the same code takes longer.

Ten H200 cards on seven hosts were of two variants, seven and three, and the driver tells nothing of it: on the second DRAM answers 3.8 %
later, a reduction is 1.5 % faster, and scattered copies are 1.6 to 1.9 % slower (docs/gate.md, Card variants).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.units import format_time

APART = 0.015
"""Least share by which the latency of DRAM differs between variants: less than half of what was seen."""


def same_variant(measurement: Measurement, past: Measurement) -> bool:
    """True unless the two were measured on cards that are known to be of different variants."""
    own, then = _latency(measurement), _latency(past, like=measurement)
    return own is None or then is None or abs(math.log(own / then)) <= math.log1p(APART)


def other_variant(measurement: Measurement, history: Sequence[Measurement]) -> str:
    """What tells this card from those of the history, all of which are of another variant."""
    own = _latency(measurement)
    others = sorted(then for past in history if (then := _latency(past, like=measurement)) is not None)
    assert own is not None
    assert others
    low, high = format_time(others[0]), format_time(others[-1])
    theirs = low if low == high else f"{low} to {high}"
    return (
        f"the baseline is of another variant of this card, or of another clock: DRAM answers in {format_time(own)} here and in {theirs} "
        "there, and unchanged code takes another time; accept runs of this variant (--gpumem-save), or let gpumem duet decide"
    )


def _latency(measurement: Measurement, like: Measurement | None = None) -> float | None:
    """Seconds of one access to DRAM; None where it was not read, or not as `like` has it."""
    controls = measurement.controls
    if controls is None or (like is not None and like.controls is not None and like.controls.source != controls.source):
        return None
    return controls.latency
