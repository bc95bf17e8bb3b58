"""Ways of allocating whose time is measured.

Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator (release threshold); CUDA
Runtime API, page-locked memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.checks import check_allocator
from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.protocol import Cycle, OutOfMemory, Stream, Unsupported

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


def allocator(name: str, index: int) -> AbstractContextManager[Cycle]:
    """As `DeviceMemory.allocator`."""
    check_allocator(name)
    if name == "cudaMalloc":
        return nullcontext(partial(_cycle, R.cudaMalloc, R.cudaFree))
    if name == "cudaMallocAsync":
        return _pool(index, 0)
    if name == "cudaMallocAsync, kept":
        return _pool(index, 2**64 - 1)
    if name == "CuPy pool":
        return _cupy_pool()
    if name == "cudaHostAlloc":
        return nullcontext(partial(_cycle, _host_alloc, R.cudaFreeHost))
    return _host_register()


def _cycle(
    allocate: Callable[[int], Any], free: Callable[[Any], Any], nbytes: int, stream: Stream
) -> None:
    doing = f"allocating {nbytes} bytes"
    check(free(check(allocate(nbytes), doing)), doing)


def _host_alloc(nbytes: int) -> Any:
    return R.cudaHostAlloc(nbytes, _HOST_FLAGS)


@contextmanager
def _pool(index: int, threshold: int) -> Iterator[Cycle]:
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
def _cupy_pool() -> Iterator[Cycle]:
    """A new pool of CuPy: the default pool's blocks are left alone."""
    try:
        import cupy
    except ImportError:
        raise Unsupported("CuPy is not installed") from None
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
def _host_register() -> Iterator[Cycle]:
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
