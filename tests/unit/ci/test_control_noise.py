"""The noise of the L2 control: what differs between arrays is told apart from what differs in time."""

from __future__ import annotations

from typing import Any

import control_noise
import numpy as np
import pytest


def run(random: np.random.Generator, *, places: float, time: float) -> dict[str, Any]:
    """A process whose sets of arrays differ by `places`, and whose readings of one set by `time` (standard deviations of the logarithm)."""
    rounds = []
    for _ in range(200):
        own = 20e-6 * np.exp(random.normal(0, places, 32))
        one: dict[str, Any] = {way: own.mean() * np.exp(random.normal(0, time)) for way in ("fresh", "again", "awake")}
        rounds.append(one | {"each": own.tolist()})
    return {"sets": {"shipped": rounds}}


def test_arrays_that_differ_spread_the_set_and_not_its_repetition() -> None:
    (found,) = control_noise.summary([run(np.random.default_rng(n), places=0.1, time=0.001) for n in range(3)])
    assert found["over arrays"] == pytest.approx(0.1, rel=0.1)
    assert found["within"]["fresh"] == pytest.approx(0.1 / 32**0.5, rel=0.1)
    assert found["same arrays"]["again"] == pytest.approx(0.001 * 2**0.5, rel=0.1)


def test_a_noise_in_time_spreads_the_repetition_too() -> None:
    (found,) = control_noise.summary([run(np.random.default_rng(n), places=0.0, time=0.02) for n in range(3)])
    assert found["same arrays"]["again"] == pytest.approx(0.02 * 2**0.5, rel=0.1)
    assert abs(found["moved"]["awake"]) < 0.005
