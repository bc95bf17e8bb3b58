"""The calls that make the host wait for the device: one table, by call and by the memory of a copy. The time that a call takes
never decides.

Source: CUDA Driver API, "API synchronization behavior" (Memcpy, Memset, Kernel Launches); cuMemFree, cuMemFreeHost, cuCtxSynchronize,
cuStreamSynchronize, cuEventSynchronize. "may" stands where CUDA promises neither.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

Waits = Literal["waits", "may", "does not"]

CALLS: dict[str, tuple[Waits, str]] = {
    "cuCtxSynchronize": ("waits", "device"),
    "cuStreamSynchronize": ("waits", "stream"),
    "cuEventSynchronize": ("waits", "event"),
    # What runs may still use the memory: the driver waits for the device before it takes it away.
    "cuMemFree": ("waits", "free"),
    "cuMemFreeHost": ("waits", "free"),
    "cuMemHostUnregister": ("may", "free"),
    "cuArrayDestroy": ("may", "free"),
    "cuMemPoolTrimTo": ("may", "free"),
    "cuMemUnmap": ("may", "free"),
    "cuMemAlloc": ("may", "allocation"),
    "cuMemAllocPitch": ("may", "allocation"),
    "cuMemAllocManaged": ("may", "allocation"),
    "cuMemAllocHost": ("may", "allocation"),
    "cuMemHostAlloc": ("may", "allocation"),
    "cuMemHostRegister": ("may", "allocation"),
    "cuModuleUnload": ("may", "module"),
    "cuLibraryUnload": ("may", "module"),
}
"""By call of the driver, without its version: whether it waits, and for what, or what it does meanwhile. Calls that are missing do not."""

HOST = ("pageable", "pinned")
_VERSION = re.compile(r"(_v\d+)?(_ptds|_ptsz)?$")


def base_name(call: str) -> str:
    """A call without its version: "cuMemFree" for "cuMemFree_v2"."""
    return _VERSION.sub("", call)


@cache
def copy_waits(source: str, destination: str, *, ordered: bool) -> Waits:
    """Whether a copy waits.
    `source`, `destination`: kinds of memory, of `records.uses.MEMORY_KINDS`.
    `ordered`: a call whose name ends in Async.
    """
    if source in HOST and destination in HOST:
        return "waits"
    if "unknown" in (source, destination) or "managed" in (source, destination):
        return "does not" if ordered else "may"
    if ordered:
        return "may" if "pageable" in (source, destination) else "does not"
    return "waits" if source in HOST or destination in HOST else "does not"


def memset_waits(memory: str, *, ordered: bool) -> Waits:
    """Whether a memset waits; arguments as of `copy_waits`."""
    if ordered:
        return "does not"
    return "may" if memory == "unknown" else "waits" if memory in (*HOST, "managed") else "does not"
