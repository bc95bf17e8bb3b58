"""Pages that are moved on purpose, so that a count of none is known to be a count."""

from __future__ import annotations

from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda import managed
from pytest_gpumem.devices.cuda.errors import check, translated
from pytest_gpumem.devices.protocol import NotCounted

NBYTES = 2 * 2**20
"""One block of the driver's: nobody else's pages share it, so that no fault beside it moves it."""


class Beacon:
    """Managed memory of our own that goes to the device and back.

    Counters of unified memory may be on and yet deliver nothing: on an H200 (driver 580.159.04) the first two passes of a process did,
    whatever moved in them. A move that is known to have happened tells such a pass from one in which nothing moved.

    Args:
        index: the device.
    """

    nbytes = NBYTES

    def __init__(self, index: int) -> None:
        self._index = index
        self._address = 0

    def move(self) -> None:
        """Prefetch to the device and back to the host, and wait.

        Raises:
            NotCounted: the device cannot prefetch managed memory.
        """
        if not self._address:
            with translated("allocating managed memory to try the counters on"):
                self._address = int(runtime.mallocManaged(NBYTES))
                runtime.memset(self._address, 0, NBYTES)
        for to_host in (False, True):
            where = managed.place(R, managed.BINDINGS_MAJOR, self._index, to_host)
            result = R.cudaMemPrefetchAsync(self._address, NBYTES, *where, 0)
            if int(result[0]) != 0:
                R.cudaGetLastError()
                raise NotCounted(f"pages cannot be moved to try the counters on: {result[0].name}")
        check(R.cudaStreamSynchronize(0), "moving managed memory to try the counters on")

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return self._address <= address < self._address + NBYTES

    def close(self) -> None:
        """Free it; a second call does nothing."""
        address, self._address = self._address, 0
        if address:
            runtime.free(address)
