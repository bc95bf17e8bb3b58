"""CuPy's memory pool: its hook reports each array and each segment, its counts the rest.

Source: cupy.cuda.MemoryHook. CuPy keeps its hooks for each thread, so that each thread that begins
enters the hook. Threads that ran before, and those that Python does not begin, show in the counts
alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import perf_counter
from types import FrameType
from typing import Any

import cupy

from pytest_gpumem.devices.cuda.context import context_number
from pytest_gpumem.devices.memory_events import (
    NOTHING,
    AllocationEvent,
    Figures,
    MemoryLog,
    Series,
    Source,
)

_SERIES: Series = ("CuPy", "device")


class _Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Each line here shows in the time of a test that allocates thousands of times. Arguments that
    are not used have names too: Python would collect them in a dict, which takes longer than the
    rest.
    """

    name = "gpumem"

    def __init__(self, index: int) -> None:
        self._index = index
        self.emit: Callable[[AllocationEvent], None] | None = None
        """Takes each event; None: nothing is reported. A thread keeps the hook until it ends."""
        self._profiles: Callable[..., object] | None = None  # what profiled threads before

    def alloc_postprocess(self, device_id: int, mem_size: int, mem_ptr: int, **_: Any) -> None:
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _SERIES, "segment", mem_ptr, mem_size))

    def malloc_postprocess(
        self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int = 0, **_: Any
    ) -> None:
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _SERIES, "use", mem_ptr, mem_size))

    def free_preprocess(
        self, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int = 0, **_: Any
    ) -> None:
        """Before it is freed: afterwards another thread may have the address already."""
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _SERIES, "use", mem_ptr, 0))

    def enter(self) -> None:
        """Report this thread, and each that begins from now on."""
        with suppress(KeyError):  # it has the hook
            self.__enter__()
        if threading.getprofile() != self._begun:
            self._profiles = threading.getprofile()
            threading.setprofile(self._begun)

    def leave(self) -> None:
        """Report no thread that begins from now on, nor this one."""
        with suppress(KeyError):  # entered in another thread
            self.__exit__()
        if threading.getprofile() == self._begun:
            threading.setprofile(self._profiles)

    def _begun(self, frame: FrameType, event: str, argument: Any) -> None:
        """Enter the hook at a thread's first event, and leave the rest to the thread's profiler."""
        profiles = self._profiles
        sys.setprofile(profiles)
        with suppress(KeyError):
            self.__enter__()
        if profiles is not None:
            profiles(frame, event, argument)


class CupyMemory(Source):
    name = "CuPy"

    def __init__(self, index: int) -> None:
        self._index = index
        self._hook = _Hook(index)

    def start(self, log: MemoryLog) -> None:
        self._hook.emit = log.emit
        self._hook.enter()

    def figures(self) -> Mapping[Series, Figures]:
        if context_number(self._index) is None:
            return {_SERIES: NOTHING}
        used = total = 0
        default = cupy.get_default_memory_pool()
        current = getattr(cupy.cuda.get_allocator(), "__self__", None)
        with cupy.cuda.Device(self._index):
            for pool in [default] if current is default else [default, current]:
                if isinstance(pool, cupy.cuda.MemoryPool):
                    used, total = used + int(pool.used_bytes()), total + int(pool.total_bytes())
        return {_SERIES: Figures(used, total - used, total)}

    def settle(self, kept: Sequence[AllocationEvent]) -> None:
        if any(event.series[1] == "pinned" for event in kept):
            with suppress(Exception):  # an allocator of the user's may refuse 0 bytes
                # Gives back the blocks of copies that are done, as each allocation does.
                cupy.cuda.alloc_pinned_memory(0)
            cupy.get_default_pinned_memory_pool().free_all_blocks()

    def stop(self) -> None:
        self._hook.emit = None
        self._hook.leave()
