"""Facts of a device for the kernels' launch shapes."""

from __future__ import annotations

import pytest
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.records.device import DeviceFacts


@pytest.fixture(scope="session")
def h100() -> DeviceFacts:
    return replace(H100, simulated=True)
