"""Measurements without a device: numbers go in, verdicts come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from known_devices import H100
from measurements import TRIAD, measurement
from msgspec.structs import replace

from pytest_gpumem.records.device import Conditions, DeviceFacts
from pytest_gpumem.records.measurement import Measurement, Repeat


class Bench:
    """Makes measurements."""

    def measurement(
        self,
        latency: float = 268e-6,
        *,
        spread: float = 0.0005,
        placements: int = 8,
        samples: int = 1,
        **changes: object,
    ) -> Measurement:
        """One whose placements lie evenly around `latency`; `spread` is their standard deviation over the latency."""
        offsets = np.linspace(-1.0, 1.0, placements) if placements > 1 else np.zeros(1)
        scale = spread / offsets.std(ddof=1) if placements > 1 else 0.0
        values = latency * (1 + scale * offsets)
        return self.of(tuple((float(v),) * samples for v in values), **changes)

    def run(
        self,
        latency: float = 268e-6,
        *factors: float,
        **changes: Any,
    ) -> Measurement:
        """A run of a process and of further ones, each slower than the first by a factor."""
        one = self.measurement(latency, **changes)
        further = tuple(
            Repeat(tuple(median * factor for median in one.medians), one.overhead)
            for factor in factors
        )
        return replace(one, further=further)

    def baseline(
        self, runs: int, processes: int = 1, latency: float = 268e-6, **changes: Any
    ) -> list[Measurement]:
        """Runs that agree, each of a session of its own."""
        return [self.run(latency, *[1.0] * (processes - 1), **changes) for _ in range(runs)]

    @staticmethod
    def of(placements: tuple[tuple[float, ...], ...], **changes: object) -> Measurement:
        clocks = (Conditions(sm_clock_hz=1.98e9), Conditions(sm_clock_hz=1.965e9))
        given = {
            "sampler": "held",
            "placements": placements,
            "floor": 1.28e-6,
            "conditions": clocks,
            **TRIAD,
        }
        return measurement(**given | changes)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def h100() -> DeviceFacts:
    return H100


@pytest.fixture
def no_peak() -> DeviceFacts:
    """A board whose driver reports no memory clock and no bus width, as that of compute capability 11.0 does."""
    return replace(H100, memory_clock_hz=0.0, dram_peak=0.0)


@pytest.fixture
def endless() -> DeviceFacts:
    """A device whose peak no made-up latency passes."""
    return replace(H100, dram_peak=1e18)
