"""The state of a card from NVML, for a look before anything is measured. Creates no context."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pynvml

from pytest_gpumem.devices.cuda.conditions import clock_reasons, reason_names
from pytest_gpumem.devices.cuda.nvml import asked
from pytest_gpumem.records.card import Card, CardProcess

_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
}


class NvmlUnavailable(Exception):
    """Why NVML says nothing of the card; one line."""


def read_card(pci_bus_id: str | None) -> Card:
    """The card at a PCI bus id; the first one that the driver manages where there is none to ask for.

    Raises:
        NvmlUnavailable: there is no driver, its library does not fit to it, or it manages no such card.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(str(error)) from None
    try:
        count = asked(pynvml.nvmlDeviceGetCount) or 0
        try:
            gpu = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id) if pci_bus_id is not None else pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError as error:
            raise NvmlUnavailable(f"of {count} cards, none {f'at {pci_bus_id}' if pci_bus_id else 'to look at'}: {error}") from None
        return _read(gpu, count)
    finally:
        pynvml.nvmlShutdown()


def _read(gpu: Any, count: int) -> Card:
    supported = asked(pynvml.nvmlSystemGetCudaDriverVersion)
    ecc, ecc_pending = asked(pynvml.nvmlDeviceGetEccMode, gpu) or (None, None)
    mig, _ = asked(pynvml.nvmlDeviceGetMigMode, gpu) or (None, None)
    remapped = asked(pynvml.nvmlDeviceGetRemappedRows, gpu)
    reasons = clock_reasons(gpu)
    return Card(
        cards=count,
        name=asked(pynvml.nvmlDeviceGetName, gpu),
        driver=asked(pynvml.nvmlSystemGetDriverVersion),
        cuda=None if supported is None else (supported // 1000, supported % 1000 // 10),
        persistence=_flag(asked(pynvml.nvmlDeviceGetPersistenceMode, gpu)),
        compute_mode=_COMPUTE_MODES.get(asked(pynvml.nvmlDeviceGetComputeMode, gpu)),
        mig=_flag(mig),
        ecc=_flag(ecc),
        ecc_pending=_flag(ecc_pending),
        uncorrected_errors=asked(
            pynvml.nvmlDeviceGetTotalEccErrors, gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_AGGREGATE_ECC
        ),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        sm_clock_hz=_scaled(1e6, pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        max_sm_clock_hz=_scaled(1e6, pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        memory_clock_hz=_scaled(1e6, pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        max_memory_clock_hz=_scaled(1e6, pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        temperature_c=_scaled(1.0, pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU),
        power_w=_scaled(1e-3, pynvml.nvmlDeviceGetPowerUsage, gpu),
        power_limit_w=_scaled(1e-3, pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu),
        default_power_limit_w=_scaled(1e-3, pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu),
        throttle_reasons=None if reasons is None else reason_names(reasons),
        chosen_clocks=None if reasons is None else bool(reasons & pynvml.nvmlClocksEventReasonApplicationsClocksSetting),
        link_generation=asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
        max_link_generation=asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
        card_link_generation=asked(pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, gpu),
        link_width=asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        max_link_width=asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        processes=_processes(gpu),
    )


def _flag(value: int | None) -> bool | None:
    return None if value is None else value == pynvml.NVML_FEATURE_ENABLED


def _scaled(unit: float, query: Callable[..., int], *arguments: Any) -> float | None:
    value = asked(query, *arguments)
    return None if value is None else value * unit


def _processes(gpu: Any) -> tuple[CardProcess, ...] | None:
    running = asked(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu)
    if running is None:
        return None
    return tuple(
        CardProcess(one.pid, asked(pynvml.nvmlSystemGetProcessName, one.pid) or None, one.usedGpuMemory)
        for one in running
        if one.pid != os.getpid()
    )
