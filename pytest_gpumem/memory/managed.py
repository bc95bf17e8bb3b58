"""Managed memory: where its pages are before every sample, its advice, and devices without it.

Sources: CUDA C++ Programming Guide, Unified Memory Programming; CUDA Runtime API, cudaMemAdvise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, OutOfMemory, Stream, Unsupported
from pytest_gpumem.memory.buffers import Arena, BadBuffer, Buffer, Home, on_its_device
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import short_bytes

Place = Literal["device", "host"]
PLACES = ("device", "host")
NOT_GIVEN: Any = object()  # default of an advice that stays as it is


@dataclass(frozen=True)
class BufferAdvice:
    """The advice that holds for a buffer."""

    read_mostly: bool = False  # `cudaMemAdviseSetReadMostly`
    preferred_location: Place | None = None  # `cudaMemAdviseSetPreferredLocation`
    accessed_by: frozenset[Place] = frozenset()  # `cudaMemAdviseSetAccessedBy`, for each of them

    @property
    def words(self) -> Mapping[tuple[Advice, bool], str]:
        """Words for each advice that is set; True: for the host."""
        words = {}
        if self.read_mostly:
            words[Advice.READ_MOSTLY, False] = "read_mostly"
        if self.preferred_location is not None:
            to_host = self.preferred_location == "host"
            words[Advice.PREFERRED_LOCATION, to_host] = (
                f"preferred_location {self.preferred_location}"
            )
        for place in PLACES:
            if place in self.accessed_by:
                words[Advice.ACCESSED_BY, place == "host"] = f"accessed_by {place}"
        return words


def advised(before: BufferAdvice, **changes: Any) -> BufferAdvice:
    """Return `before` with the given changes."""
    given = {name: value for name, value in changes.items() if value is not NOT_GIVEN}
    if not isinstance(given.get("read_mostly", False), bool):
        raise BadBuffer(f"read_mostly={given['read_mostly']!r}; accepted are True and False")
    preferred = given.get("preferred_location")
    if preferred is not None and preferred not in PLACES:
        raise BadBuffer(f'preferred_location={preferred!r}; accepted are "device", "host" and None')
    if "accessed_by" in given:
        places = given["accessed_by"]
        if not isinstance(places, (tuple, list, set, frozenset)):
            places = () if places is None else (places,)
        for place in places:
            if place not in PLACES:
                accepted = '"device", "host", both in a tuple, and None'
                raise BadBuffer(f"accessed_by={given['accessed_by']!r}; accepted are {accepted}")
        given["accessed_by"] = frozenset(places)
    return replace(before, **given)


class ManagedBuffer(Buffer):
    """Managed memory, which lives where it is touched. A move keeps its advice."""

    _wanted = BufferAdvice()
    _advised: tuple[Allocation | None, BufferAdvice] = (None, BufferAdvice())
    """The allocation that was advised, and its advice."""
    discards = False  # drop the content before every sample, after the pages were put back
    oversubscribed = False  # it is larger than the device's free memory

    @property
    def advice(self) -> BufferAdvice:
        """The advice that holds."""
        return self._wanted

    @on_its_device
    def advise(
        self,
        *,
        read_mostly: bool = NOT_GIVEN,
        preferred_location: Place | None = NOT_GIVEN,
        accessed_by: Any = NOT_GIVEN,
    ) -> None:
        """Set or remove advice at once (`cudaMemAdvise`); what is not given stays.

        Args:
            read_mostly: readers get copies; a write drops the others. False removes
                it, which leaves one copy.
            preferred_location: "device" or "host", where pages stay and from where they are mapped;
                None removes it.
            accessed_by: "device", "host" or both in a tuple: who has the pages mapped without a
                fault; None removes it.

        Raises:
            BadBuffer: another place, or a `read_mostly` that is no bool.
            Unsupported: the device has no `concurrentManagedAccess`.
        """
        self._wanted = advised(
            self._wanted,
            read_mostly=read_mostly,
            preferred_location=preferred_location,
            accessed_by=accessed_by,
        )
        self.device.streams.synchronize()  # an advice is in no stream's order
        self._apply(self._wanted)

    @on_its_device
    def prefetch(self, place: Place) -> None:
        """Move all pages to "device" or "host" now, and wait (`cudaMemPrefetchAsync`).

        Raises:
            BadBuffer: another place.
        """
        if place not in PLACES:
            raise BadBuffer(f'prefetch({place!r}); accepted are "device" and "host"')
        device, stream = self.device, self._arena.stream
        device.streams.synchronize()
        device.content.prefetch(self.allocation, place == "host", stream)
        device.streams.synchronize(stream)

    @on_its_device
    def discard(self) -> None:
        """Drop the content now, and wait (`cudaMemDiscardBatchAsync`); until the next write it is
        undefined.

        Raises:
            Unsupported: driver or bindings are older than CUDA 13.
        """
        device, stream = self.device, self._arena.stream
        device.streams.synchronize()
        device.content.discard(self.allocation, stream)
        device.streams.synchronize(stream)

    def put_home(self, stream: Stream) -> None:
        device = self.device
        # Copies on both sides would survive a prefetch: without the advice there is a single copy.
        alone = replace(self._wanted, read_mostly=False)
        if self._in_force != alone:
            device.streams.synchronize(stream)
            self._apply(alone)
        if self.goes_home:
            device.content.prefetch(self.allocation, self.home != "device", stream)
        if self._wanted.read_mostly:
            device.streams.synchronize(stream)
            self._apply(self._wanted)
        if self.home == "prefetched":
            device.content.prefetch(self.allocation, False, stream)  # may leave a copy on the host
        if self.discards:
            device.content.discard(self.allocation, stream)

    @property
    def _in_force(self) -> BufferAdvice:
        """The advice that the driver knows; none for a fresh allocation."""
        allocation, advice = self._advised
        return advice if allocation is self.allocation else BufferAdvice()

    def _apply(self, wanted: BufferAdvice) -> None:
        before, after = self._in_force.words, wanted.words
        advise = self.device.content.advise
        for advice, to_host in before:
            if (advice, to_host) not in after:
                advise(self.allocation, advice, to_host, on=False)
        for advice, to_host in after:
            if (advice, to_host) not in before:
                advise(self.allocation, advice, to_host, on=True)
        self._advised = (self.allocation, wanted)


def managed(
    arena: Arena, shape: Any, dtype: Any, *, home: Home, discard: bool = False, **advice: Any
) -> Buffer:
    wanted = advised(BufferAdvice(), **advice)
    why = no_migration(arena.device.facts)
    if why is not None:
        raise Unsupported(why)
    if discard and home == "as left":
        raise BadBuffer(
            'discard=True goes with first_touch="host" or "device": pages are put there first'
        )
    memory, over = arena.device.memory, False

    def allocate(nbytes: int) -> Allocation:
        nonlocal over
        try:
            return memory.allocate(nbytes, MemoryKind.MANAGED)
        except OutOfMemory:
            if arena.kept:  # the arena tries again without what it keeps
                raise
        if not arena.oversubscribes:
            free = memory.free_bytes(MemoryKind.MANAGED)
            raise OutOfMemory(
                f"{short_bytes(nbytes)} of managed memory asked for, {short_bytes(free)} are free: "
                "more can hang a GPU, so it needs @pytest.mark.gpumem(oversubscribe=True)"
            )
        over = True
        return memory.oversubscribe(nbytes)

    def handle(*parts: Any) -> ManagedBuffer:
        buffer = ManagedBuffer(*parts)
        buffer.oversubscribed, buffer._wanted, buffer.discards = over, wanted, discard
        buffer.home = home
        return buffer

    return arena.buffer(shape, dtype, MemoryKind.MANAGED, handle=handle, make=allocate)


def no_migration(facts: DeviceFacts) -> str | None:
    """Return why managed pages do not migrate on demand on this device; None where they do."""
    if facts.concurrent_managed_access:
        return None
    return (
        f"{facts.name} does not migrate managed pages on demand here (concurrentManagedAccess is "
        "0, as on Windows and under WSL): managed memory moves as a whole at every launch"
    )


def notes(facts: DeviceFacts, buffers: Iterable[Buffer]) -> Iterator[str]:
    """Yield what a reader must know of a measurement with managed buffers."""
    if facts.host_page_tables:
        yield (
            "ATS: the GPU walks the host's page tables, so it reads host pages without a fault, "
            "and access counters decide what migrates"
        )
    over = 0
    for buffer in buffers:
        if isinstance(buffer, ManagedBuffer) and buffer.oversubscribed:
            over += buffer.nbytes
    if over:
        yield (
            f"{short_bytes(over)} of managed memory are more than the device had free: pages are "
            "evicted to the host meanwhile"
        )
