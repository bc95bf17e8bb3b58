"""A limit of the device's memory: one allocation holds what is above it, so that the driver itself refuses more, whichever library asks.

It is plain device memory. Managed memory could be evicted, and would hold nothing back.
"""

from __future__ import annotations

from cupy.cuda import runtime

from pytest_gpumem.devices.checks import below_context
from pytest_gpumem.devices.cuda import nvml
from pytest_gpumem.devices.cuda.errors import translated
from pytest_gpumem.devices.protocol import DeviceError
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import GiB

_PAGE = 2 * 2**20
"""Bytes in which the driver hands out device memory."""


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
            raise DeviceError(f"a limit of {limit}: this process uses {used}, and only {left} are free")
        if above >= _PAGE:
            self._nbytes = above // _PAGE * _PAGE
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
