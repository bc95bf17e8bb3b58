"""Kinds of memory in the unified address space, and memory of another GPU.

Source: CUDA C++ Best Practices Guide, 9.1.4 Unified Virtual Addressing; CUDA C++ Programming Guide,
Peer-to-Peer Memory Access.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from cuda.bindings import driver as D  # noqa: N812
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda.errors import check
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
    `registered`: True if the address lies in memory that this process registered through
    `cudaHostRegister`: the driver calls it host memory as it does what `cudaHostAlloc` gave.
    `beyond`: start and end, as asked for, of the last allocation that starts before the address, if
    it ends at or before the address.
    """
    seen = check(R.cudaPointerGetAttributes(address), f"asking what lies at {address:#x}")
    kind, device = int(seen.type), int(seen.device)
    if kind == 0:
        if beyond is not None and address < _end_of_page(beyond[1]):
            # the rest of the allocation's last page: it is mapped, and belongs to no memory
            return None
        if is_mapped(address) is False:
            return None
        return MemoryKind.PAGEABLE
    if _past_the_end(address, beyond):
        return None
    if kind == _MANAGED:
        return MemoryKind.MANAGED
    if kind == _DEVICE:
        return MemoryKind.DEVICE if device == index else MemoryKind.PEER
    if kind != _HOST:
        problem = f"the driver says memory type {kind} of address {address:#x}"
        raise DeviceError(f"{problem}, which is none that CUDA documents")
    # Memory of another library. What the driver gave (cudaHostAlloc, also through a pool) is mapped
    # from a device file, on an H200 from /dev/zero. Registered memory is whatever the process had
    # before. The driver calls both host memory.
    if registered or is_of_a_driver(address) is False:
        return MemoryKind.REGISTERED
    return MemoryKind.PINNED


def _past_the_end(address: int, beyond: tuple[int, int] | None) -> bool:
    """True if an address lies in the padding of an allocation: the driver rounds sizes up.

    The driver's own allocation may end before the address, contain it though less was requested,
    or, on the host, be of unknown size: then the rest of the last page is its own.
    """
    error, base, size = D.cuMemGetAddressRange(address)
    known = int(error) == 0
    if known and not int(base) <= address < int(base) + int(size):
        return True
    if beyond is None:
        return False
    start, end = beyond
    if known:
        return int(base) == start
    return address < _end_of_page(end)


def _end_of_page(end: int) -> int:
    return -(-end // _PAGE) * _PAGE


def nearest_node(index: int) -> int | None:
    """The NUMA node of the host that a device is attached to; None if the system does not report
    it."""
    attribute = getattr(R.cudaDeviceAttr, "cudaDevAttrHostNumaId", None)
    if attribute is None:
        return None
    error, node = R.cudaDeviceGetAttribute(attribute, index)
    if int(error) != 0 or int(node) < 0:
        return None
    return int(node)


def peer_of(index: int) -> int:
    """The GPU that peer memory is allocated on: the first that this one can copy with directly,
    else the first other one.
    Raises `Unsupported`: there is one GPU.
    """
    count = int(check(R.cudaGetDeviceCount(), "looking for another GPU"))
    others = [other for other in range(count) if other != index]
    if not others:
        raise Unsupported("this process sees one GPU: there is no peer to copy to")
    for other in others:
        if _reaches(index, other):
            return other
    return others[0]


def _reaches(index: int, other: int) -> bool:
    doing = "asking whether two GPUs reach each other"
    there = check(R.cudaDeviceCanAccessPeer(index, other), doing)
    back = check(R.cudaDeviceCanAccessPeer(other, index), doing)
    return bool(there) and bool(back)


def current_gpu() -> int:
    """The number of the GPU whose context is current, whichever library has made it so."""
    return int(check(D.cuCtxGetDevice(), "asking for the current GPU"))


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    """Make another GPU current inside the block."""
    doing = f"making GPU {index} current"
    before = current_gpu()
    check(R.cudaSetDevice(index), doing)
    try:
        yield
    finally:
        check(R.cudaSetDevice(before), doing)


@contextmanager
def peer_access(index: int, allowed: bool) -> Iterator[None]:
    """Peer access between device `index` and its peer, both ways, on or off inside the block; the
    state that was found is put back.
    Raises `Unsupported`: there is one GPU, or the two cannot reach each other and access was asked
    for.
    """
    peer = peer_of(index)
    if allowed and not _reaches(index, peer):
        problem = "cannot reach each other's memory (cudaDeviceCanAccessPeer is 0)"
        raise Unsupported(f"devices {index} and {peer} {problem}")
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
    with on_gpu(device):
        if allowed:
            doing, unchanged = "allowing", R.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
            result = R.cudaDeviceEnablePeerAccess(other, 0)
        else:
            doing, unchanged = "forbidding", R.cudaError_t.cudaErrorPeerAccessNotEnabled
            result = R.cudaDeviceDisablePeerAccess(other)
        if int(result[0]) == int(unchanged):
            R.cudaGetLastError()  # that nothing had to be changed is no error to be found later
            return False
        check(result, f"{doing} device {device} to reach the memory of device {other}")
    return True
