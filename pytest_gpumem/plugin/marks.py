"""The marks by which hooks recognise our tests: the markers, and the private fixtures that the
public ones depend on.

Read in every session, also with the plugin off: nothing heavy is imported. PYTEST_DONT_REWRITE
"""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem.settings import marker_keywords

SESSION_PLUGIN = "gpumem-session"  # name of a plugin that is registered only with `--gpumem`
NEEDS_GPUMEM = "needs --gpumem"  # why a test that uses our fixtures skips with the plugin off

MARKER = "gpumem"

# Fixtures. The private ones lie behind public ones, which a user may override.
TEST_FIXTURE = "_gpumem_test"  # all others depend on it
PEER_FIXTURE = "_gpumem_peer_memory"  # the test has two GPUs for itself, if there are two
KERNELS_FIXTURE = "gpu_kernels"  # a test without it needs no kept buffers
MEMORY_FIXTURE = "_gpumem_watched"
BENCHMARK_FIXTURE = "_gpumem_benchmark"


def uses(item: pytest.Item, fixture: str) -> bool:
    """True if a test uses one of our fixtures. Only ours depend on the private ones."""
    return fixture in getattr(item, "fixturenames", ())


def uses_benchmark(item: pytest.Item) -> bool:
    """True if a test has pytest-benchmark's fixture, whatever its name."""
    modules = {getattr(fixture.func, "__module__", "") for fixture in _fixtures(item)}
    return uses(item, "benchmark") or "pytest_benchmark.plugin" in modules


def measures(item: pytest.Item) -> bool:
    """False only if no fixture of a test could ask for another by `getfixturevalue`."""
    names = getattr(getattr(item, "_fixtureinfo", None), "argnames", ())
    if uses_benchmark(item) or "request" in names:
        return True
    for fixture in _fixtures(item):
        package = str(fixture.func.__module__).partition(".")[0]
        if "request" in fixture.argnames and package not in ("_pytest", "pytest_gpumem"):
            return True
    return False


def _fixtures(item: pytest.Item) -> list[pytest.FixtureDef[Any]]:
    fixtures: list[pytest.FixtureDef[Any]] = []
    information = getattr(item, "_fixtureinfo", None)  # of a test that is a function
    for definitions in getattr(information, "name2fixturedefs", {}).values():
        fixtures += definitions
    return fixtures


def keywords_of(item: pytest.Item) -> dict[str, Any]:
    """The keywords of a test's markers, of which the closest wins.
    Raises `SettingsError`: a marker with positional arguments.
    """
    # pytest gives the marks of a function before those of `pytest.param(..., marks=...)`.
    callspec = getattr(item, "callspec", None)
    marks = [mark for mark in getattr(callspec, "marks", ()) if mark.name == MARKER]
    for mark in item.iter_markers(MARKER):
        if not any(mark is closer for closer in marks):
            marks.append(mark)
    return marker_keywords(marks)
