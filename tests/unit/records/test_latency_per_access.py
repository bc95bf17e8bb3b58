"""Latency per dependent access and its interval."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.records.measurement import Measurement


def measured(**changes: Any) -> Measurement:
    chase = {"mode": "hot", "half_width": 0.6e-3, "accesses_per_launch": 10_000}
    return measurement(
        placements=((1e-3, 2e-3, 9e-3), (3e-3, 4e-3, 5e-3)), **chase | changes
    )  # medians 2 and 4 ms


def test_the_interval_is_the_launchs_shared_out() -> None:
    assert measured().latency_per_access == pytest.approx(300e-9)
    assert measured().latency_per_access_interval == pytest.approx((240e-9, 360e-9))


def test_without_placements_or_a_chain_there_is_none() -> None:
    for missing in ["half_width", "accesses_per_launch"]:
        assert measured(**{missing: None}).latency_per_access_interval is None, missing


def test_a_changed_measurement_has_medians_of_its_own() -> None:
    before = measured()
    assert before.medians == (2e-3, 4e-3)
    after = replace(before, placements=before.placements[:1])
    assert after.medians == (2e-3,)
    assert after.latency == 2e-3
    assert before == measured()  # what was asked for is no part of a record
    assert pickle.loads(pickle.dumps(before)) == before
