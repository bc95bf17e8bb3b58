"""Memory of every kind, never more than there is, and the ways of allocating that are measured.

Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator (release threshold).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import numpy as np
from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda import places
from pytest_gpumem.devices.cuda.context import LEGACY_DEFAULT, Context, check
from pytest_gpumem.devices.cuda.guests import arrays
from pytest_gpumem.devices.cuda.places import malloc_managed, on_gpu
from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    Allocation,
    AllocFree,
    DeviceError,
    DeviceMemory,
    OutOfMemory,
    Stream,
    Unsupported,
    check_free,
    check_oversubscription,
)
from pytest_gpumem.records.device import DeviceFacts

RESERVE = 256 * 2**20
"""Bytes of device memory left alone, for modules and workspaces; a quarter of less than 1 GiB."""

_LARGE = 2**20  # bytes from which on the driver starts an allocation on a page of its own
_LARGE_ALIGNMENT = 2 * 2**20
_SMALL_ALIGNMENT = 512
_ROOM = 0.25  # share of a region that stays empty, so that places are random, not only the order
_LEAST_ROOM = 64 * 2**20
SCRUB_RATE = 250e9
"""Assumed rate at which the driver scrubs freed device memory, in bytes per second."""
SCRUB_SHARE = 0.075
"""The same as a share of the peak bandwidth, where that gives less, as on smaller cards."""
_SPARE_SHARE = 3  # a region is kept if it takes no more than this part of the device's memory
_LEAST_REGION = 20 * 2**30  # bytes of a region: a larger set of buffers finds room in it
_LEAST_SHARE = 5
"""Such a region takes no more than this part of the memory, and stays beside other libraries."""
_PAGE = mmap.PAGESIZE
_HOST_FLAGS = R.cudaHostAllocPortable | R.cudaHostAllocMapped
_REGISTER_FLAGS = R.cudaHostRegisterPortable | R.cudaHostRegisterMapped


class CudaMemory:
    """Allocates by `cudaMalloc`: a pool would give the same places again."""

    def __init__(self, context: Context, facts: DeviceFacts) -> None:
        self._context = context
        self._index = context.index
        self._facts = facts
        self._spare: Allocation | None = None
        """A region that nothing lies in: a free would be scrubbed beside the next measurement."""
        self._scrubbed = 0.0  # when what was freed will be scrubbed, by `time.monotonic`
        self._locked = 0  # bytes that are page-locked
        self._allocated: dict[int, Allocation] = {}
        """By where it starts. Where it ends is known here alone: the driver rounds sizes up."""

    @cached_property
    def peer(self) -> int:
        """The GPU of peer memory. Raises `Unsupported` where there is one GPU."""
        return places.peer_of(self._index)

    def allocate(
        self,
        nbytes: int,
        kind: MemoryKind,
        *,
        mapped: bool = True,
        write_combined: bool = False,
        portable: bool = True,
    ) -> Allocation:
        free = self.free_bytes(kind)
        if not kind.beyond_link and nbytes > free - self._spare_bytes(kind):
            self._empty_pools()
            self.make_room()
            free = self.free_bytes(kind)
        check_free(nbytes, kind, free)
        flags = R.cudaHostAllocPortable if portable else R.cudaHostAllocDefault
        if mapped:
            flags |= R.cudaHostAllocMapped
        if write_combined:
            flags |= R.cudaHostAllocWriteCombined
        made = self._make(nbytes, kind, flags)
        for start in _starts(made):
            self._allocated[start] = made
        return made

    def _make(self, nbytes: int, kind: MemoryKind, flags: int) -> Allocation:
        doing = f"allocating {nbytes} bytes of {kind.value} memory"
        if kind is MemoryKind.DEVICE:
            return Allocation(kind, nbytes, int(check(R.cudaMalloc(nbytes), doing)), 0)
        if kind is MemoryKind.POOLED:
            check_pools(self._index)
            address = int(check(R.cudaMallocAsync(nbytes, LEGACY_DEFAULT), doing))
            # other streams may use it from now on
            check(R.cudaStreamSynchronize(LEGACY_DEFAULT), doing)
            return Allocation(kind, nbytes, address, 0)
        if kind is MemoryKind.PEER:
            with on_gpu(self.peer):
                return Allocation(kind, nbytes, int(check(R.cudaMalloc(nbytes), doing)), 0)
        if kind is MemoryKind.MANAGED:
            address = malloc_managed(nbytes, doing)
            return Allocation(kind, nbytes, address, address)
        if kind is MemoryKind.PINNED:
            at = int(check(R.cudaHostAlloc(nbytes, flags), doing))
            address = self._device_address(at) if flags & R.cudaHostAllocMapped else 0
            self._locked += nbytes
            return Allocation(kind, nbytes, address, at)
        raise Unsupported(f"{kind.value} memory is of an array, and adopted")

    def scatter(self, sizes: Sequence[int], seed: int) -> list[Allocation]:
        # One call of the driver: each takes a tenth of a millisecond.
        region = self._region(needed_bytes(sizes))
        region.backing = len(sizes)  # blocks that lie in it
        blocks = []
        for size, offset in zip(sizes, scattered(sizes, region.nbytes, seed), strict=True):
            address = region.address + offset
            blocks.append(Allocation(MemoryKind.DEVICE, size, address, 0, backing=region))
        return blocks

    def _region(self, nbytes: int) -> Allocation:
        if self._spare is not None and self._spare.nbytes >= nbytes:
            spare, self._spare = self._spare, None
            return spare
        self.make_room()
        roomy = min(
            _LEAST_REGION,
            self._facts.memory_bytes // _LEAST_SHARE,
            self.free_bytes(MemoryKind.DEVICE) // 2,
        )
        size = max(nbytes, roomy // _LARGE_ALIGNMENT * _LARGE_ALIGNMENT)
        return self.allocate(size, MemoryKind.DEVICE)

    def _empty_pools(self) -> None:
        """Have CuPy and PyTorch give back what their pools keep."""
        import cupy

        before = self._free_now()
        cupy.get_default_memory_pool().free_all_blocks()
        torch = arrays.usable_torch()
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self._to_scrub(max(0, self._free_now() - before))

    def _free_now(self) -> int:
        free, _total = check(R.cudaMemGetInfo(), "asking for the free memory")
        return int(free)

    def make_room(self, *, unless_free: float = 1.0) -> bool:
        spare = self._spare
        if spare is None or self._free_now() >= unless_free * self._facts.memory_bytes:
            return False
        self._spare = None
        self._give_back(spare.address, spare.nbytes)
        return True

    def _give_back(self, address: int, nbytes: int) -> None:
        self._allocated.pop(address, None)
        check(R.cudaFree(address), "freeing device memory")
        self._to_scrub(nbytes)

    def _to_scrub(self, nbytes: int) -> None:
        rate = min(SCRUB_RATE, SCRUB_SHARE * (self._facts.dram_peak or SCRUB_RATE / SCRUB_SHARE))
        self._scrubbed = max(self._scrubbed, time.monotonic()) + nbytes / rate

    def settle(self) -> None:
        left = self._scrubbed - time.monotonic()
        if left > 0:
            time.sleep(left)

    def adopt(self, array: Any, *, register: bool) -> Allocation:
        at, nbytes = int(array.__array_interface__["data"][0]), array.nbytes
        if not register:
            return Allocation(MemoryKind.PAGEABLE, nbytes, 0, at, backing=array)
        doing = f"registering {nbytes} bytes of host memory"
        check(R.cudaHostRegister(at, nbytes, _REGISTER_FLAGS), doing)
        address = self._device_address(at)
        self._locked += nbytes
        return Allocation(MemoryKind.REGISTERED, nbytes, address, at, backing=array)

    def oversubscribe(self, nbytes: int) -> Allocation:
        check_oversubscription(nbytes, places.host_bytes()[1])
        return self._make(nbytes, MemoryKind.MANAGED, 0)

    def allocator(self, name: str) -> AbstractContextManager[AllocFree]:
        if name == "cudaMalloc":
            return nullcontext(partial(_cycle, R.cudaMalloc, R.cudaFree))
        if name == "cudaMallocAsync":
            return _pool(self._index, 0)
        if name == "cudaMallocAsync, kept":
            return _pool(self._index, 2**64 - 1)
        if name == "CuPy pool":
            return _cupy_pool()
        if name == "cudaHostAlloc":
            return nullcontext(partial(_cycle, _host_alloc, R.cudaFreeHost))
        return _host_register()

    def near_host(self, node: int | None = None) -> AbstractContextManager[int | None]:
        return places.on_node(places.nearest_node(self._index) if node is None else node)

    def host(self) -> tuple[int, int]:
        return places.host_bytes()[0], self._locked

    def kind_at(self, address: int) -> MemoryKind | None:
        begin = max((start for start in self._allocated if start <= address), default=None)
        below = None
        if begin is not None:
            end = begin + self._allocated[begin].nbytes
            below = (begin, end) if address >= end else None
        return places.memory_kind(address, self._index, below)

    def _device_address(self, at: int) -> int:
        if not self._facts.can_map_host:
            return 0
        doing = "asking for the device's address of host memory"
        return int(check(R.cudaPointerGetAttributes(at), doing).devicePointer)

    def free(self, allocation: Allocation) -> None:
        if allocation.freed:
            return
        allocation.freed = True
        backing, allocation.backing = allocation.backing, None
        if allocation.kind.locked:
            self._locked -= allocation.nbytes
        if self._context.gone() is not None:  # its memory went with it
            return
        if isinstance(backing, Allocation):
            self._left(backing)
            return
        for start in _starts(allocation):
            self._allocated.pop(start, None)
        self._free(allocation)

    def _free(self, allocation: Allocation) -> None:
        kind, doing = allocation.kind, f"freeing {allocation.kind.value} memory"
        if kind is MemoryKind.POOLED:  # the driver's pool keeps it: nothing is scrubbed
            check(R.cudaFree(allocation.address), doing)
        elif not kind.beyond_link:
            self._give_back(allocation.address, allocation.nbytes)
        elif kind.on_peer:
            with on_gpu(self.peer):
                check(R.cudaFree(allocation.address), doing)
        elif kind.locked and kind.adopted:
            check(R.cudaHostUnregister(allocation.host_address), doing)
        elif kind.locked:
            check(R.cudaFreeHost(allocation.host_address), doing)

    def _left(self, region: Allocation) -> None:
        """Count a block less; keep an empty region that is larger than the spare one, but small."""
        region.backing -= 1
        if region.backing:
            return
        least = self._spare_bytes(MemoryKind.DEVICE)
        if least < region.nbytes <= self._facts.memory_bytes // _SPARE_SHARE:
            self.make_room(unless_free=float("inf"))
            self._spare = region
        else:
            self._give_back(region.address, region.nbytes)

    def free_bytes(self, kind: MemoryKind) -> int:
        if kind.on_host:
            return places.host_bytes()[1]
        if kind.on_peer:
            with on_gpu(self.peer):
                return max(0, self._free_now() - RESERVE)
        # Managed memory never goes beyond what the device has free: that can hang a GPU.
        free = self._free_now()
        return free - min(RESERVE, free // 4) + self._spare_bytes(kind)

    def free_without_ours(self) -> int:
        allocated = self._allocated.values()
        ours = sum(made.nbytes for made in allocated if made.kind is MemoryKind.DEVICE)
        return self._free_now() + ours

    def _spare_bytes(self, kind: MemoryKind) -> int:
        """Bytes that count as free, in the spare region."""
        return self._spare.nbytes if self._spare is not None and kind.on_device else 0

    def view(self, allocation: Allocation, dtype: str, size: int) -> Any:
        if allocation.freed:
            raise DeviceError(f"this {allocation.kind.value} memory is freed")
        if not allocation.address:
            return places.array(allocation, dtype, size)
        index = self.peer if allocation.kind.on_peer else self._index
        import cupy  # an array for the user's code

        memory = cupy.cuda.UnownedMemory(allocation.address, allocation.nbytes, allocation, index)
        pointer = cupy.cuda.MemoryPointer(memory, 0)
        return cupy.ndarray((size,), dtype=np.dtype(dtype), memptr=pointer)

    def guest(self, allocation: Allocation, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        return arrays.guest(self.view, allocation, dtype, shape, like)


def needed_bytes(sizes: Sequence[int]) -> int:
    """The bytes of a region in which blocks lie at random."""
    alignment = _alignment(sizes)
    slots = sum(-(-size // alignment) for size in sizes)
    return (slots + max(int(slots * _ROOM), _LEAST_ROOM // alignment)) * alignment


def scattered(sizes: Sequence[int], region: int, seed: int) -> list[int]:
    """Offsets of blocks in a region: a random order, random gaps, no overlap."""
    random, alignment = np.random.default_rng(seed), _alignment(sizes)
    slots = [-(-size // alignment) for size in sizes]
    room = region // alignment - sum(slots)
    gaps = np.diff(np.sort(random.integers(0, room + 1, len(sizes))), prepend=0)
    offsets, at = [0] * len(sizes), 0
    for which, gap in zip(random.permutation(len(sizes)), gaps, strict=True):
        at += int(gap)
        offsets[which] = at * alignment
        at += slots[which]
    return offsets


def _alignment(sizes: Sequence[int]) -> int:
    return _LARGE_ALIGNMENT if max(sizes) >= _LARGE else _SMALL_ALIGNMENT


def _starts(allocation: Allocation) -> set[int]:
    return {allocation.address, allocation.host_address} - {0}


_: type[DeviceMemory] = CudaMemory


# Ways of allocating


def has_pools(index: int) -> bool:
    attribute = R.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported
    error, supported = R.cudaDeviceGetAttribute(attribute, index)
    return int(error) == 0 and bool(supported)


def check_pools(index: int) -> None:
    """Raises `Unsupported`: the device has no stream-ordered memory pools."""
    if not has_pools(index):
        raise Unsupported(
            "the device has no stream-ordered memory pools (cudaDevAttrMemoryPoolsSupported is 0)"
        )


def _cycle(
    allocate: Callable[[int], Any], free: Callable[[Any], Any], nbytes: int, stream: Stream
) -> None:
    doing = f"allocating {nbytes} bytes"
    check(free(check(allocate(nbytes), doing)), doing)


def _host_alloc(nbytes: int) -> Any:
    return R.cudaHostAlloc(nbytes, _HOST_FLAGS)


@contextmanager
def _pool(index: int, threshold: int) -> Iterator[AllocFree]:
    """A new stream-ordered pool, in which `threshold` bytes stay across synchronisations."""
    check_pools(index)
    properties = R.cudaMemPoolProps()
    properties.allocType = R.cudaMemAllocationType.cudaMemAllocationTypePinned
    properties.location.type = R.cudaMemLocationType.cudaMemLocationTypeDevice
    properties.location.id = index
    pool: Any = check(R.cudaMemPoolCreate(properties), "creating a memory pool")

    def cycle(nbytes: int, stream: Stream) -> None:
        doing = f"allocating {nbytes} bytes from a pool"
        address = check(R.cudaMallocFromPoolAsync(nbytes, pool, stream.handle), doing)
        check(R.cudaFreeAsync(address, stream.handle), doing)

    try:
        attribute = R.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        kept = R.cudaMemPoolSetAttribute(pool, attribute, D.cuuint64_t(threshold))
        check(kept, "setting a pool's release threshold")
        yield cycle
    finally:
        check(R.cudaMemPoolDestroy(pool), "destroying a memory pool")


@contextmanager
def _cupy_pool() -> Iterator[AllocFree]:
    """A new pool of CuPy: the default pool's blocks are left alone."""
    import cupy

    pool = cupy.cuda.MemoryPool()

    def cycle(nbytes: int, stream: Stream) -> None:
        try:
            with cupy.cuda.Stream.from_external(stream):
                memory = pool.malloc(nbytes)
                del memory
        except cupy.cuda.memory.OutOfMemoryError as error:
            raise OutOfMemory(f"allocating {nbytes} bytes from CuPy's pool: {error}") from error

    yield cycle
    pool.free_all_blocks()


@contextmanager
def _host_register() -> Iterator[AllocFree]:
    """Page-locking of memory whose pages exist already."""
    array = np.zeros(0, dtype=np.uint8)

    def cycle(nbytes: int, stream: Stream) -> None:
        nonlocal array
        if array.nbytes < nbytes + _PAGE:
            array = np.full(nbytes + _PAGE, 1, dtype=np.uint8)  # written: its pages exist
        at = int(array.ctypes.data)
        at += -at % _PAGE
        doing = f"registering {nbytes} bytes of host memory"
        check(R.cudaHostRegister(at, nbytes, _REGISTER_FLAGS), doing)
        check(R.cudaHostUnregister(at), doing)

    yield cycle
