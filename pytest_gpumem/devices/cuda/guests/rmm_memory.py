"""RMM's pool: the statistics of `rmm.statistics`, which are switched on where RMM is in use.

Memory of RMM that comes from no pool of its own is the driver's, which reports it. Source: rmm.statistics, rmm.mr.PoolMemoryResource.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pytest_gpumem.devices.footprints import Source
from pytest_gpumem.devices.memory_events import Figures, MemoryLog, Series

NAME = "RMM"


class RmmMemory(Source):
    """The source of RMM's memory on one device."""

    name = NAME
    method = "allocator statistics"

    def __init__(self, index: int) -> None:
        self._index = index

    def _pool(self) -> Any:
        """The pool that RMM allocates from; None where it has none."""
        rmm = sys.modules.get("rmm")
        if rmm is None or not hasattr(rmm, "mr"):
            return None
        resource = rmm.mr.get_per_device_resource(self._index)
        while resource is not None and not isinstance(resource, rmm.mr.PoolMemoryResource):
            resource = getattr(resource, "upstream_mr", None)
        return resource

    def ready(self) -> bool:
        return self._pool() is not None

    def start(self, log: MemoryLog, stacks: bool) -> str | None:
        import importlib

        # A submodule of what the user has imported.
        importlib.import_module("rmm.statistics").enable_statistics()
        return None

    def figures(self) -> Mapping[Series, Figures]:
        pool, module = self._pool(), sys.modules.get("rmm.statistics")
        statistics = module.get_statistics() if module is not None else None
        if pool is None or statistics is None:
            return {}
        used, size = int(statistics.current_bytes), int(pool.pool_size())
        return {(NAME, "device"): Figures(used, size - used, size, int(statistics.peak_bytes), single=False)}
