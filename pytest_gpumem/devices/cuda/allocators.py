"""Ways of allocating whose time is measured, behind the protocol's `Allocator`; and a limit of the device's memory.

A limit is one allocation that holds what is above it, so that the driver itself refuses more, whichever library asks. It is plain device
memory: managed memory could be evicted, and would hold nothing back.
Source: CUDA C++ Programming Guide, Stream Ordered Memory Allocator (release threshold); CUDA Runtime API, page-locked memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, cast

import cupy
import numpy as np
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.checks import below_context, check_allocator
from pytest_gpumem.devices.cuda import nvml
from pytest_gpumem.devices.cuda.errors import check, translated
from pytest_gpumem.devices.cuda.handles import CudaStream
from pytest_gpumem.devices.protocol import Allocator, DeviceError, Stream, Unsupported
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import GiB

_KEEP_ALL = 2**64 - 1
_PAGE = mmap.PAGESIZE
_HOST_FLAGS = runtime.hostAllocPortable | runtime.hostAllocMapped


class _ByDriver:
    """Calls of the driver that allocate and free; `once` makes both. Nothing is kept."""

    def __init__(self, name: str, once: Callable[[int], object]) -> None:
        self._name, self._once = name, once

    def cycle(self, nbytes: int, stream: Stream) -> None:
        with translated(f"allocating {nbytes} bytes by {self._name}"):
            self._once(nbytes)

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
            nbytes,
        )
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
        with (
            translated(f"allocating {nbytes} bytes from CuPy's pool", nbytes),
            cast(CudaStream, stream).cupy,
        ):
            memory = self._pool.malloc(nbytes)
            del memory

    def close(self) -> None:
        self._pool.free_all_blocks()


class _HostRegister:
    """`cudaHostRegister` and `cudaHostUnregister` of memory whose pages exist already."""

    def __init__(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)

    def cycle(self, nbytes: int, stream: Stream) -> None:
        if self._array.nbytes < nbytes + _PAGE:
            self._array = np.full(
                nbytes + _PAGE, 1, dtype=np.uint8
            )  # written, so that its pages exist
        at = int(self._array.__array_interface__["data"][0])
        at += -at % _PAGE
        with translated(f"registering {nbytes} bytes of host memory"):
            runtime.hostRegister(
                at, nbytes, 1 | 2
            )  # cudaHostRegisterPortable | cudaHostRegisterMapped
            runtime.hostUnregister(at)

    def close(self) -> None:
        self._array = np.zeros(0, dtype=np.uint8)


def allocator(name: str, index: int) -> Allocator:
    """The allocator of that name in `ALLOCATORS`, on device `index`.
    Raises `DeviceError`: there is no such name.
    Raises `Unsupported`: the device has no such allocator.
    """
    check_allocator(name)
    made: dict[str, Callable[[], Allocator]] = {
        "cudaMalloc": lambda: _ByDriver(name, lambda nbytes: runtime.free(runtime.malloc(nbytes))),
        "cudaMallocAsync": lambda: _Pool(index, 0),
        "cudaMallocAsync, kept": lambda: _Pool(index, _KEEP_ALL),
        "CuPy pool": _CupyPool,
        "cudaHostAlloc": lambda: _ByDriver(
            name, lambda nbytes: runtime.freeHost(runtime.hostAlloc(nbytes, _HOST_FLAGS))
        ),
        "cudaHostRegister": _HostRegister,
    }
    return made[name]()


_DEVICE_PAGE = 2 * 2**20  # bytes in which the driver hands out device memory


class Ballast:
    """Holds memory of one device; the device must be current when its methods are called."""

    def __init__(self, facts: DeviceFacts) -> None:
        self._facts = facts
        self._address = 0
        self._nbytes = 0

    def limit(self, nbytes: int) -> None:
        """Leave `nbytes` to this process, to 2 MiB. A second limit replaces the first."""
        self.close()
        own = self.in_use()
        if nbytes <= own:
            raise DeviceError(below_context(nbytes, own))
        free, _total = _free_and_total()
        above = free - (nbytes - own)
        if above < 0:
            limit, used, left = (f"{part / GiB:.4g} GiB" for part in (nbytes, own, free))
            raise DeviceError(
                f"a limit of {limit}: this process uses {used}, and only {left} are free"
            )
        if above >= _DEVICE_PAGE:
            self._nbytes = above // _DEVICE_PAGE * _DEVICE_PAGE
            with translated(f"holding back {self._nbytes / GiB:.4g} GiB of device memory"):
                self._address = int(runtime.malloc(self._nbytes))

    def in_use(self) -> int:
        """Bytes that this process uses without the ballast: by NVML; where it does not list the process, all that is in use."""
        used = nvml.bytes_of_this_process(self._facts)
        if used is None:
            free, total = _free_and_total()
            used = total - free
        return used - self._nbytes

    def close(self) -> None:
        """Give the memory back."""
        if self._address:
            address, self._address, self._nbytes = self._address, 0, 0
            runtime.free(address)


def _free_and_total() -> tuple[int, int]:
    with translated("asking for the free memory"):
        free, total = runtime.memGetInfo()
    return int(free), int(total)
