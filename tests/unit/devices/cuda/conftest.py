from __future__ import annotations

import pytest
from known_devices import H100

from pytest_gpumem.records.device import DeviceFacts


@pytest.fixture
def h100() -> DeviceFacts:
    return H100
