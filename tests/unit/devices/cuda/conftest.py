from __future__ import annotations

import pytest

from pytest_gpumem.records.device import DeviceFacts


@pytest.fixture
def h100() -> DeviceFacts:
    return DeviceFacts(
        name="NVIDIA H100 80GB HBM3",
        simulated=False,
        compute_capability=(9, 0),
        sm_count=132,
        max_threads_per_sm=2048,
        memory_bytes=80 << 30,
        l2_bytes=52_428_800,
        persisting_l2_max_bytes=32_768_000,
        access_policy_max_window_bytes=128 << 20,
        memory_clock_hz=2619e6,
        memory_bus_bits=5120,
        peak_bandwidth=3352e9,
        async_engines=3,
        can_map_host=True,
        concurrent_managed_access=True,
        pageable_memory_access=False,
        integrated=False,
    )
