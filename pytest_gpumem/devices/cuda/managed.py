"""Prefetching managed memory under CUDA 12 and 13, which name a place in different ways."""

from __future__ import annotations

from typing import Any

import cuda.bindings
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.streams import CudaStream
from pytest_gpumem.devices.protocol import Allocation, DeviceError, MemoryKind, Unsupported
from pytest_gpumem.records.device import DeviceFacts

_BINDINGS_MAJOR = int(cuda.bindings.__version__.split(".", 1)[0])
_CPU = -1  # cudaCpuDeviceId


def prefetch(allocation: Allocation, index: int, to_host: bool, stream: CudaStream, facts: DeviceFacts) -> None:
    """Queue `cudaMemPrefetchAsync` to device `index` or to the host.

    Raises:
        Unsupported: the device has no `concurrentManagedAccess`: its pages move as a whole at a launch.
    """
    if allocation.kind is not MemoryKind.MANAGED:
        raise DeviceError(f"only managed memory can be prefetched, not {allocation.kind.value}")
    if not facts.concurrent_managed_access:
        raise Unsupported(f"{facts.name} has no concurrentManagedAccess here: managed memory cannot be prefetched")
    arguments = place(R, _BINDINGS_MAJOR, index, to_host)
    check(
        R.cudaMemPrefetchAsync(allocation.address, allocation.nbytes, *arguments, stream.handle),
        f"prefetching {allocation.nbytes} bytes to the {'host' if to_host else 'device'}",
    )


def place(bindings: Any, major: int, index: int, to_host: bool) -> tuple[Any, ...]:
    """The middle arguments of `cudaMemPrefetchAsync`: a device number (CUDA 12), or a location and flags (CUDA 13)."""
    if major < 13:
        return (_CPU if to_host else index,)
    location = bindings.cudaMemLocation()
    kinds = bindings.cudaMemLocationType
    location.type = kinds.cudaMemLocationTypeHost if to_host else kinds.cudaMemLocationTypeDevice
    location.id = 0 if to_host else index
    return (location, 0)
