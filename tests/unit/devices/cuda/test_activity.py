"""CUPTI's records of kernels, copies and memsets, from a CUPTI made of Python."""

from __future__ import annotations

import enum
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")

from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.cuda.cupti import USE_KINDS
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.uses import Activity, CopyUse, KernelUse


class cuptiError(Exception):  # noqa: N801  (CUPTI's own spelling)
    pass


class FakeCupti(ModuleType):
    """What `from cupti import cupti` gives: records are delivered at the next flush while their kind is on."""

    cuptiError = cuptiError  # noqa: N815
    ActivityKind = enum.IntEnum(
        "ActivityKind",
        ["INVALID", "CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET", "UNIFIED_MEMORY_COUNTER"],
    )
    ActivityMemcpyKind = enum.IntEnum(
        "ActivityMemcpyKind", ["UNKNOWN", "HTOD", "DTOH", "DTOD", "PTOP"]
    )
    ActivityMemoryKind = enum.IntEnum(
        "ActivityMemoryKind",
        ["UNKNOWN", "PAGEABLE", "PINNED", "DEVICE", "MANAGED", "DEVICE_STATIC"],
    )

    def __init__(self) -> None:
        super().__init__("cupti")
        self.on: set[str] = set()
        self.refused = ""
        self.queued: list[Any] = []
        self.registered = 0

    def activity_register_callbacks(self, request: Any, complete: Any) -> None:
        self.registered += 1
        self._complete = complete

    def activity_enable(self, kind: Any) -> None:
        if self.refused == kind.name:
            raise cuptiError("CUPTI_ERROR_NOT_COMPATIBLE")
        self.on.add(kind.name)

    def activity_disable(self, kind: Any) -> None:
        self.on.discard(kind.name)

    def activity_flush_all(self, flag: int) -> None:
        # One at a time, as buffers fill.
        delivered, self.queued = self.queued[:1], self.queued[1:]
        self._complete([one for one in delivered if self.ActivityKind(one.kind).name in self.on])

    def activity_get_num_dropped_records(self, context: int, stream: int, pointer: int) -> None:
        """None was dropped."""


@pytest.fixture
def cupti(install_cupti: Callable[[ModuleType], None]) -> FakeCupti:
    fake = FakeCupti()
    install_cupti(fake)
    return fake


def kernel(cupti: FakeCupti, name: str, start: int, end: int, blocks: int = 132) -> Any:
    return SimpleNamespace(
        kind=int(cupti.ActivityKind.CONCURRENT_KERNEL), name=name, start=start, end=end, grid_x=blocks, grid_y=1, grid_z=1, block_x=256,
        block_y=1, block_z=1, registers_per_thread=40, static_shared_memory=1024, dynamic_shared_memory=2048, local_memory_per_thread=0,
    )  # fmt: skip


def copy(
    cupti: FakeCupti,
    way: str,
    source: str,
    destination: str,
    nbytes: int,
    time: int,
    *,
    activity: str = "MEMCPY",
) -> Any:
    kinds = cupti.ActivityMemoryKind
    return SimpleNamespace(
        kind=int(cupti.ActivityKind[activity]), copy_kind=int(cupti.ActivityMemcpyKind[way]), src_kind=int(kinds[source]),
        dst_kind=int(kinds[destination]), bytes=nbytes, start=100, end=100 + time,
    )  # fmt: skip


def watched(cupti: FakeCupti, *records: Any) -> Activity:
    def work() -> None:
        assert cupti.on == set(USE_KINDS)
        cupti.queued = list(records)

    return CudaCounters(0, SimpleNamespace()).activity(work)


def test_kernels_of_one_name_and_shape_are_added_up(cupti: FakeCupti) -> None:
    add, mul = kernel(cupti, "add", 0, 10), kernel(cupti, "mul", 10, 15)
    seen = watched(
        cupti, add, mul, kernel(cupti, "add", 20, 40), kernel(cupti, "add", 50, 51, blocks=1)
    )
    shape = {"registers": 40, "shared": 3072, "local": 0}
    assert seen.kernels == (
        KernelUse("add", (132, 1, 1), (256, 1, 1), launches=2, nanoseconds=30, **shape),
        KernelUse("mul", (132, 1, 1), (256, 1, 1), launches=1, nanoseconds=5, **shape),
        KernelUse("add", (1, 1, 1), (256, 1, 1), launches=1, nanoseconds=1, **shape),
    )
    assert seen.source == "CUPTI"
    assert cupti.on == set()


def test_the_time_in_which_kernels_ran_at_once(cupti: FakeCupti) -> None:
    spans = ((0, 10), (4, 8), (6, 20), (20, 30), (40, 50))
    assert watched(cupti, *(kernel(cupti, "add", *span) for span in spans)).at_once == 6
    assert watched(cupti, *(kernel(cupti, "add", *span) for span in spans[-3:])).at_once == 0


def test_copies_have_their_kinds_of_memory_and_memsets_are_apart(cupti: FakeCupti) -> None:
    memset = SimpleNamespace(
        kind=int(cupti.ActivityKind.MEMSET),
        bytes=64,
        start=0,
        end=3,
        memory_kind=int(cupti.ActivityMemoryKind.DEVICE_STATIC),
    )
    seen = watched(
        cupti,
        copy(cupti, "HTOD", "PAGEABLE", "DEVICE", 100, 7),
        memset,
        copy(cupti, "HTOD", "PINNED", "DEVICE", 100, 2),
        copy(cupti, "HTOD", "PAGEABLE", "DEVICE", 50, 4),
        copy(cupti, "PTOP", "DEVICE", "DEVICE", 10, 1, activity="MEMCPY2"),
        copy(cupti, "UNKNOWN", "UNKNOWN", "MANAGED", 1, 0),
    )
    assert seen.copies == (
        CopyUse("H2D", "pageable", "device", 2, 150, 11),
        CopyUse("H2D", "pinned", "device", 1, 100, 2),
        CopyUse("P2P", "device", "device", 1, 10, 1),
        CopyUse("other", "unknown", "managed", 1, 1, 0),
    )
    assert seen.memsets == (CopyUse("memset", "", "device", 1, 64, 3),)


def test_a_refusal_is_told_and_leaves_nothing_on(cupti: FakeCupti) -> None:
    cupti.refused = "MEMSET"
    with pytest.raises(
        NotCounted, match="CUPTI refuses records of MEMSET: CUPTI_ERROR_NOT_COMPATIBLE"
    ):
        watched(cupti)
    assert cupti.on == set()


def test_a_record_that_cannot_be_read_is_told(cupti: FakeCupti) -> None:
    with pytest.raises(NotCounted, match="a record of CUPTI could not be read"):
        watched(cupti, SimpleNamespace(kind=int(cupti.ActivityKind.MEMCPY)))


def test_cupti_is_asked_for_its_one_place_once(cupti: FakeCupti) -> None:
    counters = CudaCounters(0, SimpleNamespace())
    for _ in range(2):
        counters.activity(lambda: cupti.queued.append(kernel(cupti, "add", 0, 1)))
    assert cupti.registered == 1


def test_nothing_delivered_is_no_launch_of_nothing(cupti: FakeCupti) -> None:
    passes: list[int] = []
    with pytest.raises(NotCounted, match="CUPTI reported no kernel, copy or memset in 2 passes"):
        CudaCounters(0, SimpleNamespace()).activity(lambda: passes.append(1))
    assert len(passes) == 2
