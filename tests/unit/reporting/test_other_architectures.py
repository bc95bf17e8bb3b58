"""GPUs that this project never ran on, by their data sheets: what doctor, ceilings, pages and skips make of their facts.

Facts are of NVIDIA's data sheets and CUDA's tables; what a driver may leave out is left out. Nothing here says how fast they are.
"""

from __future__ import annotations

from typing import Any

import pytest
from cases import naming
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.devices.checks import unsupported
from pytest_gpumem.doctor.checks import gpu_checks
from pytest_gpumem.memory.managed import no_migration
from pytest_gpumem.memory.window_request import fit_set_aside
from pytest_gpumem.records.device import DeviceFacts, UnknownPeak, host_link, peak_bandwidth
from pytest_gpumem.units import GiB, MiB


def sheet(
    name: str,
    cc: tuple[int, int],
    *,
    sms: int,
    memory: int,
    l2: int,
    persisting: int,
    clock: float,
    bus: int,
    pcie: int,
    **more: Any,
) -> DeviceFacts:
    shared = {name: more.get(name, False) for name in ("integrated", "host_page_tables")}
    link, rate = host_link(pcie, 16, **shared)
    return replace(
        H100,
        name=name,
        compute_capability=cc,
        sm_count=sms,
        memory_bytes=memory * GiB,
        l2_bytes=l2 * MiB,
        persisting_l2_max_bytes=persisting * MiB,
        memory_clock_hz=clock,
        memory_bus_bits=bus,
        dram_peak=peak_bandwidth(clock, bus),
        link=link,
        link_bandwidth=rate,
        **more,
    )


SHARED = {"pageable_memory_access": True, "host_page_tables": True}
A100 = sheet(
    "NVIDIA A100-SXM4-80GB",
    (8, 0),
    sms=108,
    memory=80,
    l2=40,
    persisting=30,
    clock=1.593e9,
    bus=5120,
    pcie=4,
)
RTX4090 = sheet(
    "NVIDIA GeForce RTX 4090",
    (8, 9),
    sms=128,
    memory=24,
    l2=72,
    persisting=45,
    clock=10.501e9,
    bus=384,
    pcie=4,
    ecc=None,
    async_engines=2,
)
B200 = sheet(
    "NVIDIA B200",
    (10, 0),
    sms=148,
    memory=180,
    l2=126,
    persisting=78,
    clock=3.996e9,
    bus=8192,
    pcie=6,
)
GB200 = sheet(
    "NVIDIA GB200",
    (10, 0),
    sms=152,
    memory=186,
    l2=126,
    persisting=78,
    clock=3.996e9,
    bus=8192,
    pcie=6,
    **SHARED,
)
INTEGRATED = sheet(
    "NVIDIA GB10",
    (12, 1),
    sms=48,
    memory=119,
    l2=24,
    persisting=0,
    clock=0.0,
    bus=0,
    pcie=5,
    integrated=True,
    ecc=None,
    **SHARED,
)
ORIN = sheet(
    "Orin",
    (8, 7),
    sms=16,
    memory=61,
    l2=4,
    persisting=3,
    clock=0.0,
    bus=0,
    pcie=4,
    integrated=True,
    concurrent_managed_access=False,
)
ALL = (A100, RTX4090, B200, GB200, INTEGRATED, ORIN)


def test_the_peak_is_the_data_sheets_or_unknown() -> None:
    for facts, gigabytes in [
        (A100, 2039),
        (RTX4090, 1008),
        (B200, 8184),
        (GB200, 8184),
        (INTEGRATED, None),
        (ORIN, None),
    ]:
        with naming(facts):
            if gigabytes is None:
                with pytest.raises(UnknownPeak, match="reports no memory clock"):
                    _ = facts.peak_bandwidth
            else:
                assert facts.peak_bandwidth / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_persisting_l2_skips_where_there_is_none() -> None:
    for facts, reason in [
        (A100, None),
        (RTX4090, None),
        (B200, None),
        (GB200, None),
        (INTEGRATED, "persistingL2CacheMaxSize is 0"),
        (ORIN, None),
    ]:
        said = unsupported(facts, lambda: pytest.fail("read under MPS only"))
        assert said is None if reason is None else reason in str(said), facts
        if said is None:
            assert (
                0
                < fit_set_aside(facts, facts.l2_bytes)
                <= min(facts.l2_bytes // 2, facts.persisting_l2_max_bytes)
            ), facts


def test_doctor_says_where_pages_migrate() -> None:
    for facts in ALL:
        checks = {check.name: check for check in gpu_checks(facts, "", None, "no library")}
        skips = "its tests skip" in checks["managed memory"].detail
        assert skips is (no_migration(facts) is not None) is (facts is ORIN), facts
        assert ("peak unknown" in checks["GPU"].detail) is (facts in (INTEGRATED, ORIN)), facts
