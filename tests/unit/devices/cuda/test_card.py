"""The state of a card from a fake NVML."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pynvml = pytest.importorskip("pynvml")

from pytest_gpumem.devices import opening  # noqa: E402
from pytest_gpumem.devices.cuda.nvml import read_card  # noqa: E402
from pytest_gpumem.records.device import Card, CardProcess  # noqa: E402


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVML that manages two cards; every function that it does not know refuses."""
    clocks = {pynvml.NVML_CLOCK_SM: (345, 1980), pynvml.NVML_CLOCK_MEM: (1593, 2619)}
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
        "nvmlDeviceGetHandleByPciBusId": lambda bus_id: f"bus {bus_id}",
        "nvmlDeviceGetName": lambda gpu: gpu,
        "nvmlSystemGetDriverVersion": lambda: "580.95.05",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetPersistenceMode": lambda gpu: 0,
        "nvmlDeviceGetComputeMode": lambda gpu: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        "nvmlDeviceGetMigMode": lambda gpu: [1, 0],
        "nvmlDeviceGetEccMode": lambda gpu: [1, 0],
        "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: {(0, 1): 9, (1, 1): 4}[kind, counter],
        "nvmlDeviceGetRemappedRows": lambda gpu: (5, 6, 1, 0),
        "nvmlDeviceGetClockInfo": lambda gpu, clock: clocks[clock][0],
        "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: clocks[clock][1],
        "nvmlDeviceGetTemperature": lambda gpu, sensor: 33,
        "nvmlDeviceGetPowerUsage": lambda gpu: 71_400,
        "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 500_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: (
            pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonApplicationsClocksSetting
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
        "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(total=80 << 30, free=78 << 30, used=2 << 30),
        "nvmlSystemGetProcessName": lambda pid: {7: "python"}.get(pid, ""),
    }

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

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
        corrected_errors=9,
        uncorrected_errors=4,
        remapped_rows=11,
        remap_pending=True,
        remap_failed=False,
        sm_clock_hz=345e6,
        max_sm_clock_hz=1980e6,
        memory_clock_hz=1593e6,
        max_memory_clock_hz=2619e6,
        temperature_c=33.0,
        power_w=pytest.approx(71.4),
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
            monkeypatch.setattr(pynvml, name, pynvml.nvmlDeviceGetSerial)
    assert read_card(None) == Card(cards=2)


def test_a_driver_that_does_not_answer_is_one_line(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    with pytest.raises(opening.NoDevice, match=r"^RM has detected an NVML/RM version mismatch\.?$"):
        opening.look(None)


def test_a_card_that_is_not_there_is_named(nvml: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByPciBusId", pynvml.nvmlDeviceGetSerial)
    with pytest.raises(opening.NoDevice, match=r"of 2 cards, none at 0000:18:00\.0: Not Supported"):
        opening.look("0000:18:00.0")
