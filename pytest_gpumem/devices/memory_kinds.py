"""What a device works on: memory and its kinds, and access-policy windows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from pytest_gpumem.units import format_bytes

_PROC = Path("/proc/self")
ALLOCATORS = (
    "cudaMalloc",
    "cudaMallocAsync",
    "cudaMallocAsync, kept",
    "CuPy pool",
    "cudaHostAlloc",
    "cudaHostRegister",
)
"""Ways of allocating. "cudaMallocAsync, kept": from a pool that a synchronisation does not free."""
PLENTY = 0.75  # share of the device's memory that stays free while memory is kept for reuse


class MemoryKind(str, Enum):
    """The place of memory and the way it moves."""

    DEVICE = "device"
    POOLED = "pooled"  # device memory of the driver's stream-ordered pool
    MANAGED = "managed"
    PINNED = "pinned"
    REGISTERED = "registered"  # pageable host memory, page-locked afterwards
    PAGEABLE = "pageable"
    PEER = "peer"  # device memory of another GPU

    @property
    def on_device(self) -> bool:
        """It stays on this GPU."""
        return self in (MemoryKind.DEVICE, MemoryKind.POOLED)

    @property
    def on_host(self) -> bool:
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED, MemoryKind.PAGEABLE)

    @property
    def on_peer(self) -> bool:
        return self is MemoryKind.PEER

    @property
    def managed(self) -> bool:
        """Its pages migrate between host and device."""
        return self is MemoryKind.MANAGED

    @property
    def locked(self) -> bool:
        """Its pages stay in the host's RAM."""
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED)

    @property
    def pageable(self) -> bool:
        """The host waits for copies from and to it."""
        return self is MemoryKind.PAGEABLE

    @property
    def adopted(self) -> bool:
        """It lies over memory such as a NumPy array."""
        return self in (MemoryKind.REGISTERED, MemoryKind.PAGEABLE)

    @property
    def movable(self) -> bool:
        """The harness gives it new addresses. A pool gives the same again, and behind a link places
        make no difference."""
        return self in (MemoryKind.DEVICE, MemoryKind.MANAGED)

    @property
    def beyond_link(self) -> bool:
        """A link, to the host or another GPU, lies between it and the device."""
        return self.on_host or self.on_peer


def is_mapped(address: int, proc: Path = _PROC) -> bool:
    """True if an address lies in mapped memory (proc(5), /proc/pid/maps)."""
    # Address space that nobody can read is reserved by a driver.
    return _mapping(address, proc).partition(" ")[2].startswith("r")


def is_of_a_driver(address: int, proc: Path = _PROC) -> bool:
    """True if memory is mapped from a device file; shared memory is none."""
    mapping = _mapping(address, proc)
    return "/dev/" in mapping and "/dev/shm/" not in mapping


def _mapping(address: int, proc: Path) -> str:
    for line in (proc / "maps").read_text().splitlines():
        first, _, last = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line
    return ""


class Advice(str, Enum):
    """A hint on the use of managed memory (CUDA C++ Programming Guide, Data Usage Hints)."""

    READ_MOSTLY = "read_mostly"
    """Each reader gets a copy, and a write drops the others. This advice has no place."""
    PREFERRED_LOCATION = "preferred_location"
    """Pages stay at this place where they can, and are mapped from elsewhere."""
    ACCESSED_BY = "accessed_by"
    """This place has the pages mapped wherever they are: its accesses do not fault."""


@dataclass(eq=False)
class Allocation:
    """A piece of memory. Only its device reads `backing`."""

    kind: MemoryKind
    nbytes: int
    address: int  # for the device; 0 if it cannot see the memory (pageable)
    host_address: int  # for the host; 0 if it cannot see the memory (device memory)
    backing: Any = None
    freed: bool = False

    def part(self, offset: int, nbytes: int) -> Allocation:
        """A part, which is not freed."""
        address, host_address = self.address, self.host_address
        return Allocation(
            self.kind,
            nbytes,
            address and address + offset,
            host_address and host_address + offset,
            backing=self,
        )


class AccessProperty(str, Enum):
    """How L2 treats the lines of an access (CUDA C++ Programming Guide, L2 Access Properties)."""

    NORMAL = "normal"  # no preference. It also turns a persisting line back to normal.
    STREAMING = "streaming"  # first to be evicted
    PERSISTING = "persisting"  # kept in the set-aside


@dataclass(frozen=True)
class WindowSpec:
    """An access-policy window for a stream, for the kernels of a graph or for a launch."""

    address: int  # first byte, as a device address
    nbytes: int  # length, at most `accessPolicyMaxWindowSize`
    hit_ratio: float
    """Share of the accesses, in [0, 1], with the property `hit`; the others have `miss`."""
    hit: AccessProperty = AccessProperty.PERSISTING
    miss: AccessProperty = AccessProperty.STREAMING
    """Streaming or normal: CUDA takes no other (CUDA Runtime API, cudaAccessPolicyWindow)."""

    @property
    def words(self) -> str:
        """Everything but the address: "8 MiB at hit ratio 1, persisting, else streaming"."""
        size = f"{format_bytes(self.nbytes)} at hit ratio {self.hit_ratio:.3g}"
        return f"{size}, {self.hit.value}, else {self.miss.value}"
