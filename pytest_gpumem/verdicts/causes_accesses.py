"""Loads and stores of two sides' kernels: of what more is asked of L2, how much is sectors used in part, and how much further bytes.

Sectors are touched in L1, and what L1 serves is not asked of L2. So a load that uses an eighth of each sector may ask L2 for eight times as
much or for no more, if the next load uses the rest; what it asks is counted. Where it asks for more by less than its sectors grew, either
L1 serves a part of them, or it is further bytes in another pattern: the bytes that threads load tell the two apart, where they are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpumem.verdicts.causes_names import base_names
from pytest_gpumem.verdicts.causes_pairing import Paired

Two = tuple[float, float]
"""A figure of base and of head."""
ABSORBED = 0.95
"""Share of what the pattern would ask for below which L1 serves a part of it."""


@dataclass(frozen=True)
class Access:
    """The loads, or the stores, of one kernel."""

    kernel: str
    """Its base name; several where they cannot be told apart."""
    load: bool
    """Loads; else stores."""
    seconds: float
    """Of the kernel in head."""
    sectors: Two | None
    """Sectors of one load or store of a warp."""
    used: Two | None
    """Share of their bytes that threads use."""
    ratio: float
    """Sectors that are touched for the same bytes, over base's; 1 where that is not known."""
    l2: Two | None
    """Bytes asked of L2 for it."""
    wanted: Two | None
    """Bytes that threads load or store."""

    @property
    def grown(self) -> float:
        """What it asks of L2, over base's; 1 where that is not known."""
        return self.l2[1] / self.l2[0] if self.l2 is not None and self.l2[0] > 0 else 1.0

    @property
    def wasted(self) -> float:
        """Bytes more that are asked of L2 for sectors used in part."""
        if self.l2 is None or self.grown <= 1 or self.ratio <= 1:
            return 0.0
        further = self.wanted[1] / self.wanted[0] if self.wanted is not None and self.wanted[0] > 0 else 1.0
        return self.l2[0] * max(0.0, min(self.ratio * max(1.0, further), self.grown) - max(1.0, further))

    @property
    def further(self) -> float:
        """Bytes more that are asked of L2 besides; negative where there are fewer."""
        return 0.0 if self.l2 is None else self.l2[1] - self.l2[0] - self.wasted

    @property
    def absorbed(self) -> bool:
        """Whether L2 is asked for less than the pattern alone would ask for."""
        return self.l2 is not None and self.grown < ABSORBED * self.ratio


def accesses(kernels: Paired, *, same_work: bool) -> tuple[Access, ...]:
    """Loads and stores of all kernels that have a counterpart.

    Args:
        kernels: with counters.
        same_work: both sides declare the same bytes, so wider requests are no wider elements where nobody counted what is used.
    """
    return tuple(_each(kernels, same_work))


def _each(kernels: Paired, same_work: bool) -> Iterator[Access]:
    for was, now in kernels.pairs:
        for which in (0, 1):
            sectors, used = _two(was.sectors(which), now.sectors(which)), _two(was.used(which), now.used(which))
            ratio = 1.0
            if used is not None:
                ratio = used[0] / used[1]
            elif sectors is not None and same_work:
                ratio = sectors[1] / sectors[0]
            name = base_names(kernel.name for kernel in now.kernels)
            l2, wanted = _two(was.l2(which), now.l2(which)), _two(was.wanted(which), now.wanted(which))
            yield Access(name, which == 0, now.seconds, sectors, used, ratio, l2, wanted)


def _two(was: float | None, now: float | None) -> Two | None:
    return (was, now) if was and now else None
