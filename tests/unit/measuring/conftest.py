"""Fixtures of the measuring tests: a device that counts, and everything that a measurement is made of."""

from __future__ import annotations

import pytest
from bench import Bench

from pytest_gpumem.devices.simulated import memory
from pytest_gpumem.units import KiB


@pytest.fixture(autouse=True)
def _little_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the simulated device computes decides no time here."""
    for name in ("BACKED_BYTES", "PREFIX_BYTES"):
        monkeypatch.setattr(memory, name, 16 * KiB)


@pytest.fixture
def bench() -> Bench:
    return Bench()
