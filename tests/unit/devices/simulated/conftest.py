"""Fixtures of the simulated device's tests."""

from __future__ import annotations

import pytest
from workbench import Workbench


@pytest.fixture
def bench() -> Workbench:
    """A simulated H100 with a stream."""
    return Workbench()
