"""What the tests of the plugin share: a clean environment and a quick session on the simulated device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from sessions import SIMULATED


@pytest.fixture(autouse=True)
def _nobody_elses_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CI's variables nor a developer's decide what these tests see."""
    for name in [*os.environ]:
        if name in ("CI", "PYTEST_ADDOPTS", "CODSPEED_ENV") or name.startswith(("GPUMEM", "PYTEST_XDIST")):
            monkeypatch.delenv(name)


@pytest.fixture
def gpumem(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Runs pytest with `--gpumem` on the simulated device, in a process of its own."""

    def run(*arguments: str) -> pytest.RunResult:
        return pytester.runpytest_subprocess(*SIMULATED, *arguments)

    return run
