"""Facts of a real device, for tests that need some."""

from __future__ import annotations

from pytest_gpumem.records.device import DeviceFacts

H100 = DeviceFacts(
    name="NVIDIA H100 80GB HBM3",
    simulated=False,
    compute_capability=(9, 0),
    sm_count=132,
    max_threads_per_sm=2048,
    memory_bytes=85_017_493_504,
    l2_bytes=52_428_800,
    persisting_l2_max_bytes=32_768_000,
    access_policy_max_window_bytes=134_217_728,
    memory_clock_hz=2.619e9,
    dram_peak=3.35232e12,
    async_engines=3,
    can_map_host=True,
    concurrent_managed_access=True,
    integrated=False,
    ecc=True,
    shared_bytes_per_sm=233_472,
    max_shared_bytes_per_block=232_448,
)
