"""What is said to have changed since the baseline."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from known_devices import H100
from msgspec.structs import replace
from stored_rows import row

from pytest_gpumem.baselines.history import Accepted, Process, changes
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Measurement

FACTS = replace(H100, driver="580.95.05", cuda="13.0")
AT = datetime(2026, 11, 1, tzinfo=timezone.utc)


def measurement(memory: float | None = 2.619e9, sm: float | None = 1.98e9, **changed: Any) -> Measurement:
    # Before the samples the device was idle.
    conditions = (Conditions(sm_clock_hz=345e6, memory_clock_hz=1.593e9), Conditions(sm_clock_hz=sm, memory_clock_hz=memory))
    made = row(conditions=conditions, **{"kernel_source": "k" * 64, **changed}).measurement
    assert made is not None
    return made


def accepted(facts: DeviceFacts = FACTS, test_source: str | None = "t" * 64, **changed: Any) -> Accepted:
    return Accepted("a.py::test", measurement(**changed), Process("p", AT, None, facts), test_source=test_source)


def said(*window: Accepted, facts: DeviceFacts = FACTS, test_source: str | None = "t" * 64, **changed: Any) -> tuple[str, ...]:
    return changes(measurement(**changed), facts, test_source, window)


def test_nothing_changed() -> None:
    assert said(accepted(), accepted()) == ()
    assert said() == ()


def test_driver_and_cuda() -> None:
    assert said(accepted(), facts=replace(FACTS, driver="590.10")) == ("driver 580.95.05 -> 590.10",)
    assert said(accepted(), facts=replace(FACTS, cuda="13.1")) == ("CUDA 13.0 -> 13.1",)


def test_a_change_is_said_until_the_window_has_moved_on() -> None:
    old, older = replace(FACTS, driver="570.1"), replace(FACTS, driver="560.1")
    assert said(accepted(older), accepted(old), accepted(), accepted()) == ("driver 570.1 -> 580.95.05",)
    assert said(accepted(), accepted()) == ()


def test_sources() -> None:
    assert said(accepted(test_source="u" * 64)) == ("the test's source",)
    assert said(accepted(kernel_source="l" * 64)) == ("the kernel's source",)


def test_what_is_unknown_is_no_change() -> None:
    assert said(accepted(test_source=None, kernel_source=None)) == ()
    assert said(accepted(), test_source=None, kernel_source=None) == ()
    assert said(accepted(replace(FACTS, driver=None)), facts=replace(FACTS, driver=None)) == ()
    assert said(accepted(replace(FACTS, driver="570.1")), accepted(replace(FACTS, driver=None))) == ("driver 570.1 -> 580.95.05",)


def test_clocks_under_load() -> None:
    assert said(accepted(), accepted(), memory=2.3e9) == ("memory clock 2619 -> 2300 MHz",)
    assert said(accepted(), memory=2.61e9, sm=1.9e9) == ()
    assert said(accepted(), sm=1.7e9) == ("SM clock 1980 -> 1700 MHz",)
    assert said(accepted(memory=None, sm=None), memory=1e9, sm=1e9) == ()
    assert said(accepted(), memory=None, sm=None) == ()
