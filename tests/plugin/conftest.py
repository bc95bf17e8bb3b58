"""What the tests of the plugin share: a clean environment and a quick session on the simulated device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

import pytest
from sessions import SIMULATED

# Once here: pytester forgets what a session inside this process imports, and each would import it again.
for name in ("pytest_gpumem.plugin.terminal", "pytest_gpumem.devices.simulated.device", "scipy.stats"):
    importlib.import_module(name)


@pytest.fixture(autouse=True)
def _nobody_elses_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CI's variables nor a developer's decide what these tests see."""
    for name in [*os.environ]:
        if name in ("CI", "PYTEST_ADDOPTS", "CODSPEED_ENV") or name.startswith(("GPUMEM", "PYTEST_XDIST")):
            monkeypatch.delenv(name)


@pytest.fixture
def gpumem(pytester: pytest.Pytester) -> Callable[..., pytest.RunResult]:
    """Runs pytest with `--gpumem` on the simulated device, inside this process."""

    def run(*arguments: str) -> pytest.RunResult:
        # The filters of the outer session, which make warnings errors, are not the inner one's.
        return pytester.runpytest_inprocess(*SIMULATED, "-W", "default", *arguments)

    return run
