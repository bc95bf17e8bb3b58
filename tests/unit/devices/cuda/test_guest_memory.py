"""Sources of libraries: PyTorch's history as events, and its statistics as figures."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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


class Torch(ModuleType):
    """An allocator with a history."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.recorded: list[Any] = []
        self.private = 0
        self.allocated = self.freed = 0
        self.peak = 400
        self.entries = HISTORY
        self.enabled = False
        self._C = SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: self.enabled, _cuda_record_memory_history=self.record
        )
        memory = SimpleNamespace(
            _record_memory_history=lambda enabled, **_: self._C._cuda_record_memory_history(
                enabled
            ),
            _snapshot=lambda: {"device_traces": [self.entries]},
        )
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            is_initialized=lambda: True,
            get_allocator_backend=lambda: "native",
            memory=memory,
            memory_stats_as_nested_dict=self.statistics,
            memory_snapshot=lambda: [
                {"device": 0, "total_size": 20, "allocated_size": 5, "segment_pool_id": (0, 1)}
                for _ in range(self.private)
            ],
            empty_cache=lambda: None,
        )

    def record(self, enabled: str | None) -> None:
        self.enabled = enabled is not None
        self.recorded.append(enabled)

    def statistics(self, device: int) -> Any:
        each = {
            "allocation": {"allocated": self.allocated, "freed": self.freed},
            "requested_bytes": {"current": 100, "peak": self.peak},
            "allocated_bytes": {"current": 512},
            "reserved_bytes": {"current": 2048},
        }
        return {name: {"all": figures} for name, figures in each.items()}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


class Resource:
    """A resource of RMM, above another one."""

    def __init__(self, upstream_mr: Resource | None = None) -> None:
        self.upstream_mr = upstream_mr
        self.size = 0
        self.allocation_counts = SimpleNamespace(current_bytes=0, peak_bytes=0, total_count=0)

    def pool_size(self) -> int:
        return self.size


class Rmm(ModuleType):
    """RMM with one device."""

    class Pool(Resource):
        pass

    class Statistics(Resource):
        pass

    class Managed(Resource):
        pass

    def __init__(self) -> None:
        super().__init__("rmm")
        self.current = Resource()
        self.mr = SimpleNamespace(
            PoolMemoryResource=self.Pool,
            StatisticsResourceAdaptor=self.Statistics,
            ManagedMemoryResource=self.Managed,
            get_per_device_resource=lambda index: self.current,
            set_per_device_resource=lambda index, resource: setattr(self, "current", resource),
        )


@pytest.fixture
def rmm(monkeypatch: pytest.MonkeyPatch) -> Rmm:
    made = Rmm()
    monkeypatch.setitem(sys.modules, "rmm", made)
    return made
