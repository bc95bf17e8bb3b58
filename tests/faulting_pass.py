"""A counting pass with faults, for the tests of its figures and of its text."""

from __future__ import annotations

from pytest_gpumem.records.what_ran import PageCounts
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
