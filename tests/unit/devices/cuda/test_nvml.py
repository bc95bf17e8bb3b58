"""The state of a card, and conditions, from a fake NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pynvml = pytest.importorskip("pynvml")

from pytest_gpumem.devices.cuda.nvml import (  # noqa: E402
    ConditionReader,
    other_processes,
    reason_names,
)
from pytest_gpumem.records.device import Conditions  # noqa: E402

FACTS: Any = SimpleNamespace(pci_bus_id="0000:18:00.0", mig_profile=None, uuid="GPU-1")


def test_without_nvml_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert ConditionReader(FACTS).read() == Conditions()


def test_reasons_that_do_not_slow_are_left_out() -> None:
    harmless = (
        pynvml.nvmlClocksEventReasonGpuIdle
        | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        | pynvml.nvmlClocksEventReasonDisplayClockSetting
    )
    assert reason_names(harmless) == ()
    every = pynvml.nvmlClocksEventReasonAll | pynvml.nvmlClocksThrottleReasonHwSlowdown
    assert reason_names(every) == (
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    )


def test_a_list_without_us_says_nothing() -> None:
    assert other_processes([17, 18], this_process=17) == 1
    assert other_processes([17, 17], this_process=17) == 0
    assert other_processes([18, 19], this_process=17) is None
    assert other_processes([], this_process=17) is None
