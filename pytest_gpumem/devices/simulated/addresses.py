"""Where allocations lie: first fit with merging, as a driver's heap places them."""

from __future__ import annotations

from bisect import insort

SMALL_BYTES = 2**20
"""Below this an allocation shares a 2 MiB page with others; from here on it starts on a page of its own."""
SMALL_ALIGNMENT = 512
PAGE_BYTES = 2 * 2**20


class _Heap:
    """Free ranges of one address range, lowest first."""

    def __init__(self, base: int, alignment: int) -> None:
        self._free: list[tuple[int, int]] = [(base, 2**44)]
        self._alignment = alignment
        self._taken: dict[int, int] = {}

    def take(self, nbytes: int) -> int:
        size = -(-max(nbytes, 1) // self._alignment) * self._alignment
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(start + size, length - size)] if length > size else []
                self._taken[start] = size
                return start
        raise MemoryError("the simulated address range is full")

    def give_back(self, address: int) -> bool:
        size = self._taken.pop(address, None)
        if size is None:
            return False
        insort(self._free, (address, size))
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged
        return True


class AddressSpace:
    """Addresses that look like a driver's: distinct, aligned, used again after a free."""

    def __init__(self, base: int) -> None:
        self._small = _Heap(base, SMALL_ALIGNMENT)
        self._large = _Heap(base + 2**45, PAGE_BYTES)

    def take(self, nbytes: int) -> int:
        """An address aligned to 512 bytes, or to 2 MiB for 1 MiB and more."""
        return (self._small if nbytes < SMALL_BYTES else self._large).take(nbytes)

    def give_back(self, address: int) -> None:
        _ = self._small.give_back(address) or self._large.give_back(address)
