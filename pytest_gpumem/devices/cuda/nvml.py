"""NVML's handle of the device that CUDA uses, and queries that a driver may refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

T = TypeVar("T")


def asked(query: Callable[..., T], *arguments: Any) -> T | None:
    """Result of an NVML query, or None where NVML, the driver or the device does not offer it."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def present() -> bool:
    """Whether there is a driver that NVML can talk to."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    pynvml.nvmlShutdown()
    return True


def handle(pci_bus_id: str | None) -> Any | None:
    """Handle of the GPU at a PCI bus id, or None without NVML.

    NVML numbers devices by PCI order and does not know CUDA_VISIBLE_DEVICES, so an index would name another GPU. A MIG instance has
    its GPU's bus id. Balance each call with `pynvml.nvmlShutdown` once the handle is done with.
    """
    if pci_bus_id is None:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    found = asked(pynvml.nvmlDeviceGetHandleByPciBusId, pci_bus_id)
    if found is None:
        pynvml.nvmlShutdown()
    return found
