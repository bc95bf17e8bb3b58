"""The state of L2 between launches, by bytes per allocation, least recently used first.

Of an allocation it knows how many lines are there with the normal property, how many persist in the set-aside, and how many are dirty:
their write-back is billed to whoever evicts them.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeAlias

from pytest_gpumem.devices.protocol import Allocation
from pytest_gpumem.devices.simulated.datasheets import Datasheet


def miss_ratio(reuse: float, knee: float, sharpness: float) -> float:
    """Share of accesses that miss at a reuse distance given in capacities: a step at 1, blurred by hashing and low associativity."""
    return 1.0 / (1.0 + math.exp(min(60.0, max(-60.0, -sharpness * (reuse - knee)))))


@dataclass(slots=True)
class Lines:
    """Bytes of one allocation in L2."""

    normal: float = 0.0
    persisting: float = 0.0
    dirty: float = 0.0


State: TypeAlias = tuple[int, tuple[tuple[int, float, float, float], ...]]
"""All that L2 knows: the set-aside, and the lines of each allocation, least recently used first."""


class L2Lines:
    """Lines in L2, by allocation, and the set-aside."""

    def __init__(self, datasheet: Datasheet) -> None:
        self._sheet = datasheet
        self.set_aside = datasheet.default_set_aside
        self._lines: OrderedDict[int, Lines] = OrderedDict()
        self._persists = False
        """True if a line may persist. Most launches leave none, and need not add up zeros."""
        self._snapshot: State | None = None  # the state, until something changes

    @property
    def capacity(self) -> float:
        """Bytes that lines can use beside the lines that persist. What is set aside and not used by persisting accesses serves all others
        (CUDA C++ Programming Guide, L2 Cache Set-Aside for Persisting Accesses)."""
        return float(self._sheet.l2_bytes - self.persisting)

    @property
    def persisting(self) -> float:
        """Bytes that persist in the set-aside."""
        if not self._persists:
            return 0.0
        total = sum([line.persisting for line in self._lines.values()])
        self._persists = total > 0.0
        return total

    @property
    def outside_share(self) -> float:
        """Share of L2 that is not set aside."""
        return 1.0 - self.set_aside / self._sheet.l2_bytes

    @property
    def dirty(self) -> float:
        """Bytes that wait to be written back."""
        return sum([line.dirty for line in self._lines.values()])

    def lines(self, allocation: Allocation) -> Lines:
        """Lines of an allocation in L2. For an allocation without lines the result is a copy."""
        return self._lines.get(id(allocation), Lines())

    def state(self) -> State:
        """A snapshot, to compare or restore."""
        if self._snapshot is None:
            lines = [
                (key, line.normal, line.persisting, line.dirty) for key, line in self._lines.items()
            ]
            self._snapshot = self.set_aside, tuple(lines)
        return self._snapshot

    def restore(self, state: State) -> None:
        """Restore a snapshot."""
        self.set_aside, lines = state
        self._lines = OrderedDict(
            [(key, Lines(normal, persisting, dirty)) for key, normal, persisting, dirty in lines]
        )
        self._persists = True
        self._snapshot = state

    def request_set_aside(self, nbytes: int) -> int:
        """Round up to steps of L2/16, cap at the maximum; a change drops persisting lines to normal."""
        step = self._sheet.l2_bytes // 16
        granted = min(-(-nbytes // step) * step, self._sheet.persisting_l2_max_bytes)
        if granted != self.set_aside:
            self.reset_persisting()
        self.set_aside = granted
        self._shrink()
        return granted

    def reset_persisting(self) -> None:
        """All persisting lines become normal ones."""
        for line in self._lines.values():
            line.normal += line.persisting
            line.persisting = 0.0
        self._persists = False
        self._shrink()

    def release(self, allocation: Allocation, nbytes: float) -> None:
        """Bytes of an allocation that persist become normal ones."""
        line = self.lines(allocation)
        released = min(nbytes, line.persisting)
        line.persisting -= released
        line.normal += released
        self._shrink()

    def write_back(self, incoming: float) -> float:
        """Bytes written back because `incoming` bytes of new lines replace old ones, dirty lines in proportion."""
        dirty = self.dirty
        if dirty <= 0.0:
            return 0.0
        evicted = min(dirty, incoming * dirty / self._sheet.l2_bytes)
        self._snapshot = None
        left = 1.0 - evicted / dirty
        for line in self._lines.values():
            line.dirty *= left
        return evicted

    def touch(
        self, allocation: Allocation, *, normal: float, persisting: float, dirty: float
    ) -> float:
        """An access leaves these bytes of an allocation in L2, as its most recently used lines; gives bytes written back for room.
        `allocation`: whose lines.
        `normal`: bytes with the normal property.
        `persisting`: bytes in the set-aside.
        `dirty`: of them, bytes that were written.
        """
        line = self._lines.setdefault(id(allocation), Lines())
        line.normal = max(line.normal, normal)
        line.persisting = max(line.persisting, persisting)
        line.dirty = min(max(line.dirty, dirty), float(allocation.nbytes))
        self._persists = self._persists or line.persisting > 0.0
        self._lines.move_to_end(id(allocation))
        self._shrink()
        return self._limit_dirty()

    def forget(self, allocation: Allocation) -> None:
        """Drop the lines of memory that was freed or moved away."""
        self._snapshot = None
        self._lines.pop(id(allocation), None)

    def _limit_dirty(self) -> float:
        excess = max(0.0, self.dirty - self._sheet.dirty_share * self._sheet.l2_bytes)
        if excess == 0.0:
            return 0.0
        left = excess
        for line in self._lines.values():
            taken = min(line.dirty, left)
            line.dirty -= taken
            left -= taken
        return excess

    def _shrink(self) -> None:
        self._snapshot = None
        persisting = self.persisting - self.set_aside
        normal = (
            sum([line.normal for line in self._lines.values()])
            - self.capacity
            - max(0.0, persisting)
        )
        if normal <= 0.0 and persisting <= 0.0:
            return
        for key in list(self._lines):
            line = self._lines[key]
            if normal > 0.0:
                taken = min(line.normal, normal)
                line.normal -= taken
                normal -= taken
            if persisting > 0.0:
                taken = min(line.persisting, persisting)
                line.persisting -= taken
                persisting -= taken
            if line.normal <= 0.0 and line.persisting <= 0.0 and line.dirty <= 0.0:
                del self._lines[key]
