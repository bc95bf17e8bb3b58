"""The launch that does nothing: what a reading contains besides the work that is timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pytest_gpumem.devices.protocol import Allocation, Launch
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.kernel import ArrayFacts, Call
from pytest_gpumem.records.device import DeviceFacts

BLOCKS_PER_SM = 2
"""Grid of the launch: full, like that of what is measured."""


def idle_launch(facts: DeviceFacts, memory: Allocation) -> Launch:
    """A launch of a full grid of `write` that finds no elements to write.

    Not of one element: where a written line lies changes the reading by as much as processes differ, which is what is asked for (52 ns as a
    standard deviation on an H200: ci/records/nvidia-h200/reading_noise.json, "16 bytes, by where they lie").

    Args:
        facts: of the device.
        memory: any device memory, for the kernel's argument.
    """
    kernel = CATALOGUE["write"]
    call = Call({"a": ArrayFacts(0, "f4", 4)}, {"value": 1.0}, BLOCKS_PER_SM * facts.sm_count)
    return Launch(kernel, call, kernel.shape(facts, call), {"a": memory})


def middle_mean(readings: Sequence[float]) -> float:
    """Mean of the middle half: finer than the ticks that a median falls on, and untouched by outliers."""
    quarter = len(readings) // 4
    return float(np.mean(sorted(readings)[quarter : len(readings) - quarter]))
