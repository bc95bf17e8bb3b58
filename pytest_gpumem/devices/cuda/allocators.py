"""Ways of allocating whose time is measured, behind the protocol's `Allocator`.

Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator (release threshold); CUDA
Runtime API, page-locked memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.checks import check_allocator
from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.protocol import Allocator, OutOfMemory, Stream, Unsupported

_PAGE = mmap.PAGESIZE
_HOST_FLAGS = R.cudaHostAllocPortable | R.cudaHostAllocMapped
_REGISTER_FLAGS = R.cudaHostRegisterPortable | R.cudaHostRegisterMapped


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


class _Calls:
    """A call of the runtime that allocates, and another that frees."""

    def __init__(self, allocate: Callable[[int], Any], free: Callable[[Any], Any]) -> None:
        self._allocate, self._free = allocate, free

    def cycle(self, nbytes: int, stream: Stream) -> None:
        doing = f"allocating {nbytes} bytes"
        check(self._free(check(self._allocate(nbytes), doing)), doing)

    def close(self) -> None:
        """Nothing is kept."""


class _Pool:
    """A new stream-ordered pool, in which `threshold` bytes stay across synchronisations."""

    def __init__(self, index: int, threshold: int) -> None:
        check_pools(index)
        properties = R.cudaMemPoolProps()
        properties.allocType = R.cudaMemAllocationType.cudaMemAllocationTypePinned
        properties.location.type = R.cudaMemLocationType.cudaMemLocationTypeDevice
        properties.location.id = index
        self._pool: Any = check(R.cudaMemPoolCreate(properties), "creating a memory pool")
        attribute = R.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        kept = R.cudaMemPoolSetAttribute(self._pool, attribute, D.cuuint64_t(threshold))
        check(kept, "setting a pool's release threshold")

    def cycle(self, nbytes: int, stream: Stream) -> None:
        doing = f"allocating {nbytes} bytes from a pool"
        address = check(R.cudaMallocFromPoolAsync(nbytes, self._pool, stream.handle), doing)
        check(R.cudaFreeAsync(address, stream.handle), doing)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            check(R.cudaMemPoolDestroy(pool), "destroying a memory pool")


class _CupyPool:
    """A new pool of CuPy: the default pool's blocks are left alone."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError:
            raise Unsupported("CuPy is not installed") from None
        self._cuda: Any = cupy.cuda
        self._pool = cupy.cuda.MemoryPool()

    def cycle(self, nbytes: int, stream: Stream) -> None:
        try:
            with self._cuda.Stream.from_external(stream):
                memory = self._pool.malloc(nbytes)
                del memory
        except self._cuda.memory.OutOfMemoryError as error:
            raise OutOfMemory(f"allocating {nbytes} bytes from CuPy's pool: {error}") from error

    def close(self) -> None:
        self._pool.free_all_blocks()


class _HostRegister:
    """`cudaHostRegister` and `cudaHostUnregister` of memory whose pages exist already."""

    def __init__(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)

    def cycle(self, nbytes: int, stream: Stream) -> None:
        if self._array.nbytes < nbytes + _PAGE:
            # written, so that its pages exist
            self._array = np.full(nbytes + _PAGE, 1, dtype=np.uint8)
        at = int(self._array.ctypes.data)
        at += -at % _PAGE
        doing = f"registering {nbytes} bytes of host memory"
        check(R.cudaHostRegister(at, nbytes, _REGISTER_FLAGS), doing)
        check(R.cudaHostUnregister(at), doing)

    def close(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)


def _host_alloc(nbytes: int) -> Any:
    return R.cudaHostAlloc(nbytes, _HOST_FLAGS)


def allocator(name: str, index: int) -> Allocator:
    """Return the allocator of a name in `ALLOCATORS`. Raises as `DeviceMemory.allocator`."""
    check_allocator(name)
    if name == "cudaMalloc":
        return _Calls(R.cudaMalloc, R.cudaFree)
    if name == "cudaMallocAsync":
        return _Pool(index, 0)
    if name == "cudaMallocAsync, kept":
        return _Pool(index, 2**64 - 1)
    if name == "CuPy pool":
        return _CupyPool()
    if name == "cudaHostAlloc":
        return _Calls(_host_alloc, R.cudaFreeHost)
    return _HostRegister()
