"""Fixtures of the measuring tests: a device that counts, and everything that a measurement is made of."""

from __future__ import annotations

import pytest
from bench import Bench


@pytest.fixture(autouse=True)
def _little_content(little_content: None) -> None:
    """For all tests here."""


@pytest.fixture
def bench() -> Bench:
    return Bench()
