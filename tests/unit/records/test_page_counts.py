"""What a counting pass found, in figures."""

from __future__ import annotations

import pytest
from faulting_pass import FAULTING

from pytest_gpumem.units import MiB


def test_migrated_bytes_and_rates_follow() -> None:
    assert FAULTING.migrated == 16 * MiB
    assert FAULTING.to_device_bandwidth == pytest.approx(16 * MiB / 1e-3)
    assert FAULTING.to_host_bandwidth is None
