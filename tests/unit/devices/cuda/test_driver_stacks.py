"""The driver's records find the Python stack of the call that made them."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import driver_memory
from pytest_gpumem.devices.cuda.driver_memory import DriverMemory
from pytest_gpumem.devices.memory_events import MemoryLog
from pytest_gpumem.devices.protocol import NotCounted


class Site(IntEnum):
    API_ENTER = 0
    API_EXIT = 1


class Kind(IntEnum):
    DEVICE = 3


class Operation(IntEnum):
    ALLOCATION = 1
    RELEASE = 2


CUPTI = SimpleNamespace(ApiCallbackSite=Site, ActivityMemoryKind=Kind, ActivityMemoryOperationType=Operation, get_timestamp=lambda: 0)


class Counters:
    """CUPTI delivers what was recorded when it is asked to."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def listen(self, kind: str, receive: Callable[[Any, Any], None]) -> Any:
        self.receive = receive
        return CUPTI

    def deliver(self) -> None:
        for record in self.records:
            self.receive(CUPTI, record)
        self.records.clear()

    def unlisten(self, kind: str) -> None: ...


class Calls:
    """The callbacks of CUPTI."""

    def __init__(self) -> None:
        self.receivers: dict[str, Callable[[int, Any], None]] = {}

    def add(self, domain: str, names: Any, receive: Callable[[int, Any], None]) -> Callable[[], None]:
        self.receivers[domain] = receive
        return lambda: self.receivers.pop(domain) and None

    def call(self, domain: str, correlation: int) -> None:
        for site in Site:
            if domain in self.receivers:
                self.receivers[domain](7, SimpleNamespace(callback_site=site, correlation_id=correlation))


def record(address: int, correlation: int, operation: Operation = Operation.ALLOCATION) -> Any:
    return SimpleNamespace(
        memory_kind=Kind.DEVICE,
        device_id=0,
        memory_operation_type=operation,
        timestamp=address,
        bytes=4096,
        address=address,
        correlation_id=correlation,
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(driver_memory, "CALLBACKS", made)
    return made


def test_a_record_has_the_stack_of_its_call(calls: Calls) -> None:
    counters, log = Counters(), MemoryLog()
    source = DriverMemory(0, counters)  # type: ignore[arg-type]
    assert source.start(log, stacks=True) is None

    def allocates() -> None:
        for correlation in (11, 12):
            calls.call("DRIVER_API", correlation)

    allocates()
    counters.records += [record(0xA000, 11), record(0xB000, 99)]
    source.drain()
    log.settle()
    first, second = log.living()
    assert [name for _, _, name in first.stack if name == "allocates"] == ["allocates"]
    assert second.stack == ()
    assert not source._stacks
    source.stop()
    assert not calls.receivers


def test_without_stacks_there_are_no_callbacks_and_another_tool_costs_the_stacks_alone(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = DriverMemory(0, Counters())  # type: ignore[arg-type]
    assert source.start(MemoryLog(), stacks=False) is None
    assert not calls.receivers

    def refuse(*_: Any) -> None:
        raise NotCounted("another tool")

    monkeypatch.setattr(calls, "add", refuse)
    assert source.start(MemoryLog(), stacks=True) is None
