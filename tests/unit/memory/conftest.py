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
def found(device: CountedDevice) -> int:
    """The set-aside that a test finds: neither 0 nor what a new context has."""
    before, wanted = device.l2.set_aside(), device.facts.l2_step_bytes * 2
    assert before != wanted
    assert device.l2.request_set_aside(wanted) == wanted
    return wanted


@pytest.fixture
def arena(device: CountedDevice) -> Arena:
    return Arena(device, seed=7)


@pytest.fixture
def memory(arena: Arena) -> Memory:
    return Memory(arena)
