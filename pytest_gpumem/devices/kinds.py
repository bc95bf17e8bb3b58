"""The kinds of memory. Code asks for their properties; only allocation asks for the kind itself."""

from __future__ import annotations

from enum import Enum


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
        """It lies on this GPU and stays there."""
        return self in (MemoryKind.DEVICE, MemoryKind.POOLED)

    @property
    def on_host(self) -> bool:
        """It lies in the host's RAM."""
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED, MemoryKind.PAGEABLE)

    @property
    def on_peer(self) -> bool:
        """It lies on another GPU."""
        return self is MemoryKind.PEER

    @property
    def managed(self) -> bool:
        """Its pages migrate between host and device."""
        return self is MemoryKind.MANAGED

    @property
    def locked(self) -> bool:
        """Its pages are locked in the host's RAM."""
        return self in (MemoryKind.PINNED, MemoryKind.REGISTERED)

    @property
    def pageable(self) -> bool:
        """It is host memory that is not page-locked: the host waits for copies from and to it."""
        return self is MemoryKind.PAGEABLE

    @property
    def adopted(self) -> bool:
        """It lies over memory that the process had before, such as a NumPy array."""
        return self in (MemoryKind.REGISTERED, MemoryKind.PAGEABLE)

    @property
    def scattered(self) -> bool:
        """`Memory.scatter` can replace it: many placements in one allocation."""
        return self is MemoryKind.DEVICE

    @property
    def movable(self) -> bool:
        """The harness gives it new addresses, to randomise placements.

        A pool chooses the address, and gives the same one again; a link is slower than all
        differences between places, and page-locking is slow.
        """
        return self in (MemoryKind.DEVICE, MemoryKind.MANAGED)

    @property
    def beyond_link(self) -> bool:
        """What the device moves from or to it crosses a link: to the host, or to another GPU."""
        return self.on_host or self.on_peer
