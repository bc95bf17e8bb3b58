"""CuPy's memory pool: its hook reports each array and each segment, its counts the rest.

Source: cupy.cuda.MemoryHook. CuPy keeps its hooks for each thread: other threads than the one that watches show in the counts alone.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import cupy

from pytest_gpumem.devices.allocation_sites import python_stack
from pytest_gpumem.devices.footprints import Source
from pytest_gpumem.devices.memory_events import Allocated, Figures, Layer, MemoryEvent, MemoryLog, Series

NAME = "CuPy"


class _Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
    name = "gpumem"

    def __init__(self, index: int, log: MemoryLog, stacks: bool) -> None:
        self._index, self._log, self._stacks = index, log, stacks

    def _emit(self, layer: Layer, device: int, address: int, nbytes: int) -> None:
        if device == self._index and address:
            stack = python_stack() if self._stacks and nbytes and layer == "use" else ()
            self._log.emit(MemoryEvent(time.perf_counter(), NAME, "device", layer, address, nbytes, stack))

    def alloc_postprocess(self, **of: Any) -> None:
        self._emit("segment", of["device_id"], of["mem_ptr"], of["mem_size"])

    def malloc_postprocess(self, **of: Any) -> None:
        self._emit("use", of["device_id"], of["mem_ptr"], of["mem_size"])

    def free_postprocess(self, **of: Any) -> None:
        self._emit("use", of["device_id"], of["mem_ptr"], 0)


class CupyMemory(Source):
    """The source of CuPy's memory on one device."""

    name = NAME
    method = "memory hook"

    def __init__(self, index: int) -> None:
        self._index = index
        self._hook: _Hook | None = None

    def ready(self) -> bool:
        return True

    def start(self, log: MemoryLog, stacks: bool) -> str | None:
        self._hook = _Hook(self._index, log, stacks)
        self._hook.__enter__()
        return None

    def figures(self) -> Mapping[Series, Figures]:
        pools = {id(pool): pool for pool in (cupy.get_default_memory_pool(), getattr(cupy.cuda.get_allocator(), "__self__", None))}
        used = total = 0
        with cupy.cuda.Device(self._index):
            for pool in pools.values():
                if isinstance(pool, cupy.cuda.MemoryPool):
                    used, total = used + int(pool.used_bytes()), total + int(pool.total_bytes())
        return {(NAME, "device"): Figures(used, total - used, segments=total)}

    def settle(self, kept: Sequence[Allocated]) -> bool:
        locked = any(one.kind == "pinned" for one in kept)
        if locked:
            cupy.get_default_pinned_memory_pool().free_all_blocks()
        return locked

    def cached(self) -> int:
        with suppress(Exception):  # an allocator of the user's may refuse 0 bytes
            cupy.cuda.alloc_pinned_memory(0)  # gives back the blocks of copies that are done, as each allocation does
        return int(cupy.get_default_pinned_memory_pool().n_free_blocks())

    def arrays(self) -> Iterable[tuple[int, object]]:
        for one in gc.get_objects():
            if issubclass(type(one), cupy.ndarray) and one.device.id == self._index and one.nbytes:
                yield int(one.data.mem.ptr), one

    def stop(self) -> None:
        hook, self._hook = self._hook, None
        if hook is not None:
            with suppress(KeyError):  # started in another thread, which has hooks of its own
                hook.__exit__()
