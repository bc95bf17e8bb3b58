"""The driver's allocations: CUPTI's callback of each call that allocates or frees, and the driver's
own counts of its stream-ordered pool and of CUDA graphs.

A callback runs in the thread that calls, at the end of the call, and reads its parameters. CUPTI's
records (kind MEMORY2) tell the same and cost
more: each takes cupti-python 40 us, and loading a kernel makes one for each static variable of
its module.

Sources: CUPTI, CUpti_CallbackData and the structures of generated_cuda_meta.h; CUDA Driver API,
Memory Management; CUDA Runtime API, cudaMemPoolGetAttribute, cudaDeviceGetGraphMemAttribute.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.allocation_sites import line_of
from pytest_gpumem.devices.cuda.allocators import has_pools
from pytest_gpumem.devices.cuda.context import context_number
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, ApiCall, imported, words
from pytest_gpumem.devices.cuda.graph_nodes import is_captured
from pytest_gpumem.devices.memory_events import (
    NO_LINE,
    NOTHING,
    AllocationEvent,
    Figures,
    MemoryLog,
    Series,
)
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.devices.sources import Source
from pytest_gpumem.records.footprint import DRIVER, GRAPHS, MemoryPlace


class _MemoryCall(NamedTuple):
    """What a call of the driver does, and where its parameters, eight bytes each, tell of what.

    The first parameter is the address, or where it is written to (`returned`).
    """

    kind: MemoryPlace
    returned: bool = True
    nbytes: int | None = 1  # None: it frees
    rows: tuple[int, int] | None = None
    """Of pitched memory: where the bytes of a row are written to, and how many rows there are."""
    stream: int | None = None  # of a stream-ordered call


_CALLS = {
    "cuMemAlloc_v2": _MemoryCall("device"),
    "cuMemAllocPitch_v2": _MemoryCall("device", rows=(1, 3)),
    "cuMemAllocManaged": _MemoryCall("managed"),
    **dict.fromkeys(
        ("cuMemAllocHost_v2", "cuMemHostAlloc", "cuMemHostAlloc_v2"), _MemoryCall("pinned")
    ),
    "cuMemHostRegister_v2": _MemoryCall("pinned", returned=False),
    **dict.fromkeys(("cuMemAllocAsync", "cuMemAllocAsync_ptsz"), _MemoryCall("device", stream=2)),
    **dict.fromkeys(
        ("cuMemAllocFromPoolAsync", "cuMemAllocFromPoolAsync_ptsz"), _MemoryCall("device", stream=3)
    ),
    "cuMemFree_v2": _MemoryCall("device", returned=False, nbytes=None),
    **dict.fromkeys(
        ("cuMemFreeHost", "cuMemHostUnregister"), _MemoryCall("pinned", returned=False, nbytes=None)
    ),
    **dict.fromkeys(
        ("cuMemFreeAsync", "cuMemFreeAsync_ptsz"),
        _MemoryCall("device", returned=False, nbytes=None, stream=1),
    ),
}
"""The calls that are read."""
_VIRTUAL = {
    "cuMemCreate": 3,
    "cuMemImportFromShareableHandle": 1,
    "cuMulticastCreate": 1,
    "cuMemRelease": 1,
    "cuMemMap": 4,
    "cuMemUnmap": 2,
    "cuMemRetainAllocationHandle": 2,
    **dict.fromkeys(("cuMemMapArrayAsync", "cuMemMapArrayAsync_ptsz"), 0),
}
"""Calls of virtual memory management, with the parameters of each that are read (CUDA Driver API,
Virtual Memory Management). Memory lives from its creation until its last handle is released and its
last mapping ends."""
_ARRAYS = {
    "cuArrayCreate_v2": 2,
    "cuArray3DCreate_v2": 2,
    "cuArrayDestroy": 1,
    "cuMipmappedArrayCreate": 3,
    "cuMipmappedArrayDestroy": 1,
}
"""Calls that make and destroy CUDA arrays, with the parameters of each that are read. The driver
does not tell the bytes of an array: they are those of its elements, without what its layout
adds."""
_ARRAY = struct.Struct("<QQII")  # CUDA_ARRAY_DESCRIPTOR: width, height, format and channels
# CUDA_ARRAY3D_DESCRIPTOR: width, height, depth, format, channels and flags
_ARRAY3D = struct.Struct("<QQQIII")
_LAYERS = 0x01 | 0x04  # CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_CUBEMAP: the depth is a number of layers
_EMPTY = 0x40 | 0x80
"""CUDA_ARRAY3D_SPARSE, CUDA_ARRAY3D_DEFERRED_MAPPING: virtual memory is mapped into the array
later."""
_FORMAT_BYTES = {0x01: 1, 0x02: 2, 0x03: 4, 0x08: 1, 0x09: 2, 0x0A: 4, 0x10: 2, 0x20: 4}
"""Bytes of one channel by CUarray_format: integers of 8, 16 and 32 bits, half and float."""
# calls that make and destroy pools, with the parameters that are read
_OWN_POOLS = {
    "cuMemPoolCreate": 2,
    "cuMemPoolDestroy": 1,
}
_ON_DEVICE = int(D.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
# CU_MEM_LOCATION_TYPE_HOST, HOST_NUMA and HOST_NUMA_CURRENT, not all of which every version has
_ON_HOST = (
    2,
    3,
    4,
)
# of a CUmemAllocationProp or CUmemPoolProps: the type and the id of its location
_LOCATION = struct.Struct("<8xii")
_POOLS = re.compile(
    r"cu(Mem(Alloc|Free)\w*Async|MemPool(Destroy|TrimTo|Import)|Graph(Launch|ExecDestroy)"
    r"|DeviceGraphMemTrim|CtxDestroy|DevicePrimaryCtxRe)"
)
"""Calls after which pools and graphs may hold other amounts."""
_ORDINAL = D.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class DriverMemory(Source):
    """The source of the driver's allocations for one device."""

    name = "CUPTI"
    method = "CUPTI"

    def __init__(self, index: int) -> None:
        self._index = index
        self._log: MemoryLog | None = None
        self._lines = False
        self._names: tuple[str, ...] = ()  # of the calls that are watched
        self._default: Any = None  # the device's own stream-ordered pool
        self._nothing: Mapping[Series, Figures] | None = None
        """The figures while pools and graphs hold nothing, until a call may have changed that."""
        # of graphs, after memory that none of them uses was given back
        self._trimmed: Figures | None = None
        self._calls: dict[int, _MemoryCall] = {}  # by CUPTI's number of a call
        self._pools: set[int] = set()  # numbers of the calls of `_POOLS`
        # by number, the calls of `_VIRTUAL`, `_ARRAYS` and `_OWN_POOLS`
        self._virtual: dict[int, str] = {}
        self._own_pools: list[int] = []  # pools of the device that the process has made
        self._held: dict[int, int] = {}  # by handle of virtual memory: its handles and mappings
        self._others: set[int] = set()  # handles of other devices and of other processes
        # by address: bytes of a mapping, and its handle
        self._mapped: dict[int, tuple[int, int]] = {}
        self._last = (0, 0)  # correlation id and address of the last call that was read
        self._failed: Exception | None = None
        self._end: Callable[[], None] | None = None

    def ready(self) -> bool:
        return True

    def start(self, log: MemoryLog, lines: bool) -> str | None:
        self._log, self._lines = log, lines
        self._default = self._trimmed = None  # they may be of a context that is gone
        try:
            if not self._names:
                self._number_calls(imported())
            self._end = CALLBACKS.add(
                "DRIVER_API", self._names, self._called, self._missed, begins=False
            )
        except NotCounted as why:
            return str(why)
        return None

    def _missed(self, why: str) -> None:
        self._own_pools = []  # a handle may be gone, and reading it would crash
        self.note_gap(why)

    def _number_calls(self, cupti: Any) -> None:
        """Find the calls in the installed version: once, for memory is watched again after each
        measurement."""
        numbers = {
            name: int(number) for name, number in cupti.driver_api_trace_cbid.__members__.items()
        }
        self._calls = {numbers[name]: call for name, call in _CALLS.items() if name in numbers}
        self._pools = {number for name, number in numbers.items() if _POOLS.match(name)}
        self._virtual = {
            numbers[name]: name for name in (*_VIRTUAL, *_ARRAYS, *_OWN_POOLS) if name in numbers
        }
        watched = {*self._calls, *self._pools, *self._virtual}
        self._names = tuple(name for name, number in numbers.items() if number in watched)

    def _called(self, cbid: int, address: int) -> None:
        """Report what a call has done, at its end."""
        ended = ApiCall.from_address(address)
        if cbid in self._pools:
            self._nothing = None
        try:
            if ended.failed:
                return
            if cbid in self._calls:
                self._take(self._calls[cbid], ended.parameters, ended.correlation)
                return
            name = self._virtual.get(cbid, "")
            if name in _ARRAYS:
                self._take_array(name, words(ended.parameters, _ARRAYS[name]))
            elif name in _OWN_POOLS:
                self._take_pool(name, words(ended.parameters, _OWN_POOLS[name]))
            elif name:
                self._take_virtual(name, words(ended.parameters, _VIRTUAL[name]))
        except Exception as error:  # which CUPTI would lose
            self._failed = error

    def _take(self, call: _MemoryCall, parameters: int, correlation: int) -> None:
        last = max(call.nbytes or 0, call.stream or 0, *(call.rows or ()))
        values = words(parameters, last + 1)
        address, nbytes = values[0], 0 if call.nbytes is None else values[call.nbytes]
        if call.returned:
            (address,) = words(address, 1)
        if call.rows is not None:
            where, rows = call.rows
            (pitch,) = words(values[where], 1)
            nbytes = pitch * values[rows]
        if (
            not address or (correlation, address) == self._last
        ):  # the latter: a call within the call
            return
        if call.stream is not None and is_captured(values[call.stream]):
            return  # it is a node of a graph, whose memory the driver counts
        # A free is of whatever device; one of another device's memory finds nothing.
        if (
            nbytes
            and call.kind == "device"
            and _known(D.cuPointerGetAttribute(_ORDINAL, address)) != self._index
        ):
            return
        self._last = correlation, address
        self._emit(call.kind, address, nbytes)

    def _take_virtual(self, name: str, values: Sequence[int]) -> None:
        """Count the handles and mappings of virtual memory, whose handle stands for its address.
        Handles of other processes, and those that map memory of several devices, count nothing.
        Once memory from before the watch is mapped, the test's is not read."""
        if name == "cuMemCreate":
            (handle,) = words(values[0], 1)
            kind, device = _LOCATION.unpack(ctypes.string_at(values[2], _LOCATION.size))
            if kind in _ON_HOST or (kind, device) == (_ON_DEVICE, self._index):
                self._others.discard(handle)
                self._held[handle] = 1
                self._emit("pinned" if kind in _ON_HOST else "device", handle, values[1])
            else:
                self._others.add(handle)
        elif name in ("cuMemImportFromShareableHandle", "cuMulticastCreate"):
            (handle,) = words(values[0], 1)
            if handle in self._held:  # the process exported it itself
                self._hold(handle, 1)
            else:
                self._others.add(handle)
        elif name == "cuMemMap":
            self._mapped[values[0]] = values[1], values[3]
            if values[3] not in self._held and values[3] not in self._others:
                self.note_gap("virtual memory was mapped that was created before the watch")
            self._hold(values[3], 1)
        elif name.startswith("cuMemMapArrayAsync"):
            self.note_gap("virtual memory was mapped into a CUDA array")
        elif name == "cuMemRetainAllocationHandle":
            (handle,) = words(values[0], 1)
            self._hold(handle, 1)
        elif name == "cuMemRelease":
            self._others.discard(values[0])  # its number may be given out again
            self._hold(values[0], -1)
        else:
            begin, end = values[0], values[0] + values[1]
            for address in [
                start
                for start, (nbytes, _) in self._mapped.items()
                if begin <= start and start + nbytes <= end
            ]:
                self._hold(self._mapped.pop(address)[1], -1)

    def _take_array(self, name: str, values: Sequence[int]) -> None:
        """Count a CUDA array, whose handle stands for its address."""
        if name.endswith("Destroy"):
            self._hold(values[0], -1)
            return
        (handle,) = words(values[0], 1)
        if name == "cuArrayCreate_v2":
            width, height, form, channels = _ARRAY.unpack(ctypes.string_at(values[1], _ARRAY.size))
            depth, flags, levels = 1, 0, 1
        else:
            width, height, depth, form, channels, flags = _ARRAY3D.unpack(
                ctypes.string_at(values[1], _ARRAY3D.size)
            )
            levels = values[2] & 0xFFFFFFFF if len(values) > 2 else 1
        if form not in _FORMAT_BYTES:
            raise ValueError(f"a CUDA array of the format {form:#x}, whose bytes are not known")
        if flags & _EMPTY or int(_known(D.cuCtxGetDevice())) != self._index:
            return
        elements = sum(
            max(1, width >> level)
            * max(1, height >> level)
            * max(1, depth if flags & _LAYERS else depth >> level)
            for level in range(levels)
        )
        self._held[handle] = 1
        self._emit("device", handle, elements * channels * _FORMAT_BYTES[form])

    def _take_pool(self, name: str, values: Sequence[int]) -> None:
        """Note a stream-ordered pool, whose unused memory counts as reserved."""
        if name == "cuMemPoolDestroy":
            self._own_pools = [handle for handle in self._own_pools if handle != values[0]]
            return
        (pool,) = words(values[0], 1)
        if _LOCATION.unpack(ctypes.string_at(values[1], _LOCATION.size)) == (
            _ON_DEVICE,
            self._index,
        ):
            self._own_pools.append(pool)
            self._nothing = None

    def _hold(self, handle: int, by: int) -> None:
        if handle not in self._held:
            return
        self._held[handle] += by
        if self._held[handle] <= 0:
            del self._held[handle]
            self._emit("device", handle, 0)

    def _emit(self, kind: MemoryPlace, address: int, nbytes: int) -> None:
        """Report an allocation, or a free of no bytes."""
        if self._log is not None:
            line = line_of(sys._getframe(1)) if self._lines and nbytes else NO_LINE
            self._log.emit(
                AllocationEvent(
                    time.perf_counter(), (DRIVER, kind), "driver", address, nbytes, line
                )
            )

    def drain(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:  # of every watch that is open, whichever reads first
            self._missed(f"a call of the driver could not be read: {failed}")

    def figures(self) -> Mapping[Series, Figures]:
        if context_number(self._index) is None:
            return {(DRIVER, "device"): NOTHING, (GRAPHS, "device"): NOTHING}
        if self._nothing is None or self._end is None:
            counts = self._asked()
            self._nothing = (
                counts
                if all((each.used or 0, each.unused) == (0, 0) for each in counts.values())
                else None
            )
            return counts
        return self._nothing

    def _asked(self) -> Mapping[Series, Figures]:
        pool, graphs = R.cudaMemPoolAttr, R.cudaGraphMemAttributeType
        if self._default is None:
            if not has_pools(self._index):  # then graphs cannot allocate either
                return {(DRIVER, "device"): NOTHING, (GRAPHS, "device"): NOTHING}
            self._default = _known(R.cudaDeviceGetDefaultMemPool(self._index))
        current = _known(R.cudaDeviceGetMemPool(self._index))
        pools = list(
            {int(handle): handle for handle in (self._default, current, *self._own_pools)}.values()
        )

        def of_pools(attribute: Any) -> int:
            return sum(
                int(_known(R.cudaMemPoolGetAttribute(handle, attribute))) for handle in pools
            )

        used, reserved = (
            of_pools(pool.cudaMemPoolAttrUsedMemCurrent),
            of_pools(pool.cudaMemPoolAttrReservedMemCurrent),
        )
        in_graphs, graphs_reserved = (
            int(_known(R.cudaDeviceGetGraphMemAttribute(self._index, attribute)))
            for attribute in (
                graphs.cudaGraphMemAttrUsedMemCurrent,
                graphs.cudaGraphMemAttrReservedMemCurrent,
            )
        )
        if self._end is not None:
            ordered = Figures(None, reserved - used)
        else:
            ordered = Figures(
                used, reserved - used, high=of_pools(pool.cudaMemPoolAttrUsedMemHigh), single=False
            )
        return {
            (DRIVER, "device"): ordered,
            (GRAPHS, "device"): Figures(in_graphs, graphs_reserved - in_graphs),
        }

    def settle(self, kept: Sequence[AllocationEvent]) -> bool:
        """Have the driver give back memory that no graph uses any more: it counts as used by graphs
        until then."""
        before = self.figures()[GRAPHS, "device"]
        if before in (NOTHING, self._trimmed):
            return False
        R.cudaDeviceGraphMemTrim(self._index)
        self._nothing = None
        self._trimmed = self.figures()[GRAPHS, "device"]
        return self._trimmed != before

    def alive(self, allocated: AllocationEvent) -> bool:
        if allocated.address in self._held:
            return True
        error, seen = R.cudaPointerGetAttributes(allocated.address)
        return int(error) != 0 or int(seen.type) != 0  # cudaMemoryTypeUnregistered

    def stop(self) -> None:
        self._nothing = None
        self._others.clear()  # handles may be released unseen, and their numbers given out again
        if self._own_pools:
            self._missed(
                "a stream-ordered pool of the test's own lived during a measurement: what it keeps "
                "since then is not known"
            )
        end, self._end = self._end, None
        if end is not None:
            end()


def _known(answer: tuple[Any, ...]) -> Any:
    """The value of a call that cannot fail on an open device."""
    status, value = answer
    if int(status) != 0:
        raise NotCounted(f"the driver does not tell its memory: {status.name}")
    return value
