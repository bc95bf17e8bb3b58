from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from known_devices import H100

from pytest_gpumem.records.device import DeviceFacts


@pytest.fixture
def h100() -> DeviceFacts:
    return H100


@pytest.fixture
def install_cupti(monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Makes a module what `from cupti import cupti` gives."""

    def install(fake: ModuleType) -> None:
        package = ModuleType("cupti")
        package.cupti = fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupti", package)
        monkeypatch.setitem(sys.modules, "cupti.cupti", fake)

    return install
