"""Ways of allocating whose time is measured: one class for each, behind the protocol's `Allocator`.

Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator (release threshold); CUDA Runtime API, page-locked memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import cupy
import numpy as np
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda.errors import check, translated
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.protocol import ALLOCATORS, Allocator, DeviceError, Stream, Unsupported

_KEEP_ALL = 2**64 - 1
_PAGE = 4096


class _Malloc:
    """`cudaMalloc` and `cudaFree`, which waits for the device."""

    def cycle(self, nbytes: int, stream: Stream) -> None:
        with translated(f"allocating {nbytes} bytes by cudaMalloc"):
            runtime.free(runtime.malloc(nbytes))

    def close(self) -> None:
        """Keeps nothing."""


class _Pool:
    """A stream-ordered pool of its own; `threshold` bytes stay in it across synchronisations."""

    def __init__(self, index: int, threshold: int) -> None:
        error, supported = R.cudaDeviceGetAttribute(R.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported, index)
        if int(error) != 0 or not supported:
            raise Unsupported("the device has no stream-ordered memory pools (cudaDevAttrMemoryPoolsSupported is 0)")
        properties = R.cudaMemPoolProps()
        properties.allocType = R.cudaMemAllocationType.cudaMemAllocationTypePinned
        properties.location.type = R.cudaMemLocationType.cudaMemLocationTypeDevice
        properties.location.id = index
        self._pool: Any = check(R.cudaMemPoolCreate(properties), "creating a memory pool")
        attribute = R.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        try:
            check(R.cudaMemPoolSetAttribute(self._pool, attribute, D.cuuint64_t(threshold)), "setting a pool's release threshold")
        except DeviceError:
            self.close()
            raise

    def cycle(self, nbytes: int, stream: Stream) -> None:
        handle = stream.handle
        address = check(R.cudaMallocFromPoolAsync(nbytes, self._pool, handle), f"allocating {nbytes} bytes from a pool")
        check(R.cudaFreeAsync(address, handle), "freeing memory of a pool")

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            check(R.cudaMemPoolDestroy(pool), "destroying a memory pool")


class _CupyPool:
    """CuPy's pool: a new one, so that the default pool's blocks are left alone."""

    def __init__(self) -> None:
        self._pool = cupy.cuda.MemoryPool()

    def cycle(self, nbytes: int, stream: Stream) -> None:
        with translated(f"allocating {nbytes} bytes from CuPy's pool"), cast(CudaStream, stream).cupy:
            memory = self._pool.malloc(nbytes)
            del memory

    def close(self) -> None:
        self._pool.free_all_blocks()


class _HostAlloc:
    """`cudaHostAlloc` and `cudaFreeHost`."""

    def cycle(self, nbytes: int, stream: Stream) -> None:
        with translated(f"allocating {nbytes} bytes by cudaHostAlloc"):
            runtime.freeHost(runtime.hostAlloc(nbytes, runtime.hostAllocPortable | runtime.hostAllocMapped))

    def close(self) -> None:
        """Keeps nothing."""


class _HostRegister:
    """`cudaHostRegister` and `cudaHostUnregister` of memory whose pages exist already."""

    def __init__(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)

    def cycle(self, nbytes: int, stream: Stream) -> None:
        if self._array.nbytes < nbytes + _PAGE:
            self._array = np.full(nbytes + _PAGE, 1, dtype=np.uint8)  # written, so that its pages exist
        at = int(self._array.__array_interface__["data"][0])
        at += -at % _PAGE
        with translated(f"registering {nbytes} bytes of host memory"):
            runtime.hostRegister(at, nbytes, 1 | 2)  # cudaHostRegisterPortable | cudaHostRegisterMapped
            runtime.hostUnregister(at)

    def close(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)


def allocator(name: str, index: int) -> Allocator:
    """The allocator of that name in `ALLOCATORS`, on device `index`.

    Raises:
        DeviceError: there is no such name.
        Unsupported: the device has no such allocator.
    """
    made: dict[str, Callable[[], Allocator]] = {
        "cudaMalloc": _Malloc,
        "cudaMallocAsync": lambda: _Pool(index, 0),
        "cudaMallocAsync, kept": lambda: _Pool(index, _KEEP_ALL),
        "CuPy pool": _CupyPool,
        "cudaHostAlloc": _HostAlloc,
        "cudaHostRegister": _HostRegister,
    }
    if name not in made:
        raise DeviceError(f"no allocator {name!r}; there are: {', '.join(ALLOCATORS)}")
    return made[name]()
