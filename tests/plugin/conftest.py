"""What the tests of the plugin share: a clean environment and a quick session on the simulated device."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import forked
import pytest
import quick_plugins
from sessions import QUICKLY, SIMULATED

# Once here: pytester forgets what a session inside this process imports, and each would import it again.
for name in (
    "start",
    "repeating",
    "profiling",
    "benchmark_call",
    "rows",
    "results",
):
    importlib.import_module(f"pytest_gpumem.plugin.{name}")
for name in (
    "devices.locks",
    "devices.simulated.device",
    "memory.l2_leftovers",
    "measuring.stopping",
    "baselines.verdicts",
    "reporting.table",
    "reporting.html",
    "reporting.markdown",
):
    importlib.import_module(f"pytest_gpumem.{name}")
for name in ("email.parser", "numpy.random", "rich.console"):
    importlib.import_module(name)
with suppress(ImportError):
    importlib.import_module("nvtx")

quick_plugins.remember()

SHARING = ("test_planted_faults", "test_lost_measurements")
"""Modules that keep the baseline of their first test."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under `--dist loadgroup` one worker has the tests that share a saved project or baseline."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            module = item.path.stem
            if "saved" in getattr(item, "fixturenames", ()) or module in SHARING:
                item.add_marker(pytest.mark.xdist_group(module))


@pytest.fixture(autouse=True)
def _nobody_elses_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a CI's variables nor a developer's decide what these tests see."""
    for name in [*os.environ]:
        if name in ("CI", "PYTEST_ADDOPTS", "CODSPEED_ENV") or name.startswith(
            ("GPUMEM", "_GPUMEM", "PYTEST_XDIST")
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "400")  # sentences in one line; tests of a width set it again


@pytest.fixture(autouse=True)
def _quick_processes(request: pytest.FixtureRequest) -> None:
    if "new_interpreters" not in request.fixturenames:
        request.getfixturevalue("quick_processes")


@pytest.fixture
def new_interpreters() -> None:
    """For tests of what a process imports, of how it starts, and of a signal that it gets: none is forked."""


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with `python`, `pytest` and `gpumem` for scripts of a shell: their processes are forked too."""
    folder = tmp_path_factory.mktemp("programs")
    with forked.programs(folder):
        yield folder


@pytest.fixture
def session(pytester: pytest.Pytester, little_content: None) -> Callable[..., pytest.RunResult]:
    """Runs pytest inside this process: a process of its own would take ten times as long to start."""

    def run(*arguments: str) -> pytest.RunResult:
        # The filters of the outer session, which make warnings errors, are not the inner one's.
        return pytester.runpytest_inprocess(*QUICKLY, "-W", "default", *arguments)

    return run


@pytest.fixture
def gpumem(session: Callable[..., pytest.RunResult]) -> Callable[..., pytest.RunResult]:
    """As `session`, with `--gpumem` on the simulated device."""
    return functools.partial(session, *SIMULATED)
