"""JAX's allocator: its statistics. It reports no single allocations, and its peak is that of the process.

Source: jax.Device.memory_stats.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pytest_gpumem.devices.footprints import Source
from pytest_gpumem.devices.memory_events import Figures, Series

NAME = "JAX"


class JaxMemory(Source):
    """The source of JAX's memory on one device."""

    name = NAME
    method = "allocator statistics"

    def __init__(self, index: int) -> None:
        self._index = index

    def ready(self) -> bool:
        # Asking JAX for its devices would start its backend, which takes most of the GPU's memory.
        bridge = sys.modules.get("jax._src.xla_bridge")
        return bool(getattr(bridge, "backends_are_initialized", lambda: False)()) and self._device() is not None

    def _device(self) -> Any:
        jax = sys.modules.get("jax")
        devices = jax.local_devices() if jax is not None else ()
        return next((one for one in devices if one.platform in ("gpu", "cuda") and one.local_hardware_id == self._index), None)

    def figures(self) -> Mapping[Series, Figures]:
        device = self._device()
        statistics = (device.memory_stats() if device is not None else None) or {}
        if "bytes_in_use" not in statistics:
            return {}
        used = int(statistics["bytes_in_use"])
        pool = int(statistics.get("pool_bytes", used))
        high, made = int(statistics.get("peak_bytes_in_use", used)), statistics.get("num_allocs")
        made = None if made is None else int(made)
        return {(NAME, "device"): Figures(used, pool - used, pool, high, single=False, allocations=made)}
