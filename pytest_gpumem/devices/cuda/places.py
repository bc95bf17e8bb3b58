"""Places of memory: NUMA nodes of the host, this GPU and others, and how CUDA names them.

Sources: CUDA C++ Best Practices Guide, 9.1.4 Unified Virtual Addressing; CUDA C++ Programming
Guide, Peer-to-Peer Memory Access; Linux, numa(7), "local allocation".
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import cuda.bindings
import numpy as np
from cuda.bindings import driver as D
from cuda.bindings import runtime as R

from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.memory_kinds import MemoryKind, is_mapped, is_of_a_driver
from pytest_gpumem.devices.protocol import Advice, Allocation, Unsupported

_DEVICE, _MANAGED = 2, 3  # `cudaMemoryType`; 1 is host memory, 0 what CUDA does not know
_BINDINGS_MAJOR = int(cuda.bindings.__version__.split(".", 1)[0])
_CPU = -1  # cudaCpuDeviceId
_PAGE = mmap.PAGESIZE  # bytes of a page of the host, the least that page-locked memory takes
_PROC, _CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_NODES = Path("/sys/devices/system/node")


# The host


def array(allocation: Allocation, dtype: str, size: int) -> Any:
    """A one-dimensional NumPy array over memory that the host sees. Raises `Unsupported`."""
    if not allocation.host_address:
        raise Unsupported(f"NumPy cannot see {allocation.kind.value} memory")
    memory: Any = (ctypes.c_ubyte * allocation.nbytes).from_address(allocation.host_address)
    return np.frombuffer(memory, dtype=dtype, count=size)


def host_bytes(proc: Path = _PROC, cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Bytes of RAM that this process may use, and those that are available: of the machine, or of a
    control group (version 2) around it, such as a job's."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[n].split()[0]) * 1024 for n in ("MemTotal", "MemAvailable"))
    job = cgroup
    with suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            if line.startswith("0::/"):
                job = cgroup / line.removeprefix("0::/")
    for group in (job, *job.parents):
        with suppress(OSError):  # no memory controller, or another mount than this process's
            limit = (group / "memory.max").read_text().strip()
            used = int((group / "memory.current").read_text())
            lines = (group / "memory.stat").read_text().splitlines()
            if limit != "max":
                # File pages that were not used lately are given back on demand.
                given_back = int(dict(line.split() for line in lines).get("inactive_file", 0))
                total = min(total, int(limit))
                available = min(available, int(limit) - used + given_back)
        if group == cgroup:
            break
    return total, max(0, available)


def cpus_of(node: int | None, system: Path = _NODES) -> set[int]:
    """The CPUs of a NUMA node, from a list such as "0-3,8"; empty without such a node."""
    cpus: set[int] = set()
    with suppress(OSError, ValueError):
        for piece in (system / f"node{node}" / "cpulist").read_text().split(","):
            first, _, last = piece.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


@contextmanager
def on_node(node: int | None, system: Path = _NODES) -> Iterator[int | None]:
    """As `DeviceMemory.near_host`."""
    before = os.sched_getaffinity(0)
    cpus = before & cpus_of(node, system)
    if not cpus:
        yield None
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield node
    finally:
        os.sched_setaffinity(0, before)


def nearest_node(index: int) -> int | None:
    error, node = R.cudaDeviceGetAttribute(R.cudaDeviceAttr.cudaDevAttrHostNumaId, index)
    if int(error) != 0 or int(node) < 0:
        return None
    return int(node)


# Kinds of memory


def memory_kind(address: int, index: int, below: tuple[int, int] | None) -> MemoryKind | None:
    """The kind of memory at an address, seen from device `index`, according to the driver.
    `below`: start and end of our nearest allocation below the address.
    """
    seen = check(R.cudaPointerGetAttributes(address), f"asking what lies at {address:#x}")
    kind, device = int(seen.type), int(seen.device)
    if kind == 0:
        if below is not None and address < _end_of_page(below[1]):
            return None  # the rest of the allocation's last page, which is mapped
        return MemoryKind.PAGEABLE if is_mapped(address) else None
    if _past_the_end(address, below):
        return None
    if kind == _MANAGED:
        return MemoryKind.MANAGED
    if kind == _DEVICE:
        return MemoryKind.DEVICE if device == index else MemoryKind.PEER
    # The driver tells no difference, but maps what cudaHostAlloc gives from a device file.
    if is_of_a_driver(address):
        return MemoryKind.PINNED
    return MemoryKind.REGISTERED


def _past_the_end(address: int, below: tuple[int, int] | None) -> bool:
    """True in the padding of an allocation: the driver rounds sizes up."""
    error, base, size = D.cuMemGetAddressRange(address)
    known = int(error) == 0
    if known and not int(base) <= address < int(base) + int(size):
        return True
    if below is None:
        return False
    start, end = below
    return int(base) == start if known else address < _end_of_page(end)


def _end_of_page(end: int) -> int:
    return -(-end // _PAGE) * _PAGE


# Other GPUs


def peer_of(index: int) -> int:
    """The first other GPU that this one can copy with directly, else the first other. Raises
    `Unsupported`."""
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
    return int(check(D.cuCtxGetDevice(), "asking for the current GPU"))


@contextmanager
def on_gpu(index: int) -> Iterator[None]:
    doing = f"making GPU {index} current"
    before = current_gpu()
    check(R.cudaSetDevice(index), doing)
    try:
        yield
    finally:
        check(R.cudaSetDevice(before), doing)


@contextmanager
def peer_access(index: int, allowed: bool) -> Iterator[None]:
    """As `Device.peer_access`, both ways."""
    peer = peer_of(index)
    if allowed and not _reaches(index, peer):
        raise Unsupported(
            f"devices {index} and {peer} cannot reach each other's memory "
            "(cudaDeviceCanAccessPeer is 0)"
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
    """Allow or forbid a device to reach another's memory; False if that changed nothing."""
    with on_gpu(device):
        if allowed:
            doing, unchanged = "allowing", R.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
            result = R.cudaDeviceEnablePeerAccess(other, 0)
        else:
            doing, unchanged = "forbidding", R.cudaError_t.cudaErrorPeerAccessNotEnabled
            result = R.cudaDeviceDisablePeerAccess(other)
        if int(result[0]) == int(unchanged):
            R.cudaGetLastError()
            return False
        check(result, f"{doing} device {device} to reach the memory of device {other}")
    return True


# Managed memory


def malloc_managed(nbytes: int, doing: str) -> int:
    return int(check(R.cudaMallocManaged(nbytes, R.cudaMemAttachGlobal), doing))


def prefetch(address: int, nbytes: int, index: int, to_host: bool, stream: int) -> Any:
    """Call `cudaMemPrefetchAsync`, which takes flags too from CUDA 13 on."""
    where = location(index, to_host)
    if _BINDINGS_MAJOR < 13:
        return R.cudaMemPrefetchAsync(address, nbytes, where, stream)
    return R.cudaMemPrefetchAsync(address, nbytes, where, 0, stream)


def location(index: int, to_host: bool) -> Any:
    """A place for the driver: a device number (CUDA 12) or a location (CUDA 13)."""
    if _BINDINGS_MAJOR < 13:
        return _CPU if to_host else index
    place = R.cudaMemLocation()
    kinds = R.cudaMemLocationType
    if to_host:
        place.type, place.id = kinds.cudaMemLocationTypeHost, 0
    else:
        place.type, place.id = kinds.cudaMemLocationTypeDevice, index
    return place


def advice_number(advice: Advice, *, on: bool) -> Any:
    """Such as `cudaMemAdviseUnsetReadMostly`."""
    name = advice.value.title().replace("_", "")
    return getattr(R.cudaMemoryAdvise, f"cudaMemAdvise{'Set' if on else 'Unset'}{name}")
