"""The driver's records as events, the handles of cuBLAS among them, and the Python stacks of the calls that made them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import driver_memory
from pytest_gpumem.devices.cuda.driver_memory import DriverMemory
from pytest_gpumem.devices.memory_events import Allocated, MemoryLog, account
from pytest_gpumem.devices.protocol import NotCounted


class Kind(IntEnum):
    PINNED = 2
    DEVICE = 3
    MANAGED = 5
    DEVICE_STATIC = 6


class Site(IntEnum):
    API_ENTER = 0
    API_EXIT = 1


KEPT = (Allocated(0.0, ("CUDA", "device"), "driver", 1, 100),)


class Operation(IntEnum):
    ALLOCATION = 1
    RELEASE = 2


NAMES = (
    *("cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuArrayCreate_v2", "cuArray3DCreate_v2", "cuMemHostGetFlags"),
    *("cuMemHostAlloc", "cuMemAllocHost_v2", "cuMemFreeHost"),
)
CUPTI = SimpleNamespace(
    ApiCallbackSite=Site,
    ActivityMemoryKind=Kind,
    ActivityMemoryOperationType=Operation,
    get_timestamp=lambda: 0,
    driver_api_trace_cbid=SimpleNamespace(**{name: number for number, name in enumerate(NAMES)}),
)


class Counters:
    """CUPTI delivers what was recorded when it is asked to."""

    def __init__(self, calls: Calls) -> None:
        self.records: list[Any] = []
        self.calls = calls
        self.delivered = 0

    def listen(self, kind: str, receive: Callable[[Any, Any], None]) -> Any:
        self.receive = receive
        return CUPTI

    def deliver(self) -> None:
        self.delivered += 1
        for record in self.records:
            self.receive(CUPTI, record)
        self.records.clear()

    def unlisten(self, kind: str) -> None: ...

    def record(
        self,
        address: int,
        nbytes: int,
        kind: Kind = Kind.DEVICE,
        *,
        allocates: bool = True,
        device: int = 0,
        correlation: int = 0,
        context: int | None = None,
    ) -> None:
        """`context`: of a call whose parameters can be read; None: they cannot."""
        operation = Operation.ALLOCATION if allocates else Operation.RELEASE
        name = "cuMemAlloc_v2" if allocates else "cuMemFree_v2"
        if context is None:
            self.calls.call(name, correlation)
        else:
            self.calls.plain(name, correlation, address, nbytes, context=context)
        self.records.append(
            SimpleNamespace(
                memory_kind=kind,
                memory_operation_type=operation,
                device_id=device,
                timestamp=len(self.records),
                bytes=nbytes,
                address=address,
                correlation_id=correlation,
            )
        )


class Calls:
    """The callbacks of CUPTI."""

    def __init__(self) -> None:
        self.receivers: list[tuple[Any, Callable[[int, Any], None]]] = []

    def add(self, domain: str, names: Any, receive: Callable[[int, Any], None]) -> Callable[[], None]:
        assert domain == "DRIVER_API"
        self.receivers.append((names, receive))
        return lambda: self.receivers.remove((names, receive))

    def call(self, name: str, correlation: int = 0, **plain: int) -> None:
        for site in Site:
            for names, receive in self.receivers:
                if name in names:
                    data = {key: np.int64(value) for key, value in plain.items()} | {"callback_site": np.int32(site)}
                    receive(NAMES.index(name), SimpleNamespace(callback_site=site, correlation_id=correlation, _data=data))

    def plain(self, name: str, correlation: int, address: int, nbytes: int = 0, *, context: int = 1, result: int = 0) -> None:
        """A call as CUPTI shows it, with its parameters in memory."""
        pointer, returned = ctypes.c_uint64(address), ctypes.c_int(result)
        first = ctypes.addressof(pointer) if "Alloc" in name else address
        parameters = (ctypes.c_uint64 * 2)(first, nbytes)
        self.call(
            name,
            correlation,
            function_params=ctypes.addressof(parameters),
            function_return_value=ctypes.addressof(returned),
            context_uid=context,
            correlation_id=correlation,
        )


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(driver_memory, "CALLBACKS", made)
    return made


@pytest.fixture
def counters(calls: Calls) -> Counters:
    return Counters(calls)


@pytest.fixture
def source(counters: Counters) -> DriverMemory:
    return DriverMemory(0, counters)  # type: ignore[arg-type]


def test_records_become_events_by_kind(counters: Counters, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None
    counters.record(1, 100)
    counters.record(2, 200, Kind.MANAGED)
    counters.record(3, 300, Kind.PINNED, device=7)  # of no GPU
    counters.record(4, 400, Kind.DEVICE_STATIC)  # a module's
    counters.record(5, 500, device=1)  # another GPU's
    counters.record(1, 100, allocates=False)
    source.drain()
    log.settle()
    kept = {kind: use.kept for (_, kind), use in account(*log.since(), 0).uses.items()}
    assert kept == {"device": 0, "managed": 200, "pinned": 300}


def test_a_handle_of_cublas_is_looked_at_once_and_counts_for_nothing(
    counters: Counters, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def create() -> int:
        made.append("handle")
        counters.record(10, 1024)
        counters.record(11, 4096)
        return 5

    def destroy(handle: int) -> None:
        counters.record(10, 1024, allocates=False)
        counters.record(11, 4096, allocates=False)

    libraries = SimpleNamespace(cublas=SimpleNamespace(create=create, destroy=destroy))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libraries)  # type: ignore[arg-type]
    log = MemoryLog()
    source.start(log, stacks=False)
    monkeypatch.setattr(driver_memory, "is_loaded", lambda library: False)
    source.settle(KEPT)
    assert (made, source.handles()) == ([], {})
    monkeypatch.setattr(driver_memory, "is_loaded", lambda library: True)
    counters.record(1, 100)
    source.settle(())  # nothing that could be a handle's
    assert made == []
    source.settle(KEPT)
    source.settle(KEPT)
    log.settle()
    assert (made, source.handles()) == (["handle"], {"cuBLAS": (1024, 4096)})
    assert [change for _, change, _ in log.since()[0]] == [100]


def test_without_records_the_reason_is_given(counters: Counters, source: DriverMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(kind: str, receive: Any) -> Any:
        raise NotCounted("another tool holds CUPTI")

    monkeypatch.setattr(counters, "listen", refuses)
    assert source.start(MemoryLog(), stacks=False) == "another tool holds CUPTI"
    source.drain()
    source.settle(KEPT)
    source.stop()


def test_records_are_delivered_only_after_a_call_that_makes_some(calls: Calls, counters: Counters, source: DriverMemory) -> None:
    source.start(MemoryLog(), stacks=False)
    source.drain()
    for name in ("cuMemcpyHtoD_v2", "cuMemHostGetFlags"):
        calls.call(name)
    source.drain()
    assert counters.delivered == 1
    for number, name in enumerate(("cuMemAlloc_v2", "cuMemFree_v2", "cuArray3DCreate_v2"), start=2):
        calls.call(name)
        source.drain()
        source.drain()
        assert counters.delivered == number


def test_what_cudamalloc_and_cudafree_do_needs_no_record(calls: Calls, counters: Counters, source: DriverMemory) -> None:
    """Once a record has told the device of a context. The records of calls that were read come late, and count for nothing."""
    log = MemoryLog()
    source.start(log, stacks=False)
    counters.record(0xA000, 100, correlation=1, context=1)
    counters.record(0xB000, 200, correlation=2, context=2, device=1)  # another GPU's
    source.drain()
    for number in range(3):
        counters.record(0xC000 + number, 4096, correlation=10 + number, context=1)
        source.drain()
    counters.record(0xA000, 100, allocates=False, correlation=20, context=1)
    counters.record(0xD000, 300, correlation=21, context=2, device=1)
    calls.plain("cuMemAlloc_v2", 22, 0xE000, 1 << 40, result=2)  # out of memory
    calls.plain("cuMemFree_v2", 23, 0)
    calls.plain("cuMemHostAlloc", 24, 0xF000, 64, context=7)
    calls.plain("cuMemAllocHost_v2", 25, 0xF100, 32, context=7)
    calls.plain("cuMemFreeHost", 26, 0xF000, context=7)
    source.drain()
    assert counters.delivered == 1
    log.settle()
    living = {(one.address, one.kind): one.nbytes for one in log.of_driver()}
    assert living == {(0xC000, "device"): 4096, (0xC001, "device"): 4096, (0xC002, "device"): 4096, (0xF100, "pinned"): 32}
    steps = len(log.since()[0])
    calls.call("cuArrayCreate_v2")
    source.drain()
    log.settle()
    assert (counters.delivered, len(log.since()[0])) == (2, steps)
    assert source._read == {24, 25, 26}  # which have no record here


def test_a_call_that_is_read_has_its_stack(counters: Counters, source: DriverMemory) -> None:
    log = MemoryLog()
    source.start(log, stacks=True)
    counters.record(1, 100, correlation=1, context=1)
    source.drain()

    def allocates() -> None:
        counters.record(2, 100, correlation=2, context=1)

    allocates()
    source.drain()
    log.settle()
    assert [name for _, _, name in log.of_driver()[-1].stack if name == "allocates"] == ["allocates"]


def test_a_record_has_the_stack_of_its_call(calls: Calls, counters: Counters, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=True) is None

    def allocates() -> None:
        for correlation in (11, 12):
            counters.record(0xA000 + correlation, 4096, correlation=correlation)

    allocates()
    source._stacks.pop(12)
    source.drain()
    log.settle()
    first, second = log.of_driver()
    assert [name for _, _, name in first.stack if name == "allocates"] == ["allocates"]
    assert second.stack == ()
    assert not source._stacks
    source.stop()
    assert not calls.receivers


def test_pools_and_graphs_are_asked_only_while_they_may_hold_something(
    calls: Calls, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked = [0], list[int]()

    def answer(*_: Any) -> tuple[int, int]:
        asked.append(held[0])
        return 0, held[0]

    names = ("cudaDeviceGetDefaultMemPool", "cudaDeviceGetMemPool", "cudaMemPoolGetAttribute", "cudaDeviceGetGraphMemAttribute")
    attributes = SimpleNamespace(
        cudaMemPoolAttrUsedMemCurrent=1,
        cudaMemPoolAttrReservedMemCurrent=2,
        cudaMemPoolAttrUsedMemHigh=5,
        cudaGraphMemAttrUsedMemCurrent=3,
        cudaGraphMemAttrReservedMemCurrent=4,
    )
    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=0),
        cudaMemPoolAttr=attributes,
        cudaGraphMemAttributeType=attributes,
        **dict.fromkeys(names, answer),
    )
    monkeypatch.setattr(driver_memory, "R", runtime)

    def is_asked() -> bool:
        asked.clear()
        source.figures()
        return bool(asked)

    source.start(MemoryLog(), stacks=False)
    assert [is_asked(), is_asked()] == [True, False]
    calls.plain("cuMemAlloc_v2", 1, 0xA000, 100)
    assert not is_asked()
    calls.call("cuArrayCreate_v2")
    held[0] = 7
    assert [is_asked(), is_asked()] == [True, True]
    held[0] = 0
    assert [is_asked(), is_asked()] == [True, False]
    source.stop()
    assert [is_asked(), is_asked()] == [True, True]


def test_where_another_tool_has_the_callbacks_each_look_delivers_records_without_stacks(
    calls: Calls, counters: Counters, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise NotCounted("another tool")

    monkeypatch.setattr(calls, "add", refuse)
    assert source.start(MemoryLog(), stacks=True) is None
    for delivered in (1, 2):
        source.drain()
        assert counters.delivered == delivered
    assert not source._stacks
