"""NVML's handle of the device that CUDA uses, and queries that a driver may refuse."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from pytest_gpumem.records.device import Card, CardProcess, DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.settings import FURTHER_PROCESS, WORKERS_RUN

LISTED = 0.05
"""Seconds for which a list of processes counts. To ask for it takes 0.4 ms while kernels run, seven times as long as all else."""

T = TypeVar("T")


def asked(query: Callable[..., T], *arguments: Any) -> T | None:
    """Result of an NVML query, or None where NVML, the driver or the device does not offer it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def present() -> bool:
    """True if NVML finds a driver. It stays initialised until the process ends: to begin anew took 19 ms on an H100."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def handle(pci_bus_id: str | None) -> Any | None:
    """Handle of the GPU at a PCI bus id, or None without NVML.
    NVML numbers devices by PCI order and does not know CUDA_VISIBLE_DEVICES. A MIG instance has its GPU's bus id.
    """
    return (
        asked(pynvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
        if pci_bus_id is not None and present()
        else None
    )


def _running(gpu: Any, facts: DeviceFacts) -> list[Any] | None:
    """The processes with a context on a GPU, or on the MIG instance that is measured."""
    if gpu is not None and facts.mig_profile is not None and facts.uuid is not None:
        gpu = asked(pynvml.nvmlDeviceGetHandleByUUID, facts.uuid)
    return None if gpu is None else asked(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu)


# Left out, because they do not say that a running kernel is slowed below what was asked for: GpuIdle, ApplicationsClocksSetting (a
# clock that somebody chose), DisplayClockSetting.
_SLOWING = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
}


class ConditionReader:
    """Reads one GPU's state. Where NVML is missing, everything is None."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts, self._gpu = facts, handle(facts.pci_bus_id)
        self._listed = -math.inf  # when the processes were listed, on the clock of `time.monotonic`
        self._others: int | None = None

    def read(self) -> Conditions:
        """The state now."""
        gpu = self._gpu
        if gpu is None:
            return Conditions()
        if (now := time.monotonic()) - self._listed > LISTED:
            self._listed, self._others = now, self._count_others()
        return Conditions(
            **_readings(gpu),
            throttle_reasons=reason_names(clock_reasons(gpu)),
            other_processes=self._others,
        )

    def _count_others(self) -> int | None:
        running = _running(self._gpu, self._facts)
        if running is None:
            return None
        pids = {p.pid for p in running}
        if FURTHER_PROCESS in os.environ or WORKERS_RUN in os.environ:
            # The process that waits for this one, and those that wait for their turn, may have contexts, and do nothing with them.
            pids -= {
                pid for pid in pids if os.getppid() in (pid, _parent(pid)) and pid != os.getpid()
            }
        return other_processes(pids, os.getpid())


def _parent(pid: int) -> int | None:
    """The parent of a process; None if the operating system does not report it."""
    try:
        # The name before it, in brackets, may hold anything.
        return int(
            Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        )
    except (OSError, ValueError, IndexError):
        return None


def clock_reasons(gpu: Any) -> int | None:
    """NVML's mask of why the clocks are what they are; None where the driver does not say."""
    mask: int | None = asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    if mask is None:  # drivers before 535 know the call by its older name
        mask = asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    return mask


def reason_names(mask: int | None) -> tuple[str, ...] | None:
    """Names of the reasons in NVML's mask that slow the device; None without a mask."""
    return None if mask is None else tuple(name for bit, name in _SLOWING.items() if mask & bit)


def other_processes(pids: Any, own: int) -> int | None:
    """The number of other processes with a context; None if the list lacks `own`, which has one. In a container NVML lists the host's
    process numbers, or none."""
    listed = set(pids)
    return len(listed) - 1 if own in listed else None


_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
}


class NvmlUnavailable(Exception):
    """NVML cannot read the card. The message is one line with the reason."""


def read_card(pci_bus_id: str | None) -> Card:
    """The card at a PCI bus id; the first one that the driver manages where there is none to ask for.
    Raises `NvmlUnavailable`: there is no driver, its library does not fit to it, or it manages no such card.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(str(error)) from None
    count = asked(pynvml.nvmlDeviceGetCount) or 0
    try:
        gpu = (
            pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
            if pci_bus_id is not None
            else pynvml.nvmlDeviceGetHandleByIndex(0)
        )
    except pynvml.NVMLError as error:
        raise NvmlUnavailable(
            f"of {count} cards, none {f'at {pci_bus_id}' if pci_bus_id else 'to look at'}: {error}"
        ) from None
    return _read(gpu, count)


def _read(gpu: Any, count: int) -> Card:
    supported = asked(pynvml.nvmlSystemGetCudaDriverVersion)
    ecc, ecc_pending = asked(pynvml.nvmlDeviceGetEccMode, gpu) or (None, None)
    mig, _ = asked(pynvml.nvmlDeviceGetMigMode, gpu) or (None, None)
    remapped = asked(pynvml.nvmlDeviceGetRemappedRows, gpu)
    reasons = clock_reasons(gpu)
    memory = asked(pynvml.nvmlDeviceGetMemoryInfo, gpu)
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
        uncorrected_errors=_errors(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        remap_pending=None if remapped is None else bool(remapped[2]),
        remap_failed=None if remapped is None else bool(remapped[3]),
        **_readings(gpu),
        max_sm_clock_hz=_scaled(1e6, pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        max_memory_clock_hz=_scaled(
            1e6, pynvml.nvmlDeviceGetMaxClockInfo, gpu, pynvml.NVML_CLOCK_MEM
        ),
        power_limit_w=_scaled(1e-3, pynvml.nvmlDeviceGetEnforcedPowerLimit, gpu),
        default_power_limit_w=_scaled(1e-3, pynvml.nvmlDeviceGetPowerManagementDefaultLimit, gpu),
        throttle_reasons=reason_names(reasons),
        chosen_clocks=None
        if reasons is None
        else bool(reasons & pynvml.nvmlClocksEventReasonApplicationsClocksSetting),
        link_generation=asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
        max_link_generation=asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, gpu),
        card_link_generation=asked(pynvml.nvmlDeviceGetGpuMaxPcieLinkGeneration, gpu),
        link_width=asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        max_link_width=asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, gpu),
        processes=_processes(gpu),
        memory_bytes=None if memory is None else int(memory.total),
        free_bytes=None if memory is None else int(memory.free),
    )


def _readings(gpu: Any) -> dict[str, float | None]:
    """The figures that `Conditions` and `Card` have in common."""
    return {
        "sm_clock_hz": _scaled(1e6, pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM),
        "memory_clock_hz": _scaled(1e6, pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM),
        "temperature_c": _scaled(
            1.0, pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU
        ),
        "power_w": _scaled(1e-3, pynvml.nvmlDeviceGetPowerUsage, gpu),
    }


def _errors(gpu: Any, kind: int) -> int | None:
    """Memory errors of a kind over the card's life."""
    return asked(pynvml.nvmlDeviceGetTotalEccErrors, gpu, kind, pynvml.NVML_AGGREGATE_ECC)


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
        CardProcess(
            one.pid, asked(pynvml.nvmlSystemGetProcessName, one.pid) or None, one.usedGpuMemory
        )
        for one in running
        if one.pid != os.getpid()
    )
