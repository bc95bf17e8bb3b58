"""Prefetch, advice and discard of managed memory under CUDA 12 and 13, which name a place in different ways."""

from __future__ import annotations

from typing import Any

import cuda.bindings
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.cuda.streams import CudaStream
from pytest_gpumem.devices.protocol import Advice, Allocation, DeviceError, MemoryKind, Unsupported
from pytest_gpumem.records.device import DeviceFacts

BINDINGS_MAJOR = int(cuda.bindings.__version__.split(".", 1)[0])
"""Of cuda-bindings, which names places as its own CUDA does."""
_CPU = -1  # cudaCpuDeviceId
_WORDS = {Advice.READ_MOSTLY: "ReadMostly", Advice.PREFERRED_LOCATION: "PreferredLocation", Advice.ACCESSED_BY: "AccessedBy"}
# What a driver says that does not know the call: of CUDA 12, or for a GPU that cannot.
_TOO_OLD = ("cudaErrorNotSupported", "cudaErrorCallRequiresNewerDriver", "cudaErrorInsufficientDriver")


def prefetch(allocation: Allocation, index: int, to_host: bool, stream: CudaStream, facts: DeviceFacts) -> None:
    """Queue `cudaMemPrefetchAsync` to device `index` or to the host.

    Raises:
        Unsupported: the device has no `concurrentManagedAccess`: its pages move as a whole at a launch.
    """
    _check(allocation, facts, "prefetched")
    arguments = place(R, BINDINGS_MAJOR, index, to_host)
    check(
        R.cudaMemPrefetchAsync(allocation.address, allocation.nbytes, *arguments, stream.handle),
        f"prefetching {allocation.nbytes} bytes to the {'host' if to_host else 'device'}",
    )


def place(bindings: Any, major: int, index: int, to_host: bool) -> tuple[Any, ...]:
    """The middle arguments of `cudaMemPrefetchAsync`: a device number (CUDA 12), or a location and flags (CUDA 13)."""
    if major < 13:
        return (_CPU if to_host else index,)
    return (location(bindings, major, index, to_host), 0)


def location(bindings: Any, major: int, index: int, to_host: bool) -> Any:
    """The last argument of `cudaMemAdvise`: a device number (CUDA 12) or a location (CUDA 13)."""
    if major < 13:
        return _CPU if to_host else index
    made = bindings.cudaMemLocation()
    kinds = bindings.cudaMemLocationType
    made.type = kinds.cudaMemLocationTypeHost if to_host else kinds.cudaMemLocationTypeDevice
    made.id = 0 if to_host else index
    return made


def advice_number(advice: Advice, *, on: bool) -> Any:
    """The `cudaMemoryAdvise` that sets or unsets an advice."""
    return getattr(R.cudaMemoryAdvise, f"cudaMemAdvise{'Set' if on else 'Unset'}{_WORDS[advice]}")


def advise(allocation: Allocation, index: int, advice: Advice, to_host: bool, facts: DeviceFacts, *, on: bool) -> None:
    """`cudaMemAdvise` for device `index` or for the host, at once. The driver ignores the place of ReadMostly.

    Raises:
        Unsupported: the device has no `concurrentManagedAccess`.
    """
    _check(allocation, facts, "advised about")
    where = location(R, BINDINGS_MAJOR, index, to_host)
    check(
        R.cudaMemAdvise(allocation.address, allocation.nbytes, advice_number(advice, on=on), where),
        f"{'setting' if on else 'unsetting'} the advice {_WORDS[advice]} on {allocation.nbytes} bytes",
    )


def discard(allocation: Allocation, stream: CudaStream, facts: DeviceFacts) -> None:
    """Queue `cudaMemDiscardBatchAsync`, which came with CUDA 13.

    Raises:
        Unsupported: bindings or driver have no such call, or the device has no `concurrentManagedAccess`.
    """
    _check(allocation, facts, "discarded")
    call = getattr(R, "cudaMemDiscardBatchAsync", None)
    if call is None:
        raise Unsupported(f"cuda-bindings {cuda.bindings.__version__} has no cudaMemDiscardBatchAsync: discarding needs CUDA 13")
    result = call([allocation.address], [allocation.nbytes], 1, 0, stream.handle)
    if getattr(result[0], "name", "") in _TOO_OLD:
        R.cudaGetLastError()
        raise Unsupported(f"the driver ({facts.driver or 'of unknown version'}) has no cudaMemDiscardBatchAsync: {result[0].name}")
    check(result, f"discarding {allocation.nbytes} bytes")


def _check(allocation: Allocation, facts: DeviceFacts, done: str) -> None:
    if allocation.kind is not MemoryKind.MANAGED:
        raise DeviceError(f"only managed memory can be {done}, not {allocation.kind.value} memory")
    if not facts.concurrent_managed_access:
        raise Unsupported(f"{facts.name} has no concurrentManagedAccess here: managed memory cannot be {done}")
