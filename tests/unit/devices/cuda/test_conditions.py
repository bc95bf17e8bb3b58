"""Conditions from a fake NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pynvml = pytest.importorskip("pynvml")

from pytest_gpumem.devices.cuda.nvml import LISTED, ConditionReader, Conditions, other_processes, reason_names  # noqa: E402

FACTS: Any = SimpleNamespace(pci_bus_id="0000:18:00.0", mig_profile=None, uuid="GPU-1")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML that knows one GPU."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: f"gpu {bus_id}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"instance {uuid}",
        "nvmlDeviceGetClockInfo": lambda gpu, clock: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 2619}[clock],
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 41,
        "nvmlDeviceGetPowerUsage": lambda gpu: 123_456,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: pynvml.nvmlClocksEventReasonSwPowerCap,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_a_reading_in_si_units(nvml: None) -> None:
    now = ConditionReader(FACTS).read()
    assert (now.sm_clock_hz, now.memory_clock_hz) == (1980e6, 2619e6)
    assert (now.temperature_c, now.power_w) == (41.0, pytest.approx(123.456))
    assert now.throttle_reasons == ("sw_power_cap",)
    assert now.other_processes == 1


def test_what_the_driver_refuses_is_none(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetCurrentClocksEventReasons"):
        monkeypatch.setattr(pynvml, name, refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", lambda gpu: pynvml.nvmlClocksThrottleReasonHwThermalSlowdown)
    now = ConditionReader(FACTS).read()
    assert (now.power_w, now.other_processes) == (None, None)
    assert now.throttle_reasons == ("hw_thermal_slowdown",)
    assert now.sm_clock_hz == 1980e6


def test_processes_are_listed_now_and_then(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now, listed = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: listed.append(now[0]) or [])
    reader = ConditionReader(FACTS)
    for seconds in (0.0, 0.5 * LISTED, 1.1 * LISTED, 1.5 * LISTED, 2.3 * LISTED):
        now[0] = seconds
        reader.read()
    assert listed == [0.0, 1.1 * LISTED, 2.3 * LISTED]


def test_processes_are_those_of_the_mig_instance(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: asked.append(handle) or [])
    ConditionReader(SimpleNamespace(pci_bus_id="0000:18:00.0", mig_profile="1g.10gb", uuid="MIG-7")).read()  # type: ignore[arg-type]
    assert asked == ["instance MIG-7"]


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
    assert other_processes([17, 18], own=17) == 1
    assert other_processes([17, 17], own=17) == 0
    assert other_processes([18, 19], own=17) is None
    assert other_processes([], own=17) is None


@pytest.mark.parametrize(("variable", "expected"), [(None, 3), ("PYTEST_XDIST_WORKER", 1), ("GPUMEM_FURTHER_PROCESS", 1)])
def test_processes_that_wait_for_this_one_do_not_count(
    nvml: None, monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    """The parent, and another child of it: a worker of xdist that waits for its turn on the same GPU."""
    sibling = 4_000_000
    pids = [os.getpid(), os.getppid(), sibling, 1]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: [SimpleNamespace(pid=pid) for pid in pids])
    monkeypatch.setattr("pytest_gpumem.devices.cuda.nvml._parent", lambda pid: os.getppid() if pid == sibling else 0)
    for name in ("PYTEST_XDIST_WORKER", "GPUMEM_FURTHER_PROCESS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "gw0")
    assert ConditionReader(FACTS).read().other_processes == expected
