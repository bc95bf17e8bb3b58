from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Traffic
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.verdict import Comparison, Outcome, Verdict
from pytest_gpumem.units import MiB


@pytest.fixture
def facts() -> DeviceFacts:
    return DeviceFacts(
        name="NVIDIA H100 80GB HBM3",
        simulated=False,
        compute_capability=(9, 0),
        sm_count=132,
        max_threads_per_sm=2048,
        memory_bytes=85_031_714_816,
        l2_bytes=50 * MiB,
        persisting_l2_max_bytes=32_768_000,
        access_policy_max_window_bytes=128 * MiB,
        memory_clock_hz=2.619e9,
        memory_bus_bits=5120,
        peak_bandwidth=3.35232e12,
        async_engines=3,
        can_map_host=True,
        concurrent_managed_access=True,
        pageable_memory_access=False,
        integrated=False,
        ecc=True,
        driver="580.95.05",
        cuda="13.0",
        link="PCIe Gen5 x16",
    )


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """A row of a triad over 768 MiB that takes 268.3 us; keywords change the measurement."""

    def make(
        nodeid: str = "tests/test_stream.py::test_triad",
        outcome: Outcome = Outcome.PASS,
        *,
        label: str = "",
        reason: str = "within its limits",
        comparison: Comparison | None = None,
        simulated: bool = False,
        measured: bool = True,
        **changes: Any,
    ) -> Row:
        values: dict[str, Any] = {
            "label": label,
            "target": "triad",
            "mode": "clean-cold",
            "sampler": "graph",
            "sampler_reason": "it can be captured",
            "placements": ((268.2e-6, 268.3e-6, 268.9e-6), (268.3e-6, 268.3e-6, 268.3e-6)),
            "half_width": 0.2683e-6,
            "traffic": Traffic(reads=512 * MiB, writes=256 * MiB),
            "footprint": 768 * MiB,
            "floor": 1.28e-6,
            "conditions": (Conditions(), Conditions()),
        }
        measurement = Measurement(**{**values, **changes}) if measured else None
        return Row(nodeid, Limits(), Verdict(outcome, reason, comparison, simulated), measurement, label=label)

    return make
