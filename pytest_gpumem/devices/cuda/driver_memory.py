"""The driver's allocations: CUPTI's records of each, and the driver's own counts of its stream-ordered pool and of CUDA graphs.

A record comes later and from a thread of CUPTI's. The Python stack of its allocation is taken in CUPTI's callback, which runs in the thread
that allocates, and found again by the correlation id that both have. What the calls of `_PLAIN` do is read in the callback itself,
because it takes milliseconds to have CUPTI deliver records.

Sources: CUPTI, CUpti_ActivityMemory4 (kind MEMORY2) and CUpti_CallbackData; CUDA Runtime API, cudaMemPoolGetAttribute,
cudaDeviceGetGraphMemAttribute.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.allocation_sites import python_stack
from pytest_gpumem.devices.cuda.counters import CudaCounters
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, words
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS
from pytest_gpumem.devices.footprints import Source
from pytest_gpumem.devices.memory_events import Allocated, Figures, Frame, MemoryLog, Series
from pytest_gpumem.devices.process_memory import is_loaded
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.footprint import DRIVER, GRAPHS, MemoryPlace

RECORDS = "MEMORY2"  # CUpti_ActivityKind with a record for each allocation and each free
_KINDS: Mapping[str, MemoryPlace] = {"DEVICE": "device", "MANAGED": "managed", "PINNED": "pinned"}
"""CUpti_ActivityMemoryKind in our words. Memory that is registered counts as PINNED there as well."""


CUBLAS = "cuBLAS"  # `MemoryUse.library` of the memory of cuBLAS handles
_PLAIN: Mapping[str, tuple[MemoryPlace, bool]] = {
    "cuMemAlloc_v2": ("device", True),
    "cuMemFree_v2": ("device", False),
    **dict.fromkeys(("cuMemHostAlloc", "cuMemHostAlloc_v2"), ("pinned", True)),
    "cuMemAllocHost_v2": ("pinned", True),
    "cuMemFreeHost": ("pinned", False),
}
"""Calls that are read in their callback: the kind of memory, and whether they allocate. Their parameters begin with the address, or with
where it is written to and the bytes."""
_CHANGE = re.compile(
    r"cu(MemAlloc|MemFree|MemHost(Alloc|Register|Unregister)|MemCreate|MemRelease|MemImport|MemPool(Destroy|TrimTo|Import)|GraphLaunch"
    r"|GraphExecDestroy|DeviceGraphMemTrim|\w*Array\w*(Create|Destroy)|CtxDestroy|DevicePrimaryCtxRe(lease|set))"
)
"""Calls of the driver after which there may be new records."""


class DriverMemory(Source):
    """The source of the driver's allocations for one device."""

    name = "CUPTI"
    method = "CUPTI"

    def __init__(self, index: int, counters: CudaCounters) -> None:
        self._index, self._counters = index, counters
        self._log: MemoryLog | None = None
        self._offset = 0.0  # seconds from CUPTI's clock to that of `time.perf_counter`
        self._listens = False
        self._default: Any = None  # the device's own stream-ordered pool
        self._nothing: Mapping[Series, Figures] | None = None
        """The figures while pools and graphs hold nothing, until a call that is not read may have changed that."""
        self._probed: list[int] | None = None
        """Bytes of each allocation while a handle is made to see what it allocates; None otherwise."""
        self._handles: dict[str, tuple[int, ...]] = {}
        self._stacks: dict[int, tuple[Frame, ...]] = {}
        """By correlation id, the stacks of calls whose record was not delivered yet."""
        self._called_since = True
        """Memory was allocated or freed since the last `drain`, by calls that are not read: then records have to be delivered."""
        self._plain: dict[int, tuple[MemoryPlace, bool]] = {}  # `_PLAIN`, by CUPTI's number of a call
        self._read: set[int] = set()  # correlation ids of calls that were read, whose records were not delivered yet
        self._devices: dict[int, int] = {}  # by CUPTI's number of a context: its device, once a record has told it
        self._untold: dict[int, int] = {}  # by correlation id, contexts whose device is unknown
        self._names: tuple[str, ...] = ()
        self._ends: list[Callable[[], None]] = []  # each ends some callbacks

    def ready(self) -> bool:
        return True

    def start(self, log: MemoryLog, stacks: bool) -> str | None:
        self._log = log
        try:
            cupti = self._counters.listen(RECORDS, self._receive)
        except NotCounted as why:
            return str(why)
        self._offset = time.perf_counter() - cupti.get_timestamp() * 1e-9
        self._listens = self._called_since = True
        self._with_stacks, self._enter = stacks, int(cupti.ApiCallbackSite.API_ENTER)
        numbers = cupti.driver_api_trace_cbid
        self._plain = {int(getattr(numbers, name)): call for name, call in _PLAIN.items() if hasattr(numbers, name)}
        with suppress(NotCounted):  # such as another tool that holds the callbacks: then every look delivers records, without stacks
            self._ends.append(CALLBACKS.add("DRIVER_API", self._changes(cupti), self._called))
        return None

    def _changes(self, cupti: Any) -> tuple[str, ...]:
        """The calls after which there may be new records, as the installed version names them."""
        if not self._names:
            self._names = tuple(name for name in dir(cupti.driver_api_trace_cbid) if _CHANGE.match(name))
        return self._names

    def _called(self, cbid: int, data: Any) -> None:
        """Note a call that may make a record, at its begin and at its end. Calls of the runtime make one, with the same correlation id."""
        try:
            if int(data.callback_site) == self._enter:
                if self._with_stacks:
                    self._stacks[int(data.correlation_id)] = python_stack()
            elif (plain := self._plain.get(cbid)) is None or not self._take(*plain, data._data):
                self._called_since = True
        except Exception:  # which would be lost; there is a record all the same
            self._called_since = True
        if cbid not in self._plain:
            self._nothing = None

    def _take(self, kind: MemoryPlace, allocates: bool, call: Any) -> bool:
        """Report what a call of `_PLAIN` has done; False if only its record can tell."""
        parameters, result = int(call["function_params"].item()), int(call["function_return_value"].item())
        if not parameters or not result:
            return False
        first, nbytes = words(parameters, 2) if allocates else (*words(parameters, 1), 0)
        if ctypes.c_int.from_address(result).value or not first:
            return True  # it has done nothing
        context, correlation = int(call["context_uid"].item()), int(call["correlation_id"].item())
        if correlation in self._read:  # a call within the call
            return True
        if kind == "device" and context not in self._devices:
            self._untold[correlation] = context
            return False
        self._read.add(correlation)
        if kind != "device" or self._devices[context] == self._index:
            (address,) = words(first, 1) if allocates else (first,)
            self._report(time.perf_counter(), kind, address, nbytes, correlation)
        return True

    def drain(self) -> None:
        if self._listens and (self._called_since or not self._ends):
            self._called_since = False
            self._counters.deliver()
            self._stacks.clear()  # of calls that failed

    def _receive(self, cupti: Any, record: Any) -> None:
        correlation = int(record.correlation_id)
        if correlation in self._read:
            self._read.remove(correlation)
            return
        kind = _KINDS.get(cupti.ActivityMemoryKind(int(record.memory_kind)).name)
        if kind == "device" and correlation in self._untold:
            self._devices[self._untold.pop(correlation)] = int(record.device_id)
        if kind is None or (kind == "device" and int(record.device_id) != self._index) or self._log is None:
            return
        allocates = int(record.memory_operation_type) == int(cupti.ActivityMemoryOperationType.ALLOCATION)
        at = int(record.timestamp) * 1e-9 + self._offset
        self._report(at, kind, int(record.address), int(record.bytes) if allocates else 0, correlation)

    def _report(self, at: float, kind: MemoryPlace, address: int, nbytes: int, correlation: int) -> None:
        """Report an allocation, or a free, which has 0 bytes."""
        stack = self._stacks.pop(correlation, ())
        if self._probed is not None:
            self._probed += [nbytes] if nbytes else []
        elif self._log is not None:
            self._log.emit((at, (DRIVER, kind), "driver", address, nbytes, stack))

    def figures(self) -> Mapping[Series, Figures]:
        if self._nothing is None or not self._ends:
            found = self._asked()
            self._nothing = found if all((one.used or 0, one.unused) == (0, 0) for one in found.values()) else None
            return found
        return self._nothing

    def _asked(self) -> Mapping[Series, Figures]:
        pool, graphs = R.cudaMemPoolAttr, R.cudaGraphMemAttributeType
        if self._default is None:
            self._default = _known(R.cudaDeviceGetDefaultMemPool(self._index))
        current = _known(R.cudaDeviceGetMemPool(self._index))
        pools = [self._default] if int(current) == int(self._default) else [self._default, current]

        def of_pools(attribute: Any) -> int:
            return sum(int(_known(R.cudaMemPoolGetAttribute(one, attribute))) for one in pools)

        used, reserved = of_pools(pool.cudaMemPoolAttrUsedMemCurrent), of_pools(pool.cudaMemPoolAttrReservedMemCurrent)
        in_graphs, held = (
            int(_known(R.cudaDeviceGetGraphMemAttribute(self._index, attribute)))
            for attribute in (graphs.cudaGraphMemAttrUsedMemCurrent, graphs.cudaGraphMemAttrReservedMemCurrent)
        )
        if self._listens:
            ordered = Figures(None, reserved - used)
        else:
            ordered = Figures(used, reserved - used, high=of_pools(pool.cudaMemPoolAttrUsedMemHigh), single=False)
        return {(DRIVER, "device"): ordered, (GRAPHS, "device"): Figures(in_graphs, held - in_graphs)}

    def settle(self, kept: Sequence[Allocated]) -> bool:
        """Find what a handle of cuBLAS allocates, once something has loaded cuBLAS: libraries make one at their first call, and keep it."""
        known = CUBLAS in self._handles or not any(one.kind == "device" for one in kept)
        if not self._listens or known or not is_loaded("libcublas.so"):
            return False
        self.drain()
        self._probed = []
        try:
            from cupy_backends.cuda.libs import cublas

            handle = cublas.create()
            self.drain()
            self._handles[CUBLAS] = tuple(self._probed)
            cublas.destroy(handle)
            self.drain()
        except (ImportError, RuntimeError):
            self._handles[CUBLAS] = ()
        finally:
            self._probed = None
        return True

    def handles(self) -> Mapping[str, Sequence[int]]:
        return {name: sizes for name, sizes in self._handles.items() if sizes}

    def alive(self, allocated: Allocated) -> bool:
        try:
            return int(runtime.pointerGetAttributes(allocated.address).type) != 0  # cudaMemoryTypeUnregistered
        except CUPY_ERRORS:
            return True

    def stop(self) -> None:
        self._nothing = None
        while self._ends:
            self._ends.pop()()
        if self._listens:
            self._listens = False
            self._counters.unlisten(RECORDS)


def _known(answer: tuple[Any, ...]) -> Any:
    """The value of a call that cannot fail on an open device."""
    status, value = answer
    if status != R.cudaError_t.cudaSuccess:
        raise NotCounted(f"the driver does not tell its memory: {status.name}")
    return value


def free_bytes() -> int | None:
    """Free memory of the current device."""
    free, _total = runtime.memGetInfo()
    return int(free)
