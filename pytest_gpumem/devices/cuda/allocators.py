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
from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.protocol import Allocator, DeviceError, OutOfMemory, Stream, Unsupported

_KEEP_ALL = 2**64 - 1
_PAGE = mmap.PAGESIZE
_HOST_FLAGS = R.cudaHostAllocPortable | R.cudaHostAllocMapped
_REGISTER_FLAGS = R.cudaHostRegisterPortable | R.cudaHostRegisterMapped


class _ByDriver:
    """A call of the driver that allocates, and one that frees. Nothing is kept."""

    def __init__(
        self, name: str, allocate: Callable[[int], Any], free: Callable[[Any], Any]
    ) -> None:
        self._name, self._allocate, self._free = name, allocate, free

    def cycle(self, nbytes: int, stream: Stream) -> None:
        doing = f"allocating {nbytes} bytes by {self._name}"
        check(self._free(check(self._allocate(nbytes), doing)), doing)

    def close(self) -> None:
        """Nothing is kept."""


def has_pools(index: int) -> bool:
    """True if a device has stream-ordered memory pools."""
    error, supported = R.cudaDeviceGetAttribute(
        R.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported, index
    )
    return int(error) == 0 and bool(supported)


def check_pools(index: int) -> None:
    """Check that a device has stream-ordered memory pools. Raises `Unsupported`: it has none."""
    if not has_pools(index):
        raise Unsupported(
            "the device has no stream-ordered memory pools (cudaDevAttrMemoryPoolsSupported is 0)"
        )


class _Pool:
    """A stream-ordered pool of its own; `threshold` bytes stay in it across synchronisations."""

    def __init__(self, index: int, threshold: int) -> None:
        check_pools(index)
        properties = R.cudaMemPoolProps()
        properties.allocType = R.cudaMemAllocationType.cudaMemAllocationTypePinned
        properties.location.type = R.cudaMemLocationType.cudaMemLocationTypeDevice
        properties.location.id = index
        self._pool: Any = check(R.cudaMemPoolCreate(properties), "creating a memory pool")
        attribute = R.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
        try:
            check(
                R.cudaMemPoolSetAttribute(self._pool, attribute, D.cuuint64_t(threshold)),
                "setting a pool's release threshold",
            )
        except DeviceError:
            self.close()
            raise

    def cycle(self, nbytes: int, stream: Stream) -> None:
        handle = stream.handle
        address = check(
            R.cudaMallocFromPoolAsync(nbytes, self._pool, handle),
            f"allocating {nbytes} bytes from a pool",
        )
        check(R.cudaFreeAsync(address, handle), "freeing memory of a pool")

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            check(R.cudaMemPoolDestroy(pool), "destroying a memory pool")


class _CupyPool:
    """CuPy's pool: a new one, so that the default pool's blocks are left alone. Raises
    `Unsupported`: CuPy is not installed."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError:
            raise Unsupported("CuPy is not installed") from None
        self._cupy: Any = cupy
        self._pool = cupy.cuda.MemoryPool()

    def cycle(self, nbytes: int, stream: Stream) -> None:
        try:
            with self._cupy.cuda.Stream.from_external(stream):
                memory = self._pool.malloc(nbytes)
                del memory
        except self._cupy.cuda.memory.OutOfMemoryError as error:
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
        at = int(self._array.__array_interface__["data"][0])
        at += -at % _PAGE
        doing = f"registering {nbytes} bytes of host memory"
        check(R.cudaHostRegister(at, nbytes, _REGISTER_FLAGS), doing)
        check(R.cudaHostUnregister(at), doing)

    def close(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)


def _host_alloc(nbytes: int) -> Any:
    return R.cudaHostAlloc(nbytes, _HOST_FLAGS)


def allocator(name: str, index: int) -> Allocator:
    """The allocator of that name in `ALLOCATORS`, on device `index`.
    Raises `DeviceError`: there is no such name.
    Raises `Unsupported`: the device has no such allocator.
    """
    check_allocator(name)
    made: dict[str, Callable[[], Allocator]] = {
        "cudaMalloc": lambda: _ByDriver(name, R.cudaMalloc, R.cudaFree),
        "cudaMallocAsync": lambda: _Pool(index, 0),
        "cudaMallocAsync, kept": lambda: _Pool(index, _KEEP_ALL),
        "CuPy pool": _CupyPool,
        "cudaHostAlloc": lambda: _ByDriver(name, _host_alloc, R.cudaFreeHost),
        "cudaHostRegister": _HostRegister,
    }
    return made[name]()
