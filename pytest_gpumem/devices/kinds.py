"""The kinds of memory and their traits."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


@dataclass(frozen=True)
class Traits:
    """Properties of a kind of memory. Code asks for these; only allocation asks for the kind
    itself."""

    place: Literal["device", "host", "managed", "peer"]
    """Where it lies: on this GPU, in the host's RAM, on either as its pages migrate, or on another
    GPU."""
    locked: bool = False  # its pages are locked in the host's RAM
    adopted: bool = False  # it lies over memory that the process had before, such as a NumPy array
    scattered: bool = False  # `Memory.scatter` can replace it: many placements in one allocation
    fixed: str | None = None  # why placements are not randomised; None: the harness moves it


_BEHIND_LINK = (
    "its address does not matter: a link is slower than all differences between places, "
    "and page-locking is slow"
)


class MemoryKind(str, Enum):
    """The place of memory and the way it moves. A new kind is a member here, a way to allocate it,
    and a method of `Memory` for users."""

    traits: Traits

    DEVICE = "device", Traits("device", scattered=True)
    POOLED = (
        "pooled",
        Traits("device", fixed="its pool chooses the address, and gives the same one again"),
    )
    """Device memory of the driver's stream-ordered pool."""
    MANAGED = "managed", Traits("managed")
    PINNED = "pinned", Traits("host", locked=True, fixed=_BEHIND_LINK)
    # pageable host memory, page-locked afterwards
    REGISTERED = (
        "registered",
        Traits("host", locked=True, adopted=True, fixed=_BEHIND_LINK),
    )
    PAGEABLE = "pageable", Traits("host", adopted=True, fixed=_BEHIND_LINK)
    PEER = "peer", Traits("peer", fixed=_BEHIND_LINK)  # device memory of another GPU

    def __new__(cls, name: str, traits: Traits) -> MemoryKind:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.traits = traits
        return kind

    @property
    def on_device(self) -> bool:
        """It lies on this GPU and stays there."""
        return self.traits.place == "device"

    @property
    def on_host(self) -> bool:
        """It lies in the host's RAM."""
        return self.traits.place == "host"

    @property
    def on_peer(self) -> bool:
        """It lies on another GPU."""
        return self.traits.place == "peer"

    @property
    def managed(self) -> bool:
        """Its pages migrate between host and device."""
        return self.traits.place == "managed"

    @property
    def locked(self) -> bool:
        """Its pages are locked in the host's RAM."""
        return self.traits.locked

    @property
    def pageable(self) -> bool:
        """It is host memory that is not page-locked: the host waits for copies from and to it."""
        return self.on_host and not self.locked

    @property
    def movable(self) -> bool:
        """The harness gives it new addresses, to randomise placements."""
        return self.traits.fixed is None

    @property
    def beyond_link(self) -> bool:
        """What the device moves from or to it crosses a link: to the host, or to another GPU."""
        return self.on_host or self.on_peer
