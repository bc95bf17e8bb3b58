"""Sources of libraries: PyTorch's history as events."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpumem.devices.cuda.guests.torch_memory import MOST_ENTRIES, TorchMemory, report
from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.memory_events import MemoryLog

HISTORY = [
    {
        "action": "segment_alloc",
        "addr": 0xA000,
        "size": 2 << 20,
        "time_us": 1_000_000,
        "frames": [],
    },
    {
        "action": "alloc",
        "addr": 0xA000,
        "size": 4,
        "time_us": 1_000_001,
        "frames": [{"filename": "b.py", "line": 2, "name": "inner"}],
    },
    {"action": "free_requested", "addr": 0xA000, "size": 4, "time_us": 1_000_000, "frames": []},
    {"action": "free_completed", "addr": 0xA000, "size": 4, "time_us": 1_000_003, "frames": []},
    {"action": "snapshot", "addr": 0, "size": 0, "time_us": 1_000_004, "frames": []},
]


def test_a_history_becomes_events_in_its_order() -> None:
    log = MemoryLog()
    log.allow(["b.py:2"], Path())
    report(log, HISTORY, offset=-1.0)
    log.settle()
    booked = [(change.event.layer, change.nbytes) for change in log.changes]
    assert booked == [("use", 4), ("use", -4), ("segment", 2 << 20)]  # whatever the clock says
    assert [change.event.allowed for change in log.changes] == [True, True, False]


def test_a_full_history_fails_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    allocations = itertools.count()
    bytes_of = {"all": {"current": 0, "peak": 0}}

    def statistics(index: int) -> dict[str, object]:
        counts = {"all": {"allocated": next(allocations), "freed": 0}}
        return {"allocation": counts, "allocated_bytes": bytes_of, "reserved_bytes": bytes_of}

    memory = SimpleNamespace(
        _record_memory_history=lambda *_, **__: None,
        _snapshot=lambda: {"device_traces": [[HISTORY[-1]] * MOST_ENTRIES]},
    )
    cuda = SimpleNamespace(
        memory=memory,
        memory_stats_as_nested_dict=statistics,
        get_allocator_backend=lambda: "native",
        is_initialized=lambda: True,
    )
    torch = SimpleNamespace(cuda=cuda, version=SimpleNamespace(cuda="13.0"), _C=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", torch)
    footprints = Footprints(None, (TorchMemory(0),))
    footprints.start(driver=False)
    watch = footprints.watch()
    with footprints.paused():
        pass
    assert any("older ones are lost" in why for why in watch.read().not_watched)
