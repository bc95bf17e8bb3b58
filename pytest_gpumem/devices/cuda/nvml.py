"""The state of a card, from NVML."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from pytest_gpumem.devices.errors import NoDevice
from pytest_gpumem.records.device import Card, CardProcess, Conditions, DeviceFacts
from pytest_gpumem.settings import FURTHER_PROCESS, WORKERS_RUN

LISTED = 0.05
"""Seconds for which a list of processes counts: to ask for it takes 0.4 ms while kernels run."""
# Without those that slow no running kernel below its clock: GpuIdle, ApplicationsClocksSetting,
# DisplayClockSetting.
_SLOWING = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
    pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
    pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
}

T = TypeVar("T")


def answer(query: Callable[..., T], *arguments: Any) -> T | None:
    """Result of an NVML query; None where it is not offered."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def present() -> bool:
    """True if NVML finds a driver. NVML stays initialised: to begin takes 19 ms."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def handle(pci_bus_id: str | None) -> Any | None:
    """Handle of the GPU at a PCI bus id, which a MIG instance shares; None without NVML."""
    if pci_bus_id is None or not present():
        return None
    return answer(pynvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)


class ConditionReader:
    """Reads one GPU's state. Where NVML is missing, everything is None."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts, self._gpu = facts, handle(facts.pci_bus_id)
        self._listed = -math.inf  # when the processes were listed, on the clock of `time.monotonic`
        self._others: int | None = None

    def read(self) -> Conditions:
        gpu = self._gpu
        if gpu is None:
            return Conditions()
        now = time.monotonic()
        if now - self._listed > LISTED:
            self._listed, self._others = now, self._count_others()
        clock = pynvml.nvmlDeviceGetClockInfo
        sensor = pynvml.NVML_TEMPERATURE_GPU
        return Conditions(
            sm_clock_hz=_scaled(1e6, clock, gpu, pynvml.NVML_CLOCK_SM),
            memory_clock_hz=_scaled(1e6, clock, gpu, pynvml.NVML_CLOCK_MEM),
            temperature_c=_scaled(1.0, pynvml.nvmlDeviceGetTemperature, gpu, sensor),
            power_w=_scaled(1e-3, pynvml.nvmlDeviceGetPowerUsage, gpu),
            throttle_reasons=_throttle_reasons(gpu),
            other_processes=self._others,
        )

    def _count_others(self) -> int | None:
        gpu, facts = self._gpu, self._facts
        if facts.mig_profile is not None and facts.uuid is not None:
            gpu = answer(pynvml.nvmlDeviceGetHandleByUUID, facts.uuid)
        running = answer(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu) if gpu else None
        if running is None:
            return None
        pids = {process.pid for process in running}
        if FURTHER_PROCESS in os.environ or WORKERS_RUN in os.environ:
            # Processes that wait for this process or for their turn may have idle contexts.
            parent = os.getppid()
            waiting = {parent, _parent(parent)}
            waiting |= {pid for pid in pids if _parent(pid) == parent}
            pids -= waiting - {os.getpid()}
        return other_processes(pids, os.getpid())


def _parent(pid: int) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        # The name before it, in brackets, may hold anything.
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(status.rpartition(")")[2].split()[1])
    return None


def _throttle_reasons(gpu: Any) -> tuple[str, ...] | None:
    mask: int | None = answer(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    if mask is None:  # drivers before 535 know the call by its older name
        mask = answer(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    return None if mask is None else reason_names(mask)


def reason_names(mask: int) -> tuple[str, ...]:
    return tuple(name for bit, name in _SLOWING.items() if mask & bit)


def other_processes(pids: Any, this_process: int) -> int | None:
    """The number of other processes; None if the list lacks this process, as in a container, where
    NVML lists the host's process numbers, or none."""
    return len(set(pids)) - 1 if this_process in pids else None


def read_card(pci_bus_id: str | None) -> Card:
    """The card at a PCI bus id, or the driver's first. Raises `NoDevice`."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoDevice(str(error)) from None
    try:
        if pci_bus_id is None:
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        else:
            gpu = pynvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
    except pynvml.NVMLError as error:
        count = answer(pynvml.nvmlDeviceGetCount) or 0
        which = f"at {pci_bus_id}" if pci_bus_id else "to look at"
        raise NoDevice(f"of {count} cards, none {which}: {error}") from None
    mig, _ = answer(pynvml.nvmlDeviceGetMigMode, gpu) or (None, None)
    return Card(
        name=answer(pynvml.nvmlDeviceGetName, gpu),
        mig=None if mig is None else mig == pynvml.NVML_FEATURE_ENABLED,
        throttle_reasons=_throttle_reasons(gpu),
        processes=_processes(gpu),
    )


def _processes(gpu: Any) -> tuple[CardProcess, ...] | None:
    running = answer(pynvml.nvmlDeviceGetComputeRunningProcesses, gpu)
    if running is None:
        return None
    processes = []
    for process in running:
        if process.pid != os.getpid():
            name = answer(pynvml.nvmlSystemGetProcessName, process.pid) or None
            processes.append(CardProcess(process.pid, name, process.usedGpuMemory))
    return tuple(processes)


def _scaled(unit: float, query: Callable[..., int], *arguments: Any) -> float | None:
    value = answer(query, *arguments)
    return None if value is None else value * unit
