"""A `Case` as a target: it is built anew at each placement."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, Foreign, OutOfMemory, Stream
from pytest_gpumem.judging.finding import counted
from pytest_gpumem.measuring.bound import BadCall
from pytest_gpumem.measuring.case import (
    Case,
    by_buffers,
    check_launch,
    footprint_of,
    foreign_of,
    known_buffers,
    notes_of,
    traffic_of,
)
from pytest_gpumem.measuring.target import (
    SMALL_BYTES,
    Target,
    nothing,
    out_of_memory,
    padding,
    refuse_window,
    window_notes,
)
from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.l2 import PersistingStream, persisting
from pytest_gpumem.memory.managed import notes as managed_notes
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.spaces import Memory, address_of

SPARE_PARTS = 4
"""The free memory over what the placements of a case may take: the user's code needs room too."""


@dataclass(frozen=True)
class _Built:
    """A case at a placement, with the memory that it was built in."""

    case: Case
    arena: Arena
    reads: list[Buffer]
    writes: list[Buffer]
    under_window: Buffer | None


class CasePlacements:
    """A case at its present placement; `target` describes it.

    `arena`: the test's; its seed gives every placement the same content.
    `stream`: where the case runs, unless it has a window.
    """

    def __init__(self, build: Callable[[Memory], Case], arena: Arena, stream: Stream) -> None:
        _check_takes_memory(build)
        self._build, self._arena, self._device = build, arena, arena.device
        self._stream = stream
        self._window = ExitStack()  # closes the window that is open
        self._sets: list[list[Allocation]] | None = None
        """Memory of the buffers of placements to come; None before the first move."""
        self._addresses: list[tuple[int, ...]] = []
        """Of the arrays that are no buffers of a fixture, at each placement."""
        self._built = self._make()
        self._name = self._built.case.name or getattr(build, "__name__", "case")
        try:
            self.target = self._describe()
        except BaseException:
            self._window.close()
            self._built.arena.close()
            raise

    def _make(self, places: Sequence[Allocation] = ()) -> _Built:
        """Build the case, once more with more free memory if it runs out."""
        try:
            return self._build_once(places)
        except Exception as error:
            if not out_of_memory(error):
                raise
            freed = self._release_sets() or self._device.memory.make_room()
            if not freed and not self._arena.keeps:
                raise
        self._arena.close_kept()  # of earlier cases of the test
        return self._build_once()

    def _build_once(self, places: Sequence[Allocation] = ()) -> _Built:
        # The same seed for every placement: the same content at other addresses.
        arena = Arena(self._device, self._arena.seed, oversubscribes=self._arena.oversubscribes)
        arena.offer(places, self._arena)
        try:
            case = self._build(Memory(arena, self._stream))
            if not isinstance(case, Case):
                raise BadCall(
                    f"the function given to gpu_benchmark.case() returned {case!r}, not a Case"
                )
            case = by_buffers(case, arena, "Case.{}")
            under_window = None if case.window is None else arena.find(case.window)
            if case.window is not None and under_window is None:
                raise BadCall(
                    "Case.window is a buffer or array made by the `memory` that the function is "
                    "given"
                )
            reads = known_buffers(case.reads, arena)
            writes = known_buffers(case.writes, arena)
            addresses = []
            for array in (*case.reads, *case.writes):
                if arena.find(array) is None:
                    addresses.append(_address(array))
            self._addresses.append(tuple(addresses))
        except BaseException:
            arena.close()
            raise
        return _Built(case, arena, reads, writes, under_window)

    def _describe(self) -> Target:
        """Open the window of what was built, and describe it."""
        built, case = self._built, self._built.case
        window: PersistingStream | None = None
        stream = self._stream
        if built.under_window is not None:
            window = self._window.enter_context(persisting(self._device, built.under_window))
            stream = window.stream
        launch = foreign_of(case.launch, case.reference, built.reads, built.writes)
        prepare: Callable[[Stream], None] = nothing
        if case.restore is not None:
            restore = foreign_of(case.restore, case.restore, built.reads, built.writes)
            prepare = partial(self._call, restore, 0)
        notes = [*notes_of(case, built.arena), *_same_memory(self._addresses)]
        notes += managed_notes(self._device.facts, built.arena.managed)
        notes += window_notes(self._device, window)
        return Target(
            name=self._name,
            kind="case",
            stream=stream,
            launch=partial(self._call, launch),
            moved_bytes=traffic_of(case),
            footprint=footprint_of(case),
            managed=built.arena.homes,
            window=window,
            notes=tuple(notes),
            restores=case.restore is not None,
            prepare=prepare,
            check=None if case.check is None else self.check,
            move=self.move,
            run_on=self.run_on,
            close=self.close,
        )

    def _call(self, foreign: Foreign, place: int, stream: Stream) -> None:
        self._device.kernels.call(foreign, stream)

    def move(self, wanted: int, most: int, random: np.random.Generator) -> Target:
        if self._sets is None:
            self._sets = self._scatter(wanted, most, random)
        places: list[Allocation] = []
        if self._sets:
            places = self._sets.pop()
        if not places:
            self._arena.pad(padding(random))
        # Both placements live for a moment, so that the new one cannot get the old addresses.
        old = self._built
        if not self._fits():
            self._arena.close_kept()
        if not self._fits():
            raise OutOfMemory("two placements of the case do not fit at once")
        try:
            self._built = self._make(places)
        except OutOfMemory:
            raise
        except Exception as error:
            if not out_of_memory(error):
                raise
            sentence = str(error).partition(".")[0]
            raise OutOfMemory(f"a second placement of the case does not fit: {sentence}") from error
        try:
            self._window.close()
        finally:
            old.arena.close()
        # After the old window is closed: two would share the device's set-aside.
        self.target = self._describe()
        return self.target

    def _fits(self) -> bool:
        free = self._device.memory.free_bytes(MemoryKind.DEVICE)
        return free >= (self.target.footprint or 0)

    def _scatter(
        self, wanted: int, most: int, random: np.random.Generator
    ) -> list[list[Allocation]]:
        """Return memory for the buffers of all placements that may come; none if they are large.

        The driver often gives an address again: of 32 placements, 21 were distinct (H100).
        """
        sizes = self._built.arena.scattered_sizes
        free = self._device.memory.free_bytes(MemoryKind.DEVICE) // SPARE_PARTS
        count = min(most, min(SMALL_BYTES, free) // sum(sizes)) if sizes else 0
        if count < wanted:
            return []
        try:
            made = self._arena.scatter(sizes * count, int(random.integers(2**32)))
        except OutOfMemory:
            return []
        return [made[first : first + len(sizes)] for first in range(0, len(made), len(sizes))]

    def _release_sets(self) -> bool:
        """Free the memory of placements to come; False if there is none."""
        if self._sets is None:
            return False
        sets, self._sets = self._sets, []
        for allocations in sets:
            for allocation in allocations:
                self._arena.release(allocation)
        return bool(sets)

    def run_on(self, stream: Stream) -> Target:
        refuse_window(self._name, self.target.window)
        self._stream = stream
        self.target = replace(self.target, stream=stream)
        return self.target

    def check(self) -> None:
        built = self._built
        check_launch(self._device, self.target, built.case, built.reads, built.writes, "Case.{}")

    def close(self) -> None:
        """Close the window.

        The memory lives until the test ends, which may look at the arrays of the last placement.
        """
        self._release_sets()
        self._arena.keep(self._built.arena)
        self._window.close()


def _check_takes_memory(build: Callable[..., object]) -> None:
    try:
        inspect.signature(build).bind(None)
    except TypeError as error:
        name = getattr(build, "__name__", "the function")
        raise BadCall(
            f"gpu_benchmark.case() calls {name}(memory), with the memory for its buffers: {error}"
        ) from None
    except ValueError:  # a callable without a signature
        pass


def _same_memory(addresses: Sequence[tuple[int, ...]]) -> list[str]:
    """Note that placements do not differ, because a library's pool gives the same memory again."""
    different = len(set(addresses))
    if different == len(addresses) or not any(any(each) for each in addresses):
        return []
    return [
        f"its own arrays lie at {counted(different, 'place')} in {len(addresses)} placements, "
        "because a library's pool gives the same memory again: the interval may be too narrow; "
        "arrays of the function's `memory` move"
    ]


def _address(array: Any) -> int:
    """Return the address of an array of any library; 0 where the array does not give it."""
    try:
        return address_of(array)
    except BadBuffer:
        return 0
