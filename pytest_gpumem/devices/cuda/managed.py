"""Prefetch, advice and discard of managed memory under CUDA 12 and 13, which name a place in
different ways; and the beacon."""

from __future__ import annotations

from typing import Any

import cuda.bindings
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.checks import check_managed, check_oversubscription
from pytest_gpumem.devices.cuda import host
from pytest_gpumem.devices.cuda.errors import check
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, NotCounted, Stream, Unsupported
from pytest_gpumem.records.device import DeviceFacts

# of cuda-bindings, which names places as its own CUDA does
BINDINGS_MAJOR = int(cuda.bindings.__version__.split(".", 1)[0])
_CPU = -1  # cudaCpuDeviceId
_WORDS = {
    Advice.READ_MOSTLY: "ReadMostly",
    Advice.PREFERRED_LOCATION: "PreferredLocation",
    Advice.ACCESSED_BY: "AccessedBy",
}
BEACON_BYTES = 2 * 2**20
"""Size of one block of the driver's: no other pages share it, so no fault beside it moves it."""
# Errors of a driver without the call: one of CUDA 12, or for a GPU that cannot do it.
_TOO_OLD = (
    "cudaErrorNotSupported",
    "cudaErrorCallRequiresNewerDriver",
    "cudaErrorInsufficientDriver",
)


class CudaManaged:
    """The pages of managed memory of device `index`."""

    def __init__(self, index: int, facts: DeviceFacts) -> None:
        self._index = index
        self._facts = facts

    def prefetch(self, allocation: Allocation, to_host: bool, stream: Stream) -> None:
        check_managed(allocation, "prefetched", self._facts)
        arguments = place(R, BINDINGS_MAJOR, self._index, to_host)
        check(
            R.cudaMemPrefetchAsync(
                allocation.address, allocation.nbytes, *arguments, stream.handle
            ),
            f"prefetching {allocation.nbytes} bytes to the {'host' if to_host else 'device'}",
        )

    def advise(self, allocation: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
        check_managed(allocation, "advised about", self._facts)
        # the driver ignores the place of ReadMostly
        where = location(R, BINDINGS_MAJOR, self._index, to_host)
        number = advice_number(advice, on=on)
        doing = "setting" if on else "unsetting"
        check(
            R.cudaMemAdvise(allocation.address, allocation.nbytes, number, where),
            f"{doing} the advice {_WORDS[advice]} on {allocation.nbytes} bytes",
        )

    def discard(self, allocation: Allocation, stream: Stream) -> None:
        check_managed(allocation, "discarded", self._facts)
        call = getattr(R, "cudaMemDiscardBatchAsync", None)
        if call is None:
            problem = "has no cudaMemDiscardBatchAsync: discarding needs CUDA 13"
            raise Unsupported(f"cuda-bindings {cuda.bindings.__version__} {problem}")
        result = call([allocation.address], [allocation.nbytes], 1, 0, stream.handle)
        if getattr(result[0], "name", "") in _TOO_OLD:
            R.cudaGetLastError()
            driver = self._facts.driver or "of unknown version"
            raise Unsupported(
                f"the driver ({driver}) has no cudaMemDiscardBatchAsync: {result[0].name}"
            )
        check(result, f"discarding {allocation.nbytes} bytes")

    def oversubscribe(self, nbytes: int) -> Allocation:
        check_oversubscription(nbytes, host.available_bytes())
        address = malloc_managed(nbytes, f"allocating {nbytes} bytes of managed memory")
        return Allocation(MemoryKind.MANAGED, nbytes, address, address)


def malloc_managed(nbytes: int, doing: str) -> int:
    """The address of new managed memory that every GPU may use."""
    return int(check(R.cudaMallocManaged(nbytes, R.cudaMemAttachGlobal), doing))


def place(bindings: Any, major: int, index: int, to_host: bool) -> tuple[Any, ...]:
    """The middle arguments of `cudaMemPrefetchAsync`: a device number (CUDA 12), or a location and
    flags (CUDA 13)."""
    where = location(bindings, major, index, to_host)
    if major < 13:
        return (where,)
    return (where, 0)


def location(bindings: Any, major: int, index: int, to_host: bool) -> Any:
    """The last argument of `cudaMemAdvise`: a device number (CUDA 12) or a location (CUDA 13)."""
    if major < 13:
        return _CPU if to_host else index
    made = bindings.cudaMemLocation()
    kinds = bindings.cudaMemLocationType
    if to_host:
        made.type, made.id = kinds.cudaMemLocationTypeHost, 0
    else:
        made.type, made.id = kinds.cudaMemLocationTypeDevice, index
    return made


def advice_number(advice: Advice, *, on: bool) -> Any:
    """The `cudaMemoryAdvise` that sets or unsets an advice."""
    return getattr(R.cudaMemoryAdvise, f"cudaMemAdvise{'Set' if on else 'Unset'}{_WORDS[advice]}")


class Beacon:
    """Managed memory that is moved on purpose, to check that CUPTI counts. On an H200 (driver
    580.159.04) the first two passes of a process deliver nothing; known moves tell them from passes
    without migrations.
    """

    nbytes = BEACON_BYTES

    def __init__(self, index: int) -> None:
        self._index = index
        self._address = 0

    def move(self) -> None:
        """Prefetch to the device and back to the host, and wait. Raises `NotCounted`: the device
        cannot prefetch managed memory."""
        if not self._address:
            doing = "allocating managed memory to try the counters on"
            self._address = malloc_managed(BEACON_BYTES, doing)
            check(R.cudaMemset(self._address, 0, BEACON_BYTES), doing)
        for to_host in (False, True):
            where = place(R, BINDINGS_MAJOR, self._index, to_host)
            result = R.cudaMemPrefetchAsync(self._address, BEACON_BYTES, *where, 0)
            if int(result[0]) != 0:
                R.cudaGetLastError()
                raise NotCounted(f"pages cannot be moved to try the counters on: {result[0].name}")
        check(R.cudaStreamSynchronize(0), "moving managed memory to try the counters on")

    def holds(self, address: int) -> bool:
        """True if an address lies in the beacon."""
        return self._address <= address < self._address + BEACON_BYTES

    def close(self) -> None:
        """Free it; a second call does nothing."""
        address, self._address = self._address, 0
        if address:
            R.cudaFree(address)
