"""Sources of libraries: PyTorch's history as events, and its statistics as figures."""

from __future__ import annotations

from pytest_gpumem.devices.cuda.guests.torch_memory import events

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
    found = list(events(HISTORY, offset=-1.0))
    assert [(one.layer, one.nbytes) for one in found] == [
        ("segment", 2 << 20),
        ("use", 4),
        ("use", 0),
    ]
    assert [one.at for one in found] == sorted(one.at for one in found)  # whatever the clock says
    assert found[1].line == ("b.py", 2, "inner")
