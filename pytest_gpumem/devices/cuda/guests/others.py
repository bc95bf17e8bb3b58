"""Libraries whose single allocations are not seen: RMM and JAX are counted by their statistics,
Numba by the driver.

Sources: rmm.mr.StatisticsResourceAdaptor, rmm.mr.PoolMemoryResource; jax.Device.memory_stats;
numba.cuda, Deallocation Behavior.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog, Series
from pytest_gpumem.devices.sources import Source

JAX, RMM = "JAX", "RMM"


class RmmMemory(Source):
    """The counts of a `StatisticsResourceAdaptor`, which is put around the device's resource where
    that has a pool. What a pool gave out before counts as the driver's, as does memory of RMM that
    comes from no pool or from managed memory."""

    name = RMM
    method = "allocator statistics"

    def __init__(self, index: int) -> None:
        self._index = index
        self._pool: Any = None  # the pool whose allocations are counted
        self._adaptor: Any = None  # what counts them
        self._size = 0  # of the pool, when its allocations began to be counted

    def _to_pool(self) -> list[Any]:
        """The device's resource, what that allocates from, and so on to its pool; empty where it
        has none."""
        rmm, resources = sys.modules.get("rmm"), list[Any]()
        resource = (
            rmm.mr.get_per_device_resource(self._index)
            if rmm is not None and hasattr(rmm, "mr")
            else None
        )
        while resource is not None:
            resources.append(resource)
            resource = getattr(resource, "upstream_mr", None)
        if not resources or isinstance(resources[-1], _mr().ManagedMemoryResource):
            return []
        return next(
            (
                resources[: at + 1]
                for at, resource in enumerate(resources)
                if isinstance(resource, _mr().PoolMemoryResource)
            ),
            [],
        )

    def ready(self) -> bool:
        return bool(self._to_pool())

    def start(self, log: MemoryLog, lines: bool) -> str | None:
        self.drain()
        return None

    def drain(self) -> None:
        """Count the allocations of the pool, if the user has set another one."""
        resources = self._to_pool()
        if (
            self._pool is not None
            and any(resource is self._adaptor for resource in resources)
            and resources[-1] is self._pool
        ):
            return
        self._pool = self._adaptor = (
            None  # a pool that is no longer used must not live because of this
        )
        if resources:
            self._adaptor = next(
                (
                    resource
                    for resource in resources
                    if isinstance(resource, _mr().StatisticsResourceAdaptor)
                ),
                None,
            )
            if self._adaptor is None:
                self._adaptor = _mr().StatisticsResourceAdaptor(resources[0])
                _mr().set_per_device_resource(self._index, self._adaptor)
            self._pool, self._size = resources[-1], int(resources[-1].pool_size())

    def figures(self) -> Mapping[Series, Figures]:
        if self._pool is None:
            return {}
        counts, size = self._adaptor.allocation_counts, int(self._pool.pool_size()) - self._size
        used, high, made = (
            int(counts.current_bytes),
            int(counts.peak_bytes),
            int(counts.total_count),
        )
        return {
            (RMM, "device"): Figures(used, size - used, size, high, single=False, allocations=made)
        }


def _mr() -> Any:
    """The module `rmm.mr`, once RMM is imported."""
    return sys.modules["rmm"].mr


class JaxMemory(Source):
    """The statistics of JAX's allocator on one device. Its peak is that of the process."""

    name = JAX
    method = "allocator statistics"

    def __init__(self, index: int) -> None:
        self._index = index

    def ready(self) -> bool:
        # Asking JAX for its devices would start its backend, which takes most of the GPU's memory.
        bridge = sys.modules.get("jax._src.xla_bridge")
        return (
            bool(getattr(bridge, "backends_are_initialized", lambda: False)())
            and self._device() is not None
        )

    def _device(self) -> Any:
        jax = sys.modules.get("jax")
        devices = jax.local_devices() if jax is not None else ()
        return next(
            (
                device
                for device in devices
                if device.platform in ("gpu", "cuda") and device.local_hardware_id == self._index
            ),
            None,
        )

    def figures(self) -> Mapping[Series, Figures]:
        device = self._device()
        statistics = (device.memory_stats() if device is not None else None) or {}
        if "bytes_in_use" not in statistics:
            return {}
        used = int(statistics["bytes_in_use"])
        pool = int(statistics.get("pool_bytes", used))
        high, made = int(statistics.get("peak_bytes_in_use", used)), statistics.get("num_allocs")
        made = None if made is None else int(made)
        return {
            (JAX, "device"): Figures(used, pool - used, pool, high, single=False, allocations=made)
        }


class NumbaMemory(Source):
    """Frees what Numba has put off: it frees late, several allocations at a time."""

    name = "Numba"
    method = "CUPTI"

    def ready(self) -> bool:
        return "numba.cuda" in sys.modules

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
        context = sys.modules["numba.cuda"].current_context()
        for holder in (context, context.memory_manager):
            pending = getattr(holder, "deallocations", None)
            if pending is not None:
                pending.clear()
        return True
