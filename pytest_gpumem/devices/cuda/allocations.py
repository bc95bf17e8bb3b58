"""Memory of every kind: allocated, adopted, freed; never more than there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import host
from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, is_sticky, message, translated
from pytest_gpumem.devices.protocol import Allocation, DeviceError, MemoryKind, OutOfMemory
from pytest_gpumem.records.device import DeviceFacts

ALIGNMENT = 256
"""Bytes that every allocation is aligned to; cudaMalloc promises it (CUDA Programming Guide, device memory accesses)."""

RESERVE = 256 * 2**20
"""Bytes of device memory left alone: modules, printf and stack memory, and the libraries' own workspaces come from it."""

_PAGE = 4096

_LARGE = 2**20
"""Bytes from which on the driver starts an allocation on a page of its own."""
_LARGE_ALIGNMENT = 2 * 2**20
_SMALL_ALIGNMENT = 512
_ROOM = 0.25
"""Share of a scattered region that stays empty, so that places are random and not only their order."""
_LEAST_ROOM = 64 * 2**20


@dataclass
class _Region:
    """One `cudaMalloc` that several allocations lie in: it ends with the last of them."""

    address: int
    parts: int


class Allocations:
    """Allocates on one device.

    Device memory comes from `cudaMalloc` and not from CuPy's pool: where a buffer lies changes its speed, and a pool would give the
    same places again.
    """

    def __init__(self, index: int, facts: DeviceFacts) -> None:
        self._index = index
        self._facts = facts

    def allocate(self, nbytes: int, kind: MemoryKind, *, mapped: bool, write_combined: bool) -> Allocation:
        """Allocate. Raises `OutOfMemory` before the driver is asked if less is free, `DeviceError` if the driver refuses."""
        if nbytes <= 0:
            raise DeviceError(f"cannot allocate {nbytes} bytes")
        free = self.free_bytes(kind)
        if nbytes > free and not kind.on_host:
            # References are computed with CuPy, whose pool keeps what they no longer need.
            cupy.get_default_memory_pool().free_all_blocks()
            free = self.free_bytes(kind)
        if nbytes > free:
            raise OutOfMemory(f"{nbytes / 2**30:.3g} GiB of {kind.value} memory asked for, {free / 2**30:.3g} GiB are free")
        with translated(f"allocating {nbytes} bytes of {kind.value} memory"):
            made = self._make(nbytes, kind, mapped, write_combined)
        if (made.address or made.host_address) % ALIGNMENT:
            self.free(made)
            raise DeviceError(f"{kind.value} memory at {made.address or made.host_address:#x} is not aligned to {ALIGNMENT} bytes")
        return made

    def _make(self, nbytes: int, kind: MemoryKind, mapped: bool, write_combined: bool) -> Allocation:
        if kind is MemoryKind.DEVICE:
            return Allocation(kind, nbytes, int(runtime.malloc(nbytes)), 0)
        if kind is MemoryKind.MANAGED:
            address = int(runtime.mallocManaged(nbytes))
            return Allocation(kind, nbytes, address, address)
        if kind is MemoryKind.PINNED:
            flags = runtime.hostAllocPortable
            flags |= runtime.hostAllocMapped if mapped else 0
            flags |= runtime.hostAllocWriteCombined if write_combined else 0
            at = int(runtime.hostAlloc(nbytes, flags))
            return Allocation(kind, nbytes, self._device_address(at) if mapped else 0, at)
        # Whole pages of its own, so that no other registration shares one.
        pages = -(-nbytes // _PAGE) * _PAGE
        raw = np.empty(pages + _PAGE, dtype=np.uint8)
        start = -_address(raw) % _PAGE
        return self._over(raw[start : start + pages], nbytes, register=kind is MemoryKind.REGISTERED)

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        """Allocations at random places of one region: one call of the driver, where each of its own takes a tenth of a millisecond."""
        places, nbytes = scattered(sizes, seed)
        whole = self.allocate(nbytes, MemoryKind.DEVICE, mapped=True, write_combined=False)
        region = _Region(whole.address, len(sizes))
        return [
            Allocation(MemoryKind.DEVICE, size, whole.address + place, 0, backing=region) for size, place in zip(sizes, places, strict=True)
        ]

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        """An allocation over a NumPy array's memory, which the array keeps. Raises `DeviceError` for one that cannot be."""
        if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or not array.flags.writeable or array.nbytes == 0:
            raise DeviceError("only a writable, C-contiguous NumPy array with elements can be used as host memory")
        with translated(f"registering {array.nbytes} bytes of host memory"):
            return self._over(array, array.nbytes, register=register)

    def _over(self, array: Any, nbytes: int, *, register: bool) -> Allocation:
        at = _address(array)
        if not register:
            return Allocation(MemoryKind.PAGEABLE, nbytes, 0, at, backing=array)
        runtime.hostRegister(at, array.nbytes, 1 | 2)  # cudaHostRegisterPortable | cudaHostRegisterMapped
        return Allocation(MemoryKind.REGISTERED, nbytes, self._device_address(at), at, backing=array)

    def _device_address(self, at: int) -> int:
        return int(runtime.pointerGetAttributes(at).devicePointer) if self._facts.can_map_host else 0

    def free(self, allocation: Allocation) -> None:
        """Free or unregister; a second call does nothing. Memory of a lost context went with it."""
        if allocation.freed:
            return
        allocation.freed = True
        address = allocation.address
        if isinstance(allocation.backing, _Region):
            allocation.backing.parts -= 1
            if allocation.backing.parts:
                return
            address = allocation.backing.address
        try:
            if allocation.kind in (MemoryKind.DEVICE, MemoryKind.MANAGED):
                runtime.free(address)
            elif allocation.kind is MemoryKind.PINNED:
                runtime.freeHost(allocation.host_address)
            elif allocation.kind is MemoryKind.REGISTERED:
                runtime.hostUnregister(allocation.host_address)
        except CUPY_ERRORS as error:
            if not is_sticky(error):
                raise DeviceError(message(error.status, str(error), f"freeing {allocation.kind.value} memory")) from error
        finally:
            allocation.backing = None

    def free_bytes(self, kind: MemoryKind) -> int:
        """Bytes that can still be allocated. Managed memory never beyond what the device has free: oversubscription can hang a GPU."""
        if kind is MemoryKind.PAGEABLE:
            return host.available_bytes()
        if kind.on_host:
            return int(host.available_bytes() * host.PINNED_SHARE)
        with translated("asking for the free memory"):
            free, _total = runtime.memGetInfo()
        return max(0, int(free) - RESERVE)

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        """A one-dimensional array: CuPy over memory that the device sees, else NumPy."""
        if allocation.freed:
            raise DeviceError(f"this {allocation.kind.value} memory is freed")
        if size * np.dtype(dtype).itemsize > allocation.nbytes:
            raise DeviceError(f"{size} elements of {dtype} do not fit in {allocation.nbytes} bytes")
        if not allocation.address:
            return host.array(allocation, dtype, size)
        memory = cupy.cuda.UnownedMemory(allocation.address, allocation.nbytes, allocation, self._index)
        return cupy.ndarray((size,), dtype=np.dtype(dtype), memptr=cupy.cuda.MemoryPointer(memory, 0))


def scattered(sizes: Sequence[int], seed: int) -> tuple[list[int], int]:
    """Offsets of blocks of `sizes` bytes in a random order with random gaps between, and the bytes of the region that holds them."""
    random = np.random.default_rng(seed)
    alignment = _LARGE_ALIGNMENT if max(sizes) >= _LARGE else _SMALL_ALIGNMENT
    slots = [-(-size // alignment) for size in sizes]
    room = max(int(sum(slots) * _ROOM), _LEAST_ROOM // alignment)
    gaps = np.diff(np.sort(random.integers(0, room + 1, len(sizes))), prepend=0)
    offsets, at = [0] * len(sizes), 0
    for which, gap in zip(random.permutation(len(sizes)), gaps, strict=True):
        at += int(gap)
        offsets[which] = at * alignment
        at += slots[which]
    return offsets, (sum(slots) + room) * alignment


def _address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])
