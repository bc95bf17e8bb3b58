"""Sources of libraries: PyTorch's history as events."""

from __future__ import annotations

from pathlib import Path

from pytest_gpumem.devices.cuda.guests.torch_memory import report
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
