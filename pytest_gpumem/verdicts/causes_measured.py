"""The slow-down that is to be explained, from the measurements of two sides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.verdicts.causes import SlowDown
from pytest_gpumem.verdicts.spread import difference

CONFIDENCE = 0.95
"""Of the interval, two-sided."""


def slow_down(base: Sequence[Measurement], head: Measurement) -> SlowDown:
    """Head against base, with the interval that the screen's variances give.

    Args:
        base: one measurement for each process, at least one.
        head: with the further processes that it may have.
    """
    found = difference(head, base)
    reach = found.variance().reach((1 + CONFIDENCE) / 2)
    # Base is what was measured of it; head follows from the ratio, in which the launch overhead is put to the same on both sides.
    before = math.exp(math.fsum(math.log(one.latency) for one in base) / len(base))
    after, low, high = (before * math.exp(found.log + way) for way in (0.0, -reach, reach))
    return SlowDown(before, after, low - before, high - before, CONFIDENCE)
