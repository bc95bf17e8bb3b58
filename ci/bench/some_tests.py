"""A pytest plugin of `footprint_overhead.py`: runs some tests of a suite, spread evenly over all, and profiles them if it is asked to.

SOME_TESTS is their number; SOME_PROFILE the file of a profile of cProfile, from the first test to the last.
"""

from __future__ import annotations

import cProfile
import os
from typing import Any

_PROFILE = cProfile.Profile()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out all but some tests."""
    count = int(os.environ.get("SOME_TESTS", "0"))
    if 0 < count < len(items):
        kept = {len(items) * number // count for number in range(count)}
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index not in kept])
        items[:] = [item for index, item in enumerate(items) if index in kept]


def pytest_runtest_logstart() -> None:
    """Begin the profile with the first test."""
    if os.environ.get("SOME_PROFILE"):
        _PROFILE.enable()


def pytest_sessionfinish() -> None:
    """Write the profile."""
    if path := os.environ.get("SOME_PROFILE"):
        _PROFILE.disable()
        _PROFILE.dump_stats(path)
