"""What follows from the facts of a device: the folder of its baselines, and its L2."""

from __future__ import annotations

from typing import Any

import pytest
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.records.device import UnknownPeak
from pytest_gpumem.units import GiB, MiB

KEY = "NVIDIA-H100-80GB-HBM3-sm90-79GiB-ecc"


def test_the_folder_of_a_baseline_has_what_makes_results_incomparable() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, KEY),
        (
            {"driver": "580.95.05", "memory_clock_hz": 1e9, "uuid": "GPU-1", "mps": True},
            KEY,
        ),  # context
        ({"simulated": True}, f"simulated-{KEY}"),
        ({"mig_profile": "1g.10gb"}, "NVIDIA-H100-80GB-HBM3-1g.10gb-sm90-79GiB-ecc"),
        ({"compute_capability": (10, 3)}, "NVIDIA-H100-80GB-HBM3-sm103-79GiB-ecc"),
        ({"memory_bytes": 40 * GiB + GiB // 3}, "NVIDIA-H100-80GB-HBM3-sm90-40GiB-ecc"),
        ({"ecc": False}, "NVIDIA-H100-80GB-HBM3-sm90-79GiB-noecc"),
        ({"ecc": None}, "NVIDIA-H100-80GB-HBM3-sm90-79GiB"),
        ({"name": " GeForce  RTX/4090 (D)", "ecc": None}, "GeForce-RTX-4090-D-sm90-79GiB"),
    ]
    for changes, key in cases:
        assert replace(H100, **changes).key == key, changes


def test_the_set_aside_has_steps_of_a_sixteenth_of_l2() -> None:
    assert replace(H100, l2_bytes=48 * MiB).l2_step_bytes == 3 * MiB


def test_l2_persists_where_there_is_a_set_aside_and_no_mig_instance() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"persisting_l2_max_bytes": 1}, True),
        ({"persisting_l2_max_bytes": 0}, False),
        ({"mig_profile": "1g"}, False),
    ]
    for changes, persists in cases:
        assert replace(H100, **changes).persists is persists, changes


def test_an_unknown_peak_is_an_error() -> None:
    assert H100.peak_bandwidth == 3.35232e12
    unknown = replace(H100, dram_peak=0.0)
    with pytest.raises(UnknownPeak, match="peak bandwidth of NVIDIA H100 80GB HBM3 is unknown"):
        unknown.peak_bandwidth  # noqa: B018
