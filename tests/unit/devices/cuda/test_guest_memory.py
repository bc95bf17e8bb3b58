"""Sources of libraries: PyTorch's history as events, and its statistics as figures."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.cuda.guests import torch_memory
from pytest_gpumem.devices.cuda.guests.others import JaxMemory, NumbaMemory, RmmMemory
from pytest_gpumem.devices.cuda.guests.torch_memory import TorchMemory, events
from pytest_gpumem.devices.footprints import SourceFootprints
from pytest_gpumem.devices.memory_events import Figures, MemoryLog, account
from pytest_gpumem.devices.protocol import NotCounted

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


def test_torch_is_read_where_it_allocated_and_its_history_begins_anew(torch: Torch) -> None:
    source, log = TorchMemory(0), MemoryLog()
    assert source.ready()
    assert source.start(log, lines=False) is None
    source.drain()
    log.settle()
    assert (log.since(), torch.recorded) == ([], ["all"])
    torch.allocated = torch.freed = 1
    source.drain()
    log.settle()
    assert account(log.since(), 0).uses["PyTorch", "device"].allocations == 1
    assert torch.recorded == ["all", None, "all"]
    source.stop()
    assert not torch.enabled


def test_a_history_that_the_test_records_is_left_alone(torch: Torch) -> None:
    torch.enabled = True
    source = TorchMemory(0)
    why = source.start(MemoryLog(), lines=False)
    assert why is not None
    assert "of the test's own" in why
    source.stop()
    assert (torch.recorded, torch.enabled) == ([], True)


def test_a_history_that_the_test_begins_meanwhile_is_its_own(torch: Torch) -> None:
    source = TorchMemory(0)
    recorder = torch._C._cuda_record_memory_history
    footprints = SourceFootprints(None, (source,))
    footprints.start(driver=False)
    watch = footprints.watch()
    torch.cuda.memory._record_memory_history(
        "state"
    )  # with other arguments than ours, which are not to be told
    torch.allocated = torch.freed = 2
    torch.peak = 700
    found = watch.read()
    assert torch.recorded == ["all", None, "state"]
    assert (found.peak, found.allocations) == (600, 2)
    assert [
        why for why in found.not_watched if why.startswith("PyTorch: a history of the test's own")
    ]
    torch.cuda.memory._record_memory_history(None)
    assert torch.recorded == ["all", None, "state", None]
    torch.allocated = torch.freed = 5
    assert (watch.read().peak, watch.read().allocations) == (600, 5)
    assert torch.recorded == ["all", None, "state", None, "all"]
    later = footprints.watch()
    assert later.read().not_watched == ()
    torch.allocated += 1
    assert (later.read().allocations, later.read().not_watched) == (1, ())
    footprints.stop()
    assert (torch.enabled, torch._C._cuda_record_memory_history) == (False, recorder)


def test_a_history_that_the_test_ends_leaves_the_peak_unknown(torch: Torch) -> None:
    footprints = SourceFootprints(None, (TorchMemory(0),))
    footprints.start(driver=False)
    watch = footprints.watch()
    torch.cuda.memory._record_memory_history(None)
    torch.allocated = torch.freed = 1
    found = watch.read()
    assert (found.peak, found.peak_bound) == (0, 300)  # an earlier test has had more in use


def test_a_history_that_has_lost_its_oldest_entries_is_not_read(
    torch: Torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_memory, "MOST_ENTRIES", len(HISTORY))
    source, log = TorchMemory(0), MemoryLog()
    source.start(log, lines=False)
    torch.allocated = torch.freed = 1
    with pytest.raises(NotCounted, match="older ones are lost"):
        source.drain()
    torch.allocated, torch.entries = 2, HISTORY[:2]
    source.drain()  # it begins anew


def test_what_graphs_hold_is_in_use(torch: Torch) -> None:
    source = TorchMemory(0)
    source.start(MemoryLog(), lines=False)
    assert source.figures() == {("PyTorch", "device"): Figures(100, 1536, 2048, 400, allocations=0)}
    torch.private = 2
    source.settle(())
    assert source.figures()["PyTorch", "device"][:2] == (130, 1506)
    torch.private = 0
    source.settle(())
    assert source.figures()["PyTorch", "device"][:2] == (100, 1536)


def test_libraries_that_nobody_imported_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "jax", "jax._src.xla_bridge", "rmm", "numba.cuda"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    sources = (TorchMemory(0), JaxMemory(0), RmmMemory(0), NumbaMemory())
    assert [source.ready() for source in sources] == [False] * 4
    assert [dict(source.figures()) for source in sources] == [{}] * 4
    assert not any(name in sys.modules for name in ("torch", "jax", "rmm"))


def test_jax_is_read_by_its_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(
        platform="gpu",
        local_hardware_id=0,
        memory_stats=lambda: {
            "bytes_in_use": 100,
            "peak_bytes_in_use": 300,
            "pool_bytes": 1000,
            "num_allocs": 5,
        },
    )
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(local_devices=lambda: [device]))
    monkeypatch.setitem(
        sys.modules, "jax._src.xla_bridge", SimpleNamespace(backends_are_initialized=lambda: True)
    )
    assert JaxMemory(0).ready()
    assert JaxMemory(0).figures() == {
        ("JAX", "device"): Figures(100, 900, 1000, 300, single=False, allocations=5)
    }
    assert not JaxMemory(1).ready()


def test_numba_frees_what_it_has_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pending: list[list[int]] = [[1], [2]]
    context = SimpleNamespace(
        deallocations=SimpleNamespace(clear=pending[0].clear),
        memory_manager=SimpleNamespace(deallocations=SimpleNamespace(clear=pending[1].clear)),
    )
    monkeypatch.setitem(sys.modules, "numba.cuda", SimpleNamespace(current_context=lambda: context))
    NumbaMemory().settle(())
    assert pending == [[], []]


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


def test_the_pool_of_rmm_is_counted_from_when_it_is_found(rmm: Rmm) -> None:
    source = RmmMemory(0)
    assert not source.ready()
    pool = rmm.current = Rmm.Pool(Resource())
    pool.size = 1000
    assert source.ready()
    source.start(MemoryLog(), lines=False)
    assert source.figures() == {
        ("RMM", "device"): Figures(0, 0, 0, 0, single=False, allocations=0)
    }  # the driver's
    rmm.current.allocation_counts = SimpleNamespace(
        current_bytes=100, peak_bytes=300, total_count=4
    )
    pool.size = 1500
    source.drain()
    assert source.figures() == {
        ("RMM", "device"): Figures(100, 400, 500, 300, single=False, allocations=4)
    }


def test_another_pool_of_rmm_is_counted_and_the_first_is_let_go(rmm: Rmm) -> None:
    rmm.current = Rmm.Pool(Resource())
    source = RmmMemory(0)
    source.start(MemoryLog(), lines=False)
    rmm.current.allocation_counts.current_bytes = 100
    first = weakref.ref(rmm.current.upstream_mr)
    assert isinstance(first(), Rmm.Pool)
    rmm.current = Rmm.Pool(Resource())
    source.drain()
    gc.collect()
    assert first() is None
    assert isinstance(rmm.current, Rmm.Statistics)
    assert source.figures()["RMM", "device"].used == 0


def test_statistics_that_the_user_has_switched_on_are_read(rmm: Rmm) -> None:
    rmm.current = theirs = Rmm.Statistics(Resource(Rmm.Pool(Rmm.Statistics(Resource()))))
    source = RmmMemory(0)
    source.start(MemoryLog(), lines=False)
    theirs.allocation_counts.current_bytes = 7
    assert rmm.current is theirs
    assert source.figures()["RMM", "device"].used == 7


def test_a_pool_of_managed_memory_is_the_drivers(rmm: Rmm) -> None:
    rmm.current = Rmm.Pool(Rmm.Managed())
    assert not RmmMemory(0).ready()
