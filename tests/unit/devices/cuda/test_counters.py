"""CUPTI's records of unified memory, from a CUPTI made of Python."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.migrations import (
    GPU_FAULT,
    SHOWN_GROUPS,
    TO_DEVICE,
    FaultGroup,
    PageCounts,
    PageEvent,
    busy,
    page_counts,
)


class cuptiError(Exception):  # noqa: N801  (CUPTI's own spelling)
    pass


def names(*values: str) -> Any:
    return enum.IntEnum("Names", {name: i for i, name in enumerate(values)})


BEACON, BLOCK = 1 << 40, 2 << 20


class FakeBeacon:
    """Says how often it was moved since the counters were last on."""

    nbytes = BLOCK

    def __init__(self) -> None:
        self.moves = 0

    def move(self) -> None:
        self.moves += 1

    def holds(self, address: int) -> bool:
        return BEACON <= address < BEACON + BLOCK


class FakeCupti(ModuleType):
    """What `from cupti import cupti` gives, and a log of what was called."""

    cuptiError = cuptiError  # noqa: N815
    ActivityKind = names("INVALID", "UNIFIED_MEMORY_COUNTER", "OTHER")
    ActivityUnifiedMemoryCounterScope = names("UNKNOWN", "PROCESS_SINGLE_DEVICE")
    ActivityUnifiedMemoryCounterKind = names(
        "UNKNOWN", "BYTES_TRANSFER_HTOD", "BYTES_TRANSFER_DTOH", "CPU_PAGE_FAULT_COUNT", "GPU_PAGE_FAULT", "THRASHING", "THROTTLING",
        "REMOTE_MAP", "BYTES_TRANSFER_DTOD",
    )  # fmt: skip
    ActivityUnifiedMemoryAccessType = names("UNKNOWN", "READ", "WRITE", "ATOMIC", "PREFETCH")
    ActivityUnifiedMemoryMigrationCause = names(
        "UNKNOWN", "USER", "COHERENCE", "PREFETCH", "EVICTION", "ACCESS_COUNTERS"
    )

    def __init__(self) -> None:
        super().__init__("cupti")
        self.log: list[str] = []
        self.refuses: dict[str, str] = {}
        self.batches: list[list[Any]] = []
        """What each flush of the pass that counts delivers."""
        self.dropped = 0
        self.asleep = 0
        """Passes from now on in which nothing is recorded."""
        self.flushed = False
        self.beacon = FakeBeacon()

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name in self.refuses:
            raise cuptiError(self.refuses[name])

    class ActivityUnifiedMemoryCounterConfig(list[Any]):
        def __init__(self, size: int) -> None:
            super().__init__(SimpleNamespace() for _ in range(size))

        @property
        def ptr(self) -> Any:
            return self

    def activity_register_callbacks(
        self, request: Callable[[], Any], complete: Callable[[list[Any]], None]
    ) -> None:
        self._call("register")
        self._complete = complete

    def activity_configure_unified_memory_counter(self, configs: Any, count: int) -> None:
        kinds = [self.ActivityUnifiedMemoryCounterKind(c.kind).name for c in configs[:count]]
        assert all(c.enable == 1 and c.device_id == 2 and c.scope == 1 for c in configs)
        self._call("configure " + " ".join(kinds))

    def activity_enable(self, kind: int) -> None:
        self._call("enable")

    def activity_disable(self, kind: int) -> None:
        self._call("disable")
        self.beacon.moves = 0
        self.asleep = max(0, self.asleep - 1)

    def activity_flush_all(self, flag: int) -> None:
        self._call("flush")
        if self.asleep:
            return
        seen = [
            record(kind, BLOCK, address=BEACON, flags=1)
            for kind in (1, 2)
            for _ in range(self.beacon.moves)
        ]
        self.beacon.moves = 0
        # The pass that wakes the counters moves nothing else.
        self._complete(seen + (self.batches.pop(0) if self.batches and "work" in self.log else []))

    def activity_get_num_dropped_records(self, context: int, stream: int, pointer: int) -> None:
        self._call("dropped")
        import ctypes

        ctypes.c_uint64.from_address(pointer).value = self.dropped


@pytest.fixture
def cupti(install_cupti: Callable[[ModuleType], None]) -> FakeCupti:
    fake = FakeCupti()
    install_cupti(fake)
    return fake


def record(
    kind: int,
    value: int,
    *,
    address: int = 0,
    flags: int = 0,
    start: int = 0,
    end: int = 0,
    activity: int = 1,
) -> Any:
    return SimpleNamespace(
        kind=activity,
        counter_kind=kind,
        value=value,
        address=address,
        flags_=flags,
        start=start,
        end=end,
    )


def test_faults_groups_duplicates_bytes_and_causes_are_told(cupti: FakeCupti) -> None:
    cupti.batches = [
        [
            record(4, 24, address=0x10000, flags=2, start=5),
            record(4, 1, address=0x20000, flags=1, start=3),
            record(4, 2, address=0x10000, flags=2, start=7),
            record(3, 0x7F00AA, start=1),
            record(3, 0x7F00BB, start=2),
        ],
        [
            record(1, 4096, flags=2, start=100, end=200),
            record(1, 8192, flags=3, start=150, end=300),
            record(2, 100, flags=1, start=0, end=50),
            record(7, 65536, flags=3),
            record(1, 999, activity=2),
        ],
    ]
    counts = CudaCounters(2, cupti.beacon).pages(lambda: cupti.log.append("work"))
    assert (counts.gpu_faults, counts.gpu_groups, counts.gpu_pages, counts.duplicates) == (
        27,
        3,
        2,
        25,
    )
    assert counts.groups == (
        FaultGroup(0x20000, 1, "read"),
        FaultGroup(0x10000, 24, "write"),
        FaultGroup(0x10000, 2, "write"),
    )
    assert counts.cpu_faults == 2  # their values are program counters
    assert (counts.to_device, counts.to_host, counts.mapped) == (12288, 100, 65536)
    assert counts.causes == {"fault": 4096, "speculation": 8192, "prefetch": 100}
    assert counts.to_device_seconds == pytest.approx(200e-9)
    assert counts.to_device_bandwidth == pytest.approx(12288 / 200e-9)


def test_the_counters_are_on_while_the_work_runs_and_off_afterwards(cupti: FakeCupti) -> None:
    counters = CudaCounters(2, cupti.beacon)
    for _ in range(2):
        cupti.log.clear()
        counters.pages(lambda: cupti.log.append("work"))
        on = len(cupti.log) - 1 - cupti.log[::-1].index("enable")
        at = cupti.log[on:].index
        assert at("enable") < at("work") < at("flush") < at("disable")
        assert cupti.log.count("enable") == cupti.log.count("disable")
    assert cupti.log.count("enable") == 1  # they are awake
    assert "register" not in cupti.log  # once for the process


def test_the_counters_are_off_also_after_work_that_fails(cupti: FakeCupti) -> None:
    def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        CudaCounters(2, cupti.beacon).pages(work)
    assert cupti.log[-1] == "disable"


def test_records_are_flushed_until_there_are_no_more(cupti: FakeCupti) -> None:
    cupti.batches = [[record(4, 1)], [record(4, 1)], [record(4, 1)]]
    assert CudaCounters(2, cupti.beacon).pages(lambda: cupti.log.append("work")).gpu_groups == 3


@pytest.mark.parametrize(
    ("refused", "text", "said"),
    [
        (
            "register",
            "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
            "another tool, such as a profiler",
        ),
        (
            "enable",
            "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED",
            "another tool, such as a profiler",
        ),
        (
            "configure BYTES_TRANSFER_HTOD BYTES_TRANSFER_DTOH CPU_PAGE_FAULT_COUNT GPU_PAGE_FAULT",
            "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED_ON_DEVICE",
            "UM_PROFILING_NOT_SUPPORTED_ON_DEVICE",
        ),
    ],
)
def test_a_refusal_is_the_reason_and_nothing_runs(
    refused: str, text: str, said: str, cupti: FakeCupti
) -> None:
    cupti.refuses = {refused: text}
    with pytest.raises(NotCounted, match=said):
        CudaCounters(2, cupti.beacon).pages(lambda: pytest.fail("it ran uncounted"))


def test_counters_that_not_every_platform_has_may_be_missing(cupti: FakeCupti) -> None:
    cupti.refuses = dict.fromkeys(
        ("configure REMOTE_MAP", "configure BYTES_TRANSFER_DTOD"),
        "CUPTI_ERROR_UM_PROFILING_NOT_SUPPORTED",
    )
    assert CudaCounters(2, cupti.beacon).pages(lambda: None) == PageCounts(mapped=None)


def test_lost_and_unreadable_records_are_no_count(cupti: FakeCupti) -> None:
    cupti.dropped = 3
    with pytest.raises(NotCounted, match="dropped 3 records"):
        CudaCounters(2, cupti.beacon).pages(lambda: None)
    cupti.dropped, cupti.batches = 0, [[record(99, 1)]]
    with pytest.raises(NotCounted, match="could not be read"):
        CudaCounters(2, cupti.beacon).pages(lambda: cupti.log.append("work"))


def test_without_cupti_python_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    with pytest.raises(NotCounted, match=r"cannot be imported.*gpumem doctor"):
        CudaCounters(0, FakeBeacon()).pages(lambda: pytest.fail("it ran uncounted"))


@pytest.mark.parametrize("asleep", [0, 1, 3])
def test_passes_that_deliver_nothing_are_not_the_one_that_counts(
    cupti: FakeCupti, asleep: int
) -> None:
    cupti.asleep, cupti.batches = asleep, [[record(4, 7, address=0x10000)]]
    assert CudaCounters(2, cupti.beacon).pages(lambda: cupti.log.append("work")).gpu_faults == 7
    assert cupti.log.count("work") == 1


def test_a_pass_that_does_not_tell_of_what_was_moved_on_purpose_is_no_count(
    cupti: FakeCupti,
) -> None:
    cupti.asleep = 100
    with pytest.raises(NotCounted, match="0 of 2 moves"):
        CudaCounters(2, cupti.beacon).pages(lambda: None)
    cupti.asleep = 0
    counters = CudaCounters(2, cupti.beacon)
    assert counters.pages(lambda: None).migrated == 0

    def falling_asleep() -> None:
        cupti.asleep = 1

    with pytest.raises(NotCounted, match="0 of 2 moves"):
        counters.pages(falling_asleep)


def test_totals_count_all_groups_and_the_first_are_shown() -> None:
    events = [PageEvent(GPU_FAULT, 2, i, i, i << 16, "read") for i in range(2 * SHOWN_GROUPS)]
    counts = page_counts(events, maps=False)
    assert (counts.gpu_faults, counts.gpu_groups, len(counts.groups)) == (
        4 * SHOWN_GROUPS,
        2 * SHOWN_GROUPS,
        SHOWN_GROUPS,
    )


def test_copies_beside_each_other_take_their_time_once() -> None:
    copies = [
        PageEvent(TO_DEVICE, 1, start, end, 0, "prefetch")
        for start, end in ((0, 10), (2, 5), (8, 12), (20, 21))
    ]
    assert busy(copies) == pytest.approx(13e-9)


def test_the_real_bindings_have_the_names_that_are_used() -> None:
    real = pytest.importorskip("cupti.cupti", reason="cupti-python is not installed")
    for name in FakeCupti.ActivityUnifiedMemoryCounterKind:
        assert int(getattr(real.ActivityUnifiedMemoryCounterKind, name.name)) == name
    for ours, theirs in (
        (FakeCupti.ActivityUnifiedMemoryAccessType, real.ActivityUnifiedMemoryAccessType),
        (FakeCupti.ActivityUnifiedMemoryMigrationCause, real.ActivityUnifiedMemoryMigrationCause),
    ):
        assert {n.name: int(n) for n in ours} == {n.name: int(n) for n in theirs}
    configs = real.ActivityUnifiedMemoryCounterConfig(2)
    configs[1].kind, configs[1].scope, configs[1].device_id, configs[1].enable = 4, 1, 0, 1
    assert list(configs.kind)[1] == 4
    assert configs.ptr
