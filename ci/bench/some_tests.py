"""A pytest plugin of `footprint_overhead.py`: runs a part of a suite, and times its tests and the plugin's work in them.

SOME_TESTS is the number of tests: of each file the first ones, as large a part of it as of the others. SOME_TIMES is the file of the
results: by node id the seconds of each test with all hooks around it, and how it ended; and the calls and seconds of the functions of
`WATCHED`, those that they call included, if SOME_PROFILE is set. If SOME_HOOK is set, the tests run with a memory hook of CuPy that does
nothing. If SOME_CALLBACKS is set, CUPTI reports the calls that `watch` follows to a function that does nothing, of C ("C") or of Python.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Generator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

WATCHED = (
    ("plugin.footprints", "FootprintFeature", "_begin"),
    ("plugin.footprints", "FootprintFeature", "_end"),
    ("plugin.leftovers", "LeftoverFeature", "_settle"),
    ("plugin.guarding", "Guardian", "_send"),
    ("devices.footprints", "SourceFootprints", "look"),
    ("devices.footprints", "_Watch", "read"),
    ("devices.footprints", "_Watch", "settle"),
    ("devices.cuda.driver_memory", "DriverMemory", "figures"),
    ("devices.cuda.driver_memory", "DriverMemory", "_called"),
    ("devices.cuda.calls", "CudaCalls", "_launched"),
    ("devices.cuda.calls", "CudaCalls", "_begun"),
    ("devices.cuda.calls", "CudaCalls", "_followed"),
    ("devices.cuda.guests.cupy_memory", "CupyMemory", "figures"),
    ("devices.cuda.guests.cupy_memory", "_Hook", "malloc_postprocess"),
    ("devices.cuda.guests.cupy_memory", "_Hook", "free_preprocess"),
)
"""Module of the package, class and method."""
_seconds: dict[str, float] = {}
_ends: dict[str, str] = {}
_costs: dict[str, list[float]] = {}
_kept: list[object] = []  # CUPTI calls it up to the end


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
    """Use the GPU, so that no test has the time of its context; and put stop-watches around the functions."""
    import cupy

    float(cupy.ones(4).sum())
    if os.environ.get("SOME_HOOK"):
        cupy.cuda.MemoryHook().__enter__()
    if language := os.environ.get("SOME_CALLBACKS"):
        _subscribe(language)
    if not os.environ.get("SOME_PROFILE"):
        return
    for module, owner, name in WATCHED:
        of = getattr(import_module(f"pytest_gpumem.{module}"), owner)
        setattr(of, name, _timed(f"{owner}.{name}", getattr(of, name)))
    gc.collect = _timed("gc.collect", gc.collect)


def _subscribe(language: str) -> None:
    from pytest_gpumem.devices.cuda import cupti
    from pytest_gpumem.devices.cuda.calls import CALLS

    module = cupti.imported()
    CALLS._number(module)
    nothing = (
        cupti._CALLED(("getpid", ctypes.CDLL(None)))
        if language == "C"
        else cupti._CALLED(lambda data, domain, number, address: None)
    )
    subscription = cupti._Subscription(module, nothing)
    for number in (*CALLS._launches, *CALLS._calls):
        subscription.enable((int(module.CallbackDomain.DRIVER_API), number))
    _kept.append((subscription, nothing))
    atexit.register(subscription.end)


def _timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            of = name
            if name.endswith("._called"):  # a call of the driver has a number of its own
                of = f"{name} {arguments[1]}"
            elif name.endswith(("._begun", "._followed")):
                of = f"{name} {arguments[0]._calls[arguments[1]].version}"
            cost = _costs.setdefault(of, [0, 0.0])
            cost[0] += 1
            cost[1] += time.perf_counter() - begun

    return wrapper


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
        Path(path).write_text(json.dumps({"seconds": _seconds, "ends": _ends, "costs": _costs}))
