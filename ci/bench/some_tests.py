"""A pytest plugin of `footprint_overhead.py`: runs a part of a suite, and times its tests.

SOME_TESTS is the number of tests: of each file the first ones, as large a part of it as of the others. SOME_TIMES is the file of the
results: by node id the seconds of each test with all hooks around it, and how it ended. If SOME_HOOK is set, the tests run with a memory
hook of CuPy that does nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

_seconds: dict[str, float] = {}
_ends: dict[str, str] = {}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out all but some tests."""
    share = int(os.environ.get("SOME_TESTS", "0")) / max(1, len(items))
    if 0 < share < 1:
        of_files, places = Counter(item.path for item in items), Counter[Path]()
        kept = []
        for item in items:
            if places[item.path] < share * of_files[item.path]:
                kept.append(item)
            places[item.path] += 1
        config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
        items[:] = kept


def pytest_collection_finish() -> None:
    """Use the GPU, so that no test has the time of its context."""
    import cupy

    float(cupy.ones(4).sum())
    if os.environ.get("SOME_HOOK"):
        cupy.cuda.MemoryHook().__enter__()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Time a test."""
    begun = time.perf_counter()
    result = yield
    _seconds[item.nodeid] = time.perf_counter() - begun
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ends."""
    if report.when == "call" or report.outcome != "passed":
        _ends[report.nodeid] = report.outcome


def pytest_sessionfinish() -> None:
    """Write the results."""
    if path := os.environ.get("SOME_TIMES"):
        Path(path).write_text(json.dumps({"seconds": _seconds, "ends": _ends}))
