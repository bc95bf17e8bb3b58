"""The state of the GPU now, from NVML: clocks, throttle reasons, temperature, power, other processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pynvml

from pytest_gpumem.devices.cuda import nvml
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions
from pytest_gpumem.settings import FURTHER_PROCESS

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
        self._gpu = nvml.handle(facts.pci_bus_id)
        # Processes are listed by MIG instance; clocks, temperature and power belong to the whole GPU.
        self._instance = self._gpu
        if self._gpu is not None and facts.mig_profile is not None and facts.uuid is not None:
            self._instance = nvml.asked(pynvml.nvmlDeviceGetHandleByUUID, facts.uuid)

    def read(self) -> Conditions:
        """The state now."""
        gpu = self._gpu
        if gpu is None:
            return Conditions()
        sm = nvml.asked(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_SM)
        memory = nvml.asked(pynvml.nvmlDeviceGetClockInfo, gpu, pynvml.NVML_CLOCK_MEM)
        temperature = nvml.asked(pynvml.nvmlDeviceGetTemperature, gpu, pynvml.NVML_TEMPERATURE_GPU)
        power = nvml.asked(pynvml.nvmlDeviceGetPowerUsage, gpu)
        return Conditions(
            sm_clock_hz=None if sm is None else sm * 1e6,
            memory_clock_hz=None if memory is None else memory * 1e6,
            temperature_c=None if temperature is None else float(temperature),
            power_w=None if power is None else power * 1e-3,
            throttle_reasons=reason_names(clock_reasons(gpu) or 0),
            other_processes=self._others(),
        )

    def _others(self) -> int | None:
        if self._instance is None:
            return None
        running = nvml.asked(pynvml.nvmlDeviceGetComputeRunningProcesses, self._instance)
        if running is None:
            return None
        pids = {p.pid for p in running}
        if FURTHER_PROCESS in os.environ:
            # The process that waits for this one, and those that wait for their turn, may have contexts, and do nothing with them.
            pids -= {pid for pid in pids if os.getppid() in (pid, _parent(pid)) and pid != os.getpid()}
        return other_processes(pids, os.getpid())

    def close(self) -> None:
        """Let NVML go."""
        if self._gpu is not None:
            self._gpu = self._instance = None
            pynvml.nvmlShutdown()


def _parent(pid: int) -> int | None:
    """The parent of a process; None where the operating system does not tell."""
    try:
        # The name before it, in brackets, may hold anything.
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


def clock_reasons(gpu: Any) -> int | None:
    """NVML's mask of why the clocks are what they are; None where the driver does not say."""
    mask: int | None = nvml.asked(pynvml.nvmlDeviceGetCurrentClocksEventReasons, gpu)
    if mask is None:  # drivers before 535 know the call by its older name
        mask = nvml.asked(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    return mask


def reason_names(mask: int) -> tuple[str, ...]:
    """Names of the reasons in NVML's mask that slow the device."""
    return tuple(name for bit, name in _SLOWING.items() if mask & bit)


def other_processes(pids: Any, own: int) -> int | None:
    """How many processes besides `own` have a context; None if `own`, which has one, is not listed.

    In a container NVML lists the host's process numbers, or none: a list without us says nothing.
    """
    listed = set(pids)
    return len(listed) - 1 if own in listed else None
