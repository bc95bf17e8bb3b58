"""A pytest plugin of `footprint_overhead.py`: runs the first tests of a suite alone, by their number or for some time.

FIRST_TESTS is the number; FIRST_SECONDS the time after which a session ends.
"""

from __future__ import annotations

import os
import time
from typing import Any

_BEGUN = time.perf_counter()


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out what comes after the first tests."""
    if count := int(os.environ.get("FIRST_TESTS", "0")):
        config.hook.pytest_deselected(items=items[count:])
        items[:] = items[:count]


def pytest_runtest_logfinish() -> None:
    """Count the tests that ran."""
    global _RAN
    _RAN += 1


_RAN = 0


def pytest_runtest_protocol(item: Any) -> None:
    """End the session when its time is up, with the number of tests that ran."""
    limit = float(os.environ.get("FIRST_SECONDS", "0"))
    if limit and time.perf_counter() - _BEGUN > limit:
        item.session.shouldstop = f"the first {_RAN} tests ran"
