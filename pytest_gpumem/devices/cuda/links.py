"""Kinds of memory in the unified address space, and memory of another GPU.

Source: CUDA C++ Best Practices Guide, 9.1.4 Unified Virtual Addressing; CUDA C++ Programming Guide, Peer-to-Peer Memory Access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import cupy
from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812
from cupy.cuda import runtime

from pytest_gpumem.devices.cuda.errors import CUPY_ERRORS, check, translated
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.process_memory import is_mapped, is_of_a_driver
from pytest_gpumem.devices.protocol import DeviceError, Unsupported

_HOST, _DEVICE, _MANAGED = 1, 2, 3  # `cudaMemoryType`; 0 is memory that CUDA does not know
_PAGE = mmap.PAGESIZE  # bytes of a page of the host, the least that page-locked memory takes


def memory_kind(
    address: int, index: int, registered: bool, beyond: tuple[int, int] | None = None
) -> MemoryKind | None:
    """The kind of memory at an address, according to the driver.
    `address`: on the host or on any device.
    `index`: the device whose memory is "device", not "peer".
    `registered`: True if the address lies in memory that this process registered through `cudaHostRegister`: the driver calls it host
    memory as it does what `cudaHostAlloc` gave.
    `beyond`: start and end, as asked for, of the last allocation that starts before the address, if it ends at or before the address.
    """
    try:
        seen = runtime.pointerGetAttributes(address)
        kind, device = int(seen.type), int(seen.device)
    except CUPY_ERRORS:  # before CUDA 11 an address that CUDA does not know was an error
        kind, device = 0, index
    if kind == 0:
        if beyond is not None and address < _end_of_page(beyond[1]):
            return None  # the rest of the allocation's last page: it is mapped, and belongs to no memory
        return MemoryKind.PAGEABLE if is_mapped(address) in (True, None) else None
    if _past_the_end(address, beyond):
        return None
    if kind == _MANAGED:
        return MemoryKind.MANAGED
    if kind == _DEVICE:
        return MemoryKind.DEVICE if device == index else MemoryKind.PEER
    if kind != _HOST:
        raise DeviceError(
            f"the driver says memory type {kind} of address {address:#x}, which is none that CUDA documents"
        )
    if registered:
        return MemoryKind.REGISTERED
    # Memory of another library. What the driver gave (cudaHostAlloc, also through a pool) is mapped from a device file, on an H200 from
    # /dev/zero. Registered memory is whatever the process had before. The driver calls both host memory.
    return MemoryKind.REGISTERED if is_of_a_driver(address) is False else MemoryKind.PINNED


def _past_the_end(address: int, beyond: tuple[int, int] | None) -> bool:
    """True if an address lies in the padding of an allocation: the driver rounds sizes up. The driver's own allocation may end before the
    address, hold it though less was asked for, or, on the host, be of unknown size: then the rest of the last page is its own."""
    error, base, size = D.cuMemGetAddressRange(address)
    known = int(error) == 0
    if known and not int(base) <= address < int(base) + int(size):
        return True
    if beyond is None:
        return False
    start, end = beyond
    return int(base) == start if known else address < _end_of_page(end)


def _end_of_page(end: int) -> int:
    return -(-end // _PAGE) * _PAGE


def nearest_node(index: int) -> int | None:
    """The NUMA node of the host that a device is attached to; None if the system does not report it."""
    attribute = getattr(R.cudaDeviceAttr, "cudaDevAttrHostNumaId", None)
    if attribute is None:
        return None
    error, node = R.cudaDeviceGetAttribute(attribute, index)
    return int(node) if int(error) == 0 and int(node) >= 0 else None


def peer_of(index: int) -> int:
    """The GPU that peer memory is allocated on: the first that this one can copy with directly, else the first other one.
    Raises `Unsupported`: there is one GPU.
    """
    with translated("looking for another GPU"):
        others = [other for other in range(runtime.getDeviceCount()) if other != index]
        if not others:
            raise Unsupported("this process sees one GPU: there is no peer to copy to")
        return next((other for other in others if _reaches(index, other)), others[0])


def _reaches(index: int, other: int) -> bool:
    return bool(runtime.deviceCanAccessPeer(index, other)) and bool(
        runtime.deviceCanAccessPeer(other, index)
    )


@contextmanager
def peer_access(index: int, allowed: bool) -> Iterator[None]:
    """Peer access between device `index` and its peer, both ways, on or off inside the block; the state that was found is put back.
    Raises `Unsupported`: there is one GPU, or the two cannot reach each other and access was asked for.
    """
    peer = peer_of(index)
    if allowed and not _reaches(index, peer):
        raise Unsupported(
            f"devices {index} and {peer} cannot reach each other's memory (cudaDeviceCanAccessPeer is 0)"
        )
    changed = []
    try:
        for device, other in ((index, peer), (peer, index)):
            if _set_access(device, other, allowed):
                changed.append((device, other))
        yield
    finally:
        for device, other in changed:
            _set_access(device, other, not allowed)


def _set_access(device: int, other: int, allowed: bool) -> bool:
    """Allow or forbid one device to reach another's memory; gives whether that changed anything."""
    state = (
        R.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
        if allowed
        else R.cudaError_t.cudaErrorPeerAccessNotEnabled
    )
    with cupy.cuda.Device(device):
        result = (
            R.cudaDeviceEnablePeerAccess(other, 0)
            if allowed
            else R.cudaDeviceDisablePeerAccess(other)
        )
        if int(result[0]) == int(state):
            R.cudaGetLastError()  # that nothing had to be changed is no error to be found later
            return False
        check(
            result,
            f"{'allowing' if allowed else 'forbidding'} device {device} to reach the memory of device {other}",
        )
    return True
