"""Measurements without a device: numbers go in, verdicts come out."""

from __future__ import annotations

import numpy as np
import pytest
from known_devices import H100

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement, Traffic


class Bench:
    """Makes measurements."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def measurement(
        self, latency: float = 268e-6, *, spread: float = 0.0005, placements: int = 8, samples: int = 1, **changes: object
    ) -> Measurement:
        """One whose placements lie evenly around `latency`; `spread` is their standard deviation over the latency."""
        offsets = np.linspace(-1.0, 1.0, placements) if placements > 1 else np.zeros(1)
        scale = spread / offsets.std(ddof=1) if placements > 1 else 0.0
        values = latency * (1 + scale * offsets)
        return self.of(tuple((float(v),) * samples for v in values), **changes)

    def process(self, latency: float, *, between: float, placement: float, within: float, samples: int = 15) -> Measurement:
        """One process of a noisy device; the three spreads are standard deviations of the logarithm."""
        centres = latency * np.exp(self.rng.normal(0, between) + self.rng.normal(0, placement, (8, 1)))
        taken = centres * np.exp(self.rng.normal(0, within, (8, samples)))
        return self.of(tuple(map(tuple, taken.tolist())))

    @staticmethod
    def of(placements: tuple[tuple[float, ...], ...], **changes: object) -> Measurement:
        given: dict[str, object] = {
            "label": "",
            "target": "triad",
            "mode": "clean-cold",
            "sampler": "graph",
            "sampler_reason": "the work can be captured",
            "placements": placements,
            "half_width": None,
            "traffic": Traffic(reads=2 * 2**28, writes=2**28),
            "footprint": 3 * 2**28,
            "floor": 1.28e-6,
            "conditions": (Conditions(sm_clock_hz=1.98e9), Conditions(sm_clock_hz=1.965e9)),
            **changes,
        }
        return Measurement(**given)  # type: ignore[arg-type]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def h100() -> DeviceFacts:
    return H100
