"""Memory that the CUDA driver allocates in this process, from CUPTI's callbacks, and what pools and
graphs hold. Reading it makes no context.

Sources: CUPTI, the structures of generated_cuda_meta.h; CUDA Driver API, Memory Management.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda.allocations import has_pools
from pytest_gpumem.devices.cuda.context import answer, context_number, is_captured
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, words
from pytest_gpumem.devices.cuda.guests.memory import CupyMemory, JaxMemory, NumbaMemory, RmmMemory
from pytest_gpumem.devices.cuda.guests.torch_memory import TorchMemory
from pytest_gpumem.devices.footprints import Footprints
from pytest_gpumem.devices.memory_events import NOTHING, AllocationEvent, Figures, MemoryLog, Source
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.footprint import DRIVER, GRAPHS, MemoryPlace


class _MemoryCall(NamedTuple):
    """Where a call of the driver has its parameters, of eight bytes each. Parameter 0 is the
    address, or with `returned` a pointer to it."""

    kind: MemoryPlace
    returned: bool = True
    nbytes_at: int | None = 1  # None: it frees
    stream_at: int | None = None  # of a stream-ordered call
    rows_at: int | None = None  # of pitched memory; parameter 1 points to the bytes of a row


_PINNED = _MemoryCall("pinned")
_FREE = _MemoryCall("device", returned=False, nbytes_at=None)  # the kind of a free is not read
_CALLS = {
    "cuMemAlloc_v2": _MemoryCall("device"),
    "cuMemAllocPitch_v2": _MemoryCall("device", rows_at=3),
    "cuMemAllocManaged": _MemoryCall("managed"),
    "cuMemAllocHost_v2": _PINNED,
    "cuMemHostAlloc": _PINNED,
    "cuMemHostAlloc_v2": _PINNED,
    "cuMemHostRegister_v2": _MemoryCall("pinned", returned=False),
    "cuMemAllocAsync": _MemoryCall("device", stream_at=2),
    "cuMemAllocFromPoolAsync": _MemoryCall("device", stream_at=3),
    "cuMemFree_v2": _FREE,
    "cuMemFreeHost": _FREE,
    "cuMemHostUnregister": _FREE,
    "cuMemFreeAsync": _FREE._replace(stream_at=1),
}
_BY_HANDLE = {
    # virtual memory lives until its last handle and its last mapping are gone
    "cuMemCreate": 3,
    "cuMemImportFromShareableHandle": 1,
    "cuMulticastCreate": 1,
    "cuMemRelease": 1,
    "cuMemMap": 4,
    "cuMemUnmap": 2,
    "cuMemRetainAllocationHandle": 2,
    "cuMemMapArrayAsync": 0,
    "cuArrayCreate_v2": 2,
    "cuArray3DCreate_v2": 2,
    "cuArrayDestroy": 1,
    "cuMemPoolCreate": 2,
    "cuMemPoolDestroy": 1,
}
"""Calls about memory that has a handle, with how many of their parameters are read."""
_ARRAY = struct.Struct("<QQII")  # CUDA_ARRAY_DESCRIPTOR: width, height, format and channels
_ARRAY3D = struct.Struct("<QQQIII")  # CUDA_ARRAY3D_DESCRIPTOR: also depth, and flags at the end
_FORMAT_BYTES = {0x01: 1, 0x02: 2, 0x03: 4, 0x08: 1, 0x09: 2, 0x0A: 4, 0x10: 2, 0x20: 4}
"""Bytes of one channel by CUarray_format: integers of 8, 16 and 32 bits, half and float."""
_ON_DEVICE = int(D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
_ON_HOST = (2, 3, 4)  # CU_MEM_LOCATION_TYPE_HOST, HOST_NUMA and HOST_NUMA_CURRENT
_LOCATION = struct.Struct("<8xii")  # its type and id, of a CUmemAllocationProp or CUmemPoolProps
_ORDINAL = D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class DriverMemory(Source):
    name = "CUPTI"

    def __init__(self, index: int) -> None:
        self._index = index
        self._log = MemoryLog()
        self._end: Callable[[], None] | None = None
        self._last = (0, 0)  # correlation id and address of the last call that was read
        self._handles: dict[int, int] = {}
        """Number of handles and mappings: by CUDA array, or by handle of virtual memory."""
        self._mapped: dict[int, tuple[int, int]] = {}  # by address: bytes of a mapping, its handle
        self._pools: list[int] = []  # pools of the device that the process has made

    def start(self, log: MemoryLog) -> str | None:
        self._log = log
        _lock_a_byte(context_number(self._index))
        names, lost = (*_CALLS, *_BY_HANDLE), self._missed
        try:
            self._end = CALLBACKS.add("DRIVER_API", names, self._called, lost, begins=False)
        except NotCounted as why:
            return str(why)
        return None

    def _missed(self, why: str) -> None:
        self._pools = []  # a handle may be gone, and reading it would crash
        self.lost(f"not read: {why}")

    def _called(self, name: str, call: ApiCall) -> None:
        if name in _CALLS:
            self._take(_CALLS[name], call.parameters, call.correlation)
            return
        values = words(call.parameters, _BY_HANDLE[name])
        if name.startswith("cuArray"):
            self._take_array(name, values)
        elif name.startswith("cuMemPool"):
            self._take_pool(name, values)
        else:
            self._take_virtual(name, values)

    def _take(self, call: _MemoryCall, parameters: int, correlation: int) -> None:
        values = words(
            parameters, 1 + max(call.nbytes_at or 0, call.stream_at or 0, call.rows_at or 0)
        )
        address, nbytes = values[0], 0
        if call.nbytes_at is not None:
            nbytes = values[call.nbytes_at]
        if call.returned:
            (address,) = words(address, 1)
        if call.rows_at is not None:
            (pitch,) = words(nbytes, 1)
            nbytes = pitch * values[call.rows_at]
        if not address or (correlation, address) == self._last:  # a call within the call
            return
        if call.stream_at is not None and is_captured(values[call.stream_at]):
            return  # it is a node of a graph, whose memory the driver counts
        if nbytes and call.kind == "device":
            device = answer(D.cuPointerGetAttribute(_ORDINAL, address))
            if device != self._index:
                return
        self._last = correlation, address
        self._emit(call.kind, address, nbytes)

    def _take_virtual(self, name: str, values: Sequence[int]) -> None:
        """Count handles and mappings of virtual memory, whose handle stands for its address.
        Handles of other processes and of several devices count nothing."""
        if name == "cuMemCreate":
            (handle,) = words(values[0], 1)
            kind, device = _LOCATION.unpack(ctypes.string_at(values[2], _LOCATION.size))
            self._handles[handle] = 1
            if kind in _ON_HOST:
                self._emit("pinned", handle, values[1])
            elif (kind, device) == (_ON_DEVICE, self._index):
                self._emit("device", handle, values[1])
        elif name in ("cuMemImportFromShareableHandle", "cuMulticastCreate"):
            (handle,) = words(values[0], 1)
            self._handles[handle] = self._handles.get(handle, 0) + 1
        elif name == "cuMemMap":
            address, nbytes, _, handle = values
            self._mapped[address] = nbytes, handle
            if handle not in self._handles:
                self.lost("virtual memory was mapped that was created before the watch")
            self._count(handle, 1)
        elif name == "cuMemMapArrayAsync":
            self.lost("virtual memory was mapped into a CUDA array")
        elif name == "cuMemRetainAllocationHandle":
            (handle,) = words(values[0], 1)
            self._count(handle, 1)
        elif name == "cuMemRelease":
            self._count(values[0], -1)
        else:
            begin, end = values[0], values[0] + values[1]
            for start, (nbytes, handle) in list(self._mapped.items()):
                if begin <= start and start + nbytes <= end:
                    del self._mapped[start]
                    self._count(handle, -1)

    def _take_array(self, name: str, values: Sequence[int]) -> None:
        """Count a CUDA array by its elements: the driver does not tell what its layout adds."""
        if name.endswith("Destroy"):
            self._count(values[0], -1)
            return
        (handle,) = words(values[0], 1)
        depth = 1
        if name == "cuArrayCreate_v2":
            width, height, form, channels = _ARRAY.unpack(ctypes.string_at(values[1], _ARRAY.size))
        else:
            content = ctypes.string_at(values[1], _ARRAY3D.size)
            width, height, depth, form, channels, _ = _ARRAY3D.unpack(content)
        if form not in _FORMAT_BYTES:
            raise ValueError(f"a CUDA array of the format {form:#x}, whose bytes are not known")
        if int(answer(D.cuCtxGetDevice())) != self._index:
            return
        elements = width * max(1, height) * max(1, depth)
        self._handles[handle] = 1
        self._emit("device", handle, elements * channels * _FORMAT_BYTES[form])

    def _take_pool(self, name: str, values: Sequence[int]) -> None:
        """Note a stream-ordered pool, whose unused memory counts as reserved."""
        if name == "cuMemPoolDestroy":
            self._pools = [handle for handle in self._pools if handle != values[0]]
            return
        (pool,) = words(values[0], 1)
        location = _LOCATION.unpack(ctypes.string_at(values[1], _LOCATION.size))
        if location == (_ON_DEVICE, self._index):
            self._pools.append(pool)

    def _count(self, handle: int, by: int) -> None:
        """Count a handle or a mapping more, or less; the memory is freed with the last."""
        if handle not in self._handles:
            return
        self._handles[handle] += by
        if self._handles[handle] <= 0:
            del self._handles[handle]
            self._emit("device", handle, 0)

    def _emit(self, kind: MemoryPlace, address: int, nbytes: int) -> None:
        now, series = time.perf_counter(), (DRIVER, kind)
        self._log.emit(AllocationEvent(now, series, "driver", address, nbytes))

    def figures(self) -> Mapping[str, Figures]:
        """What stream-ordered pools and CUDA graphs hold."""
        if not has_pools(self._index):  # graphs cannot allocate either
            return {}
        return {DRIVER: self._of_pools(), GRAPHS: self._of_graphs()}

    def _of_pools(self) -> Figures:
        attributes = R.cudaMemPoolAttr
        default = answer(R.cudaDeviceGetDefaultMemPool(self._index))
        current = answer(R.cudaDeviceGetMemPool(self._index))
        used = reserved = high = 0
        for handle in {int(default), int(current), *self._pools}:
            used += _attribute(handle, attributes.cudaMemPoolAttrUsedMemCurrent)
            reserved += _attribute(handle, attributes.cudaMemPoolAttrReservedMemCurrent)
            if self._end is None:
                high += _attribute(handle, attributes.cudaMemPoolAttrUsedMemHigh)
        if self._end is not None:  # the callbacks count what is in use
            return Figures(unused=reserved - used)
        return Figures(used, reserved - used, high=high, single=False)

    def _of_graphs(self) -> Figures:
        attributes, read = R.cudaGraphMemAttributeType, R.cudaDeviceGetGraphMemAttribute
        used = int(answer(read(self._index, attributes.cudaGraphMemAttrUsedMemCurrent)))
        reserved = int(answer(read(self._index, attributes.cudaGraphMemAttrReservedMemCurrent)))
        return Figures(used, reserved - used)

    def settle(self) -> None:
        """Have the driver give back what no graph uses any more: until then it counts as used."""
        if self.figures().get(GRAPHS, NOTHING) != NOTHING:
            R.cudaDeviceGraphMemTrim(self._index)

    def alive(self, allocated: AllocationEvent) -> bool:
        if allocated.address in self._handles:
            return True
        error, seen = R.cudaPointerGetAttributes(allocated.address)
        return int(error) != 0 or int(seen.type) != 0  # cudaMemoryTypeUnregistered

    def stop(self) -> None:
        if self._pools:
            self._missed(
                "a stream-ordered pool of the test's own lived during a measurement: what it keeps "
                "since then is not known"
            )
        end, self._end = self._end, None
        if end is not None:
            end()


@cache
def _lock_a_byte(_context: int | None) -> None:
    """While nothing is page-locked, to lock a small block takes a millisecond, not microseconds."""
    D.cuMemHostAlloc(1, D.CU_MEMHOSTALLOC_PORTABLE)


def _attribute(pool: Any, attribute: Any) -> int:
    return int(answer(R.cudaMemPoolGetAttribute(pool, attribute)))


@cache  # until a device is closed
def footprints(index: int) -> Footprints:
    pools = CupyMemory(index), TorchMemory(index)
    libraries = (*pools, NumbaMemory(), RmmMemory(index), JaxMemory(index))
    return Footprints(DriverMemory(index), libraries, partial(context_number, index))
