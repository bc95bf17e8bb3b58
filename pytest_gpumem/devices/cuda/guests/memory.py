"""Memory of libraries: CuPy's hook reports each array and each segment. RMM and JAX are counted by
their statistics, and Numba by the driver.

CuPy keeps its hooks for each thread, so that each thread that begins enters the hook. Threads that
ran before, and those that Python does not begin, show in the pool's counts alone.
Source: numba.cuda, Deallocation Behavior.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from types import FrameType
from typing import Any

import cupy

from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog, Series, Source

_CUPY: Series = ("CuPy", "device")


class _Hook(cupy.cuda.MemoryHook):  # type: ignore[misc]
    """Each line shows in the time of a test that allocates thousands of times. A dict of unused
    arguments takes longer than the rest: so they have names, also where nothing is done."""

    name = "gpumem"

    def __init__(self, index: int) -> None:
        self._index = index
        self.emit: Callable[[AllocationEvent], None] | None = None
        """Takes each event; None: nothing is reported. A thread keeps the hook until it ends."""
        self._profiles: Callable[..., object] | None = None  # what profiled threads before

    def alloc_postprocess(self, device_id: int, mem_size: int, mem_ptr: int, **_: Any) -> None:
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _CUPY, "segment", mem_ptr, mem_size))

    def malloc_preprocess(self, device_id: int, size: int, mem_size: int, **_: Any) -> None:
        return

    def malloc_postprocess(
        self, device_id: int, size: int, mem_size: int, mem_ptr: int, pmem_id: int = 0, **_: Any
    ) -> None:
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _CUPY, "use", mem_ptr, mem_size))

    def free_preprocess(
        self, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int = 0, **_: Any
    ) -> None:
        """Before it is freed: afterwards another thread may have the address already."""
        emit = self.emit
        if device_id == self._index and mem_ptr and emit is not None:
            emit(AllocationEvent(perf_counter(), _CUPY, "use", mem_ptr, 0))

    def free_postprocess(
        self, device_id: int, mem_size: int, mem_ptr: int, pmem_id: int = 0, **_: Any
    ) -> None:
        return

    def enter(self) -> None:
        with suppress(KeyError):  # it has the hook
            self.__enter__()
        if threading.getprofile() != self._begun:
            self._profiles = threading.getprofile()
            threading.setprofile(self._begun)

    def leave(self) -> None:
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

    def figures(self) -> Mapping[str, Figures]:
        used = total = 0
        default = cupy.get_default_memory_pool()
        current = getattr(cupy.cuda.get_allocator(), "__self__", None)
        with cupy.cuda.Device(self._index):
            for pool in [default] if current is default else [default, current]:
                if isinstance(pool, cupy.cuda.MemoryPool):
                    used, total = used + int(pool.used_bytes()), total + int(pool.total_bytes())
        return {self.name: Figures(used, total - used, total)}

    def settle(self) -> None:
        with suppress(Exception):  # the user's allocator may refuse 0 bytes
            # Gives back blocks whose copies are done.
            cupy.cuda.alloc_pinned_memory(0)
        cupy.get_default_pinned_memory_pool().free_all_blocks()

    def stop(self) -> None:
        self._hook.emit = None
        self._hook.leave()


class RmmMemory(Source):
    """The counts of a `StatisticsResourceAdaptor`, which is put around the device's resource where
    that has a pool. Other memory of RMM counts as the driver's."""

    name = "RMM"

    def __init__(self, index: int) -> None:
        self._index = index
        self._pool: Any = None  # the pool whose allocations are counted
        self._adaptor: Any = None  # what counts them
        self._size = 0  # of the pool, when its allocations began to be counted

    def _to_pool(self) -> list[Any]:
        """The device's resource, what that allocates from, and so on to its pool, if it has any."""
        resources = sys.modules.get("rmm.mr")
        if resources is None:
            return []
        chain, to_pool = [], list[Any]()
        resource = resources.get_per_device_resource(self._index)
        while resource is not None:
            chain.append(resource)
            if not to_pool and isinstance(resource, resources.PoolMemoryResource):
                to_pool = list(chain)
            resource = getattr(resource, "upstream_mr", None)
        managed = bool(chain) and isinstance(chain[-1], resources.ManagedMemoryResource)
        return [] if managed else to_pool

    def ready(self) -> bool:
        return bool(self._to_pool())

    def start(self, log: MemoryLog) -> None:
        self.drain()

    def drain(self) -> None:
        """Count the allocations of the pool, if the user has set another one."""
        chain = self._to_pool()
        counted = any(resource is self._adaptor for resource in chain)
        if self._pool is not None and counted and chain[-1] is self._pool:
            return
        self._pool = self._adaptor = None  # a pool that is not used must not live because of this
        if not chain:
            return
        resources: Any = sys.modules["rmm.mr"]
        for resource in reversed(chain):
            if isinstance(resource, resources.StatisticsResourceAdaptor):
                self._adaptor = resource
        if self._adaptor is None:
            self._adaptor = resources.StatisticsResourceAdaptor(chain[0])
            resources.set_per_device_resource(self._index, self._adaptor)
        self._pool, self._size = chain[-1], int(chain[-1].pool_size())

    def figures(self) -> Mapping[str, Figures]:
        if self._pool is None:
            return {}
        counts, size = self._adaptor.allocation_counts, int(self._pool.pool_size()) - self._size
        used, high = int(counts.current_bytes), int(counts.peak_bytes)
        made = int(counts.total_count)
        figures = Figures(used, size - used, size, high, single=False, allocations=made)
        return {self.name: figures}


class JaxMemory(Source):
    """The statistics of JAX's allocator. Its peak is that of the process."""

    name = "JAX"

    def __init__(self, index: int) -> None:
        self._index = index

    def ready(self) -> bool:
        # Asking JAX for its devices would start its backend, which takes most of the GPU's memory.
        bridge = sys.modules.get("jax._src.xla_bridge")
        initialized = getattr(bridge, "backends_are_initialized", None)
        return initialized is not None and initialized() and self._device() is not None

    def _device(self) -> Any:
        jax = sys.modules.get("jax")
        for device in jax.local_devices() if jax is not None else ():
            if device.platform in ("gpu", "cuda") and device.local_hardware_id == self._index:
                return device
        return None

    def figures(self) -> Mapping[str, Figures]:
        device = self._device()
        statistics = (device.memory_stats() if device is not None else None) or {}
        if "bytes_in_use" not in statistics:
            return {}
        used = int(statistics["bytes_in_use"])
        pool, made = int(statistics.get("pool_bytes", used)), int(statistics.get("num_allocs", 0))
        high = int(statistics.get("peak_bytes_in_use", used))
        figures = Figures(used, pool - used, pool, high, single=False, allocations=made)
        return {self.name: figures}


class NumbaMemory(Source):
    """Frees what Numba has put off: it frees late, several allocations at a time."""

    name = "Numba"

    def ready(self) -> bool:
        return sys.modules.get("numba.cuda") is not None

    def settle(self) -> None:
        context = sys.modules["numba.cuda"].current_context()
        # Numba's simulator has no memory manager.
        for holder in (context, getattr(context, "memory_manager", None)):
            pending = getattr(holder, "deallocations", None)
            if pending is not None:
                pending.clear()
