"""A pytest plugin of `footprint_overhead.py`: runs some tests of a suite, spread evenly over all, and times the plugin's work in them.

SOME_TESTS is their number. SOME_PROFILE is the file of the times: functions of `WATCHED` with their calls and seconds, the functions that
they call included.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

WATCHED = (
    ("plugin.footprints", "FootprintHooks", "_begin"),
    ("plugin.footprints", "FootprintHooks", "_end"),
    ("plugin.running", "LeftoverHooks", "_settle"),
    ("plugin.watchdog", "Watchdog", "_send"),
    ("devices.footprints", "Footprints", "look"),
    ("devices.footprints", "_Watch", "read"),
    ("devices.footprints", "_Watch", "settle"),
    ("devices.cuda.counters", "CudaCounters", "deliver"),
    ("devices.cuda.driver_memory", "DriverMemory", "figures"),
    ("devices.cuda.driver_memory", "DriverMemory", "_changed"),
    ("devices.cuda.guests.cupy_memory", "CupyMemory", "figures"),
    ("devices.cuda.guests.cupy_memory", "_Hook", "_emit"),
)
"""Module of the package, class and method."""
_costs: dict[str, list[float]] = {}


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leave out all but some tests."""
    count = int(os.environ.get("SOME_TESTS", "0"))
    if 0 < count < len(items):
        kept = {len(items) * number // count for number in range(count)}
        config.hook.pytest_deselected(items=[item for index, item in enumerate(items) if index not in kept])
        items[:] = [item for index, item in enumerate(items) if index in kept]


def pytest_collection_finish() -> None:
    """Put stop-watches around the functions."""
    if not os.environ.get("SOME_PROFILE"):
        return
    for module, owner, name in WATCHED:
        of = getattr(import_module(f"pytest_gpumem.{module}"), owner)
        setattr(of, name, _timed(f"{owner}.{name}", getattr(of, name)))
    gc.collect = _timed("gc.collect", gc.collect)


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            # A call of the driver has a number of its own.
            of = f"{name} {arguments[1]}" if name.endswith("._changed") else name
            cost = _costs.setdefault(of, [0, 0.0])
            cost[0] += 1
            cost[1] += time.perf_counter() - begun

    return wrapper


def pytest_sessionfinish() -> None:
    """Write the times."""
    if path := os.environ.get("SOME_PROFILE"):
        Path(path).write_text(json.dumps(_costs))
