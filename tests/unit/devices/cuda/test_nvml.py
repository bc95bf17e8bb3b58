"""The state of a card, and conditions, from a fake NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pynvml = pytest.importorskip("pynvml")

from pytest_gpumem.devices import opening  # noqa: E402
from pytest_gpumem.devices.cuda.nvml import (  # noqa: E402
    LISTED,
    ConditionReader,
    other_processes,
    read_card,
    reason_names,
)
from pytest_gpumem.records.device import Card, CardProcess  # noqa: E402
from pytest_gpumem.records.measurement import Conditions  # noqa: E402

FACTS: Any = SimpleNamespace(pci_bus_id="0000:18:00.0", mig_profile=None, uuid="GPU-1")


def refuse(*_: Any) -> None:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML that manages two cards; every function that it does not know refuses."""
    clocks = {pynvml.NVML_CLOCK_SM: (345, 1980), pynvml.NVML_CLOCK_MEM: (1593, 2619)}
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: f"bus {bus_id}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"instance {uuid}",
        "nvmlDeviceGetName": lambda gpu: gpu,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetPersistenceMode": lambda gpu: 0,
        "nvmlDeviceGetComputeMode": lambda gpu: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        "nvmlDeviceGetMigMode": lambda gpu: [1, 0],
        "nvmlDeviceGetEccMode": lambda gpu: [1, 0],
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: {(0, 1): 9, (1, 1): 4}[
            kind, counter
        ],
        "nvmlDeviceGetRemappedRows": lambda gpu: (5, 6, 1, 0),
        "nvmlDeviceGetClockInfo": lambda gpu, clock: clocks[clock][0],
        "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: clocks[clock][1],
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 33,
        "nvmlDeviceGetPowerUsage": lambda gpu: 71_400,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 500_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: (
            pynvml.nvmlClocksEventReasonSwPowerCap
            | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
        ),
        "nvmlDeviceGetCurrPcieLinkGeneration": lambda gpu: 1,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda gpu: 4,
        "nvmlDeviceGetGpuMaxPcieLinkGeneration": lambda gpu: 5,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda gpu: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda gpu: 16,
        "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=1),
            SimpleNamespace(pid=7, usedGpuMemory=1 << 30),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ],
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(
            total=80 << 30, free=78 << 30, used=2 << 30
        ),
        "nvmlSystemGetProcessName": lambda pid: {7: "python"}.get(pid, ""),
    }

    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")):
            monkeypatch.setattr(pynvml, name, refuse)
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


def test_everything_that_it_says_in_si_units(nvml: None) -> None:
    assert read_card("0000:18:00.0") == Card(
        cards=2,
        name="bus 0000:18:00.0",
        driver="580.95.05",
        cuda=(13, 1),
        persistence=False,
        compute_mode="exclusive process",
        mig=True,
        ecc=True,
        ecc_pending=False,
        uncorrected_errors=4,
        remap_pending=True,
        remap_failed=False,
        sm_clock_hz=345e6,
        max_sm_clock_hz=1980e6,
        memory_clock_hz=1593e6,
        max_memory_clock_hz=2619e6,
        temperature_c=33.0,
        power_w=71.4,
        power_limit_w=500.0,
        default_power_limit_w=700.0,
        throttle_reasons=("sw_power_cap",),
        chosen_clocks=True,
        link_generation=1,
        max_link_generation=4,
        card_link_generation=5,
        link_width=8,
        max_link_width=16,
        processes=(CardProcess(7, "python", 1 << 30), CardProcess(8, None, None)),
        memory_bytes=80 << 30,
        free_bytes=78 << 30,
    )


def test_what_it_refuses_is_none(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetCount")
    for name in dir(pynvml):
        if name.startswith(("nvmlDeviceGet", "nvmlSystemGet")) and name not in known:
            monkeypatch.setattr(pynvml, name, refuse)
    assert read_card(None) == Card(cards=2)


def test_a_driver_that_does_not_answer_is_one_line(
    nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    with pytest.raises(opening.NoDevice, match=r"^RM has detected an NVML/RM version mismatch\.?$"):
        opening.look(None)


def test_a_card_that_is_not_there_is_named(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", refuse)
    with pytest.raises(opening.NoDevice, match=r"of 2 cards, none at 0000:18:00\.0: Not Supported"):
        opening.look("0000:18:00.0")


def test_a_reading_in_si_units(nvml: None) -> None:
    now = ConditionReader(FACTS).read()
    assert (now.sm_clock_hz, now.memory_clock_hz) == (345e6, 1593e6)
    assert (now.temperature_c, now.power_w) == pytest.approx((33.0, 71.4))
    assert now.throttle_reasons == ("sw_power_cap",)
    assert now.other_processes == 2


def test_what_the_driver_refuses_is_none(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetCurrentClocksEventReasons",
    ):
        monkeypatch.setattr(pynvml, name, refuse)
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        lambda gpu: pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    )
    now = ConditionReader(FACTS).read()
    assert (now.power_w, now.other_processes) == (None, None)
    assert now.throttle_reasons == ("hw_thermal_slowdown",)
    assert now.sm_clock_hz == 345e6
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksThrottleReasons", refuse)
    assert ConditionReader(FACTS).read().throttle_reasons is None


def test_processes_are_listed_now_and_then(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now, listed = [0.0], list[float]()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda gpu: listed.append(now[0]) or []
    )
    reader = ConditionReader(FACTS)
    for seconds in (0.0, 0.5 * LISTED, 1.1 * LISTED, 1.5 * LISTED, 2.3 * LISTED):
        now[0] = seconds
        reader.read()
    assert listed == [0.0, 1.1 * LISTED, 2.3 * LISTED]


def test_processes_are_those_of_the_mig_instance(
    nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetComputeRunningProcesses", lambda handle: asked.append(handle) or []
    )
    ConditionReader(
        SimpleNamespace(pci_bus_id="0000:18:00.0", mig_profile="1g.10gb", uuid="MIG-7")  # type: ignore[arg-type]
    ).read()
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
    assert other_processes([17, 18], this_process=17) == 1
    assert other_processes([17, 17], this_process=17) == 0
    assert other_processes([18, 19], this_process=17) is None
    assert other_processes([], this_process=17) is None


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, 3), ("PYTEST_XDIST_TESTRUNUID", 1), ("_GPUMEM_FURTHER_PROCESS", 1)],
)
def test_processes_that_wait_for_this_one_do_not_count(
    nvml: None, monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    """The parent, and another child of it: a worker of xdist that waits for its turn on the same GPU."""
    sibling = 4_000_000
    pids = [os.getpid(), os.getppid(), sibling, 1]
    monkeypatch.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda gpu: [SimpleNamespace(pid=pid) for pid in pids],
    )
    monkeypatch.setattr(
        "pytest_gpumem.devices.cuda.nvml._parent", lambda pid: os.getppid() if pid == sibling else 0
    )
    for name in ("PYTEST_XDIST_TESTRUNUID", "_GPUMEM_FURTHER_PROCESS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "gw0")
    assert ConditionReader(FACTS).read().other_processes == expected
