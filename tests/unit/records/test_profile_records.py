"""Profiles: their figures for one launch, their means, and their JSON."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from pytest_gpumem.records.measurement import Window
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.schema import SchemaError, profiles_from_json, profiles_to_json
from pytest_gpumem.records.uses import CopyUse, KernelUse

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
COPY = CopyUse("H2D", "pinned", "device", count=5, nbytes=5000, nanoseconds=100)
PROFILE = TestProfile(
    "test_large",
    "tests/test_a.py::test_large",
    "fitted",
    5,
    (LARGE, SMALL),
    (COPY, CopyUse("H2D", "pageable", "device", 5, 70, 10)),
    (CopyUse("memset", "", "device", 1, 64, 8),),
    sm_clock_hz=1.98e9,
    set_aside=1 << 20,
    window=Window(1 << 20, 1.0, 1 << 20),
    process=7,
    tool="nsys",
    tool_version="2025.3",
)


def test_a_profile_has_the_key_of_its_row() -> None:
    assert PROFILE.key == "tests/test_a.py::test_large[fitted]"
    assert replace(PROFILE, nodeid=None, label="").key == "test_large"


def test_json_gives_back_the_same_profile() -> None:
    assert profiles_from_json(json.loads(json.dumps(profiles_to_json([PROFILE, PROFILE])))) == (
        PROFILE,
        PROFILE,
    )
    plain = profiles_to_json([PROFILE])
    del plain["profiles"][0]["window"]  # a field with a default may be missing
    assert profiles_from_json(plain) == (replace(PROFILE, window=None),)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"colour": "red"}, r"\$.profiles\[0\].colour: unknown"),
        ({"launches": 0}, r"\$.profiles\[0\].launches: 0"),
        ({"launches": "many"}, r"\$.profiles\[0\].launches: 'many'; expected `int | null`"),
        ({"kernels": [{"name": "k"}]}, r"\$.profiles\[0\].kernels\[0\]"),
        ({"sm_clock_hz": float("nan")}, "not a finite number"),
    ],
)
def test_json_that_is_no_profile_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        profiles_from_json(
            {"schema": 1, "profiles": [{**profiles_to_json([PROFILE])["profiles"][0], **change}]}
        )


def test_a_file_of_something_else_is_refused() -> None:
    with pytest.raises(SchemaError, match="explain --keep"):
        profiles_from_json({"rows": []})
    with pytest.raises(SchemaError, match=r"\$.schema: 2"):
        profiles_from_json({"schema": 2, "profiles": []})
    with pytest.raises(SchemaError, match=r"\$.schema: True"):
        profiles_from_json({"schema": True, "profiles": []})
