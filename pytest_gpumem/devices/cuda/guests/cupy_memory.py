"""CuPy's memory pool: its hook reports each array and each segment, its counts the rest.

Source: cupy.cuda.MemoryHook. CuPy keeps its hooks for each thread: other threads than the one that watches show in the counts alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any

import cupy

from pytest_gpumem.devices.allocation_sites import python_stack
from pytest_gpumem.devices.footprints import Source
from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog, Series

NAME = "CuPy"
_SERIES: Series = (NAME, "device")


class _Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """A test may allocate thousands of times, a few microseconds each: each line here shows in its time."""

    name = "gpumem"

    def __init__(self, index: int, log: MemoryLog, stacks: bool) -> None:
        self._index, self._emit, self._stacks = index, log.emit, stacks

    def alloc_postprocess(self, device_id: int, mem_size: int, mem_ptr: int, **_: Any) -> None:
        if device_id == self._index and mem_ptr:
            self._emit(AllocationEvent(perf_counter(), _SERIES, "segment", mem_ptr, mem_size))

    def malloc_postprocess(self, device_id: int, mem_size: int, mem_ptr: int, **_: Any) -> None:
        if device_id == self._index and mem_ptr:
            self._emit(AllocationEvent(perf_counter(), _SERIES, "use", mem_ptr, mem_size, python_stack() if self._stacks else ()))

    def free_postprocess(self, device_id: int, mem_ptr: int, **_: Any) -> None:
        if device_id == self._index and mem_ptr:
            self._emit(AllocationEvent(perf_counter(), _SERIES, "use", mem_ptr, 0))


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

    def _pools(self) -> list[Any]:
        pools = {id(pool): pool for pool in (cupy.get_default_memory_pool(), getattr(cupy.cuda.get_allocator(), "__self__", None))}
        return [pool for pool in pools.values() if isinstance(pool, cupy.cuda.MemoryPool)]

    def empty(self) -> None:
        with cupy.cuda.Device(self._index):
            for pool in self._pools():
                pool.free_all_blocks()

    def figures(self) -> Mapping[Series, Figures]:
        used = total = 0
        with cupy.cuda.Device(self._index):
            for pool in self._pools():
                used, total = used + int(pool.used_bytes()), total + int(pool.total_bytes())
        return {_SERIES: Figures(used, total - used, segments=total)}

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
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
