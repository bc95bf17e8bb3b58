"""What a counting pass found, in figures."""

from __future__ import annotations

import pytest

from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import MiB

FAULTING = PageCounts(
    gpu_faults=159,
    gpu_groups=26,
    gpu_pages=150,
    cpu_faults=48,
    to_device=16 * MiB,
    to_device_seconds=1e-3,
    mapped=2 * MiB,
    causes={"fault": 10 * MiB, "speculation": 6 * MiB, "eviction": 0},
)


def test_duplicates_migrated_bytes_and_rates_follow() -> None:
    assert (FAULTING.duplicates, FAULTING.migrated) == (9, 16 * MiB)
    assert FAULTING.to_device_bandwidth == pytest.approx(16 * MiB / 1e-3)
    assert FAULTING.to_host_bandwidth is None
