"""Profiles: their figures for one launch, and their key."""

from __future__ import annotations

from msgspec.structs import replace

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import KernelUse

SMALL = KernelUse("small", (1, 1, 1), (32, 1, 1), launches=5, nanoseconds=1000)
LARGE = KernelUse(
    "void large<float>(T1 *)",
    (264, 2, 1),
    (1024, 1, 1),
    launches=10,
    nanoseconds=9000,
    registers=32,
    shared=1024,
    local=0,
    dram_read=1000,
    dram_written=500,
    l2_read=3000,
    l2_written=1000,
    l2_hit_rate=0.5,
    l2_read_hit_rate=0.25,
    sectors_per_request=4.0,
    sectors_per_store=8.0,
    occupancy=0.9,
    sm_clock_hz=1.98e9,
    memory_clock_hz=3.2e9,
)
PROFILE = TestProfile(
    "test_large",
    "tests/test_a.py::test_large",
    "fitted",
    5,
    (LARGE, SMALL),
    sm_clock_hz=1.98e9,
    set_aside=1 << 20,
    window=Window(1 << 20, 1.0, 1 << 20),
    process=7,
    tool="ncu",
    tool_version="2025.3",
)


def test_a_profile_has_the_key_of_its_row() -> None:
    assert PROFILE.key == "tests/test_a.py::test_large[fitted]"
    assert replace(PROFILE, nodeid=None, label="").key == "test_large"
