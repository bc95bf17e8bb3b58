"""Fixtures of the memory policy's tests."""

from __future__ import annotations

import pytest
from counted_device import CountedDevice

from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory


@pytest.fixture
def device() -> CountedDevice:
    return CountedDevice()


@pytest.fixture
def arena(device: CountedDevice) -> Arena:
    return Arena(device, seed=7)


@pytest.fixture
def memory(arena: Arena) -> Memory:
    return Memory(arena)
