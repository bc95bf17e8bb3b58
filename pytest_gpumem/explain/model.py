"""Two sides of an explanation: the factors by which bytes, sectors and misses grew, and the time that they may cost.

The rules about memory use this model: DRAM bytes = bytes that the threads need x sectors for them x misses in L2. Each factor above 1
lengthens a launch, at most in proportion, because every byte costs what the average byte costs. Together they account for at most
T (1 - 1 / product) of a launch of T seconds, each for its part by logarithm. For a kernel that is not bound by memory that is too much, so
further bytes are never slower than `SLOWEST` of the peak.

To add a cause: a function and its row in `rules_link` or `rules_memory`, and its sentence in `text.SENTENCES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pytest_gpumem.explain.evidence import SideFigures
from pytest_gpumem.explain.pairing import KernelPairs, base_names, pair

Two = tuple[float, float]  # a figure of base and of head
ABSORBED = 0.95
"""Share of the requests that a pattern causes alone, below which L1 serves a part of them."""


@dataclass(frozen=True)
class AccessChange:
    """The loads, or the stores, of one kernel on both sides."""

    kernel: str  # its base name; several names if they cannot be told apart
    load: bool  # loads; else stores
    seconds: float  # of the kernel in head
    sectors: Two | None  # sectors of one load or store of a warp
    used: Two | None  # share of the sectors' bytes that threads use
    ratio: float  # growth of the sectors for the same bytes; 1 if unknown
    l2: Two | None  # bytes that it requests from L2
    wanted: Two | None  # bytes that threads load or store

    @property
    def grown(self) -> float:
        """Growth of `l2`; 1 if unknown."""
        return self.l2[1] / self.l2[0] if self.l2 is not None and self.l2[0] > 0 else 1.0

    @property
    def wasted(self) -> float:
        """Further bytes from L2 because sectors are used in part."""
        if self.l2 is None or self.grown <= 1 or self.ratio <= 1:
            return 0.0
        further = (
            self.wanted[1] / self.wanted[0]
            if self.wanted is not None and self.wanted[0] > 0
            else 1.0
        )
        return self.l2[0] * max(
            0.0, min(self.ratio * max(1.0, further), self.grown) - max(1.0, further)
        )

    @property
    def further(self) -> float:
        """All other further bytes from L2; negative if there are fewer."""
        return 0.0 if self.l2 is None else self.l2[1] - self.l2[0] - self.wasted

    @property
    def absorbed(self) -> bool:
        """True if L1 serves a part of what the pattern alone would request from L2."""
        return self.l2 is not None and self.grown < ABSORBED * self.ratio


def accesses(kernels: KernelPairs, *, same_work: bool) -> Iterator[AccessChange]:
    """Loads and stores of all kernels that have a counterpart.
    `kernels`: with counters.
    `same_work`: both sides declare the same bytes. If nobody counted the used share, more sectors a request then mean a worse pattern, else
    they may be wider elements.
    """
    for was, now in kernels.pairs:
        for which in (0, 1):
            sectors, used = (
                _two(was.sectors(which), now.sectors(which)),
                _two(was.used(which), now.used(which)),
            )
            ratio = 1.0
            if used is not None:
                ratio = used[0] / used[1]
            elif sectors is not None and same_work:
                ratio = sectors[1] / sectors[0]
            name = base_names(now.names)
            l2, wanted = (
                _two(was.l2(which), now.l2(which)),
                _two(was.wanted(which), now.wanted(which)),
            )
            yield AccessChange(name, which == 0, now.seconds, sectors, used, ratio, l2, wanted)


def _two(was: float | None, now: float | None) -> Two | None:
    return (was, now) if was and now else None


SLOWEST = 0.2  # share of the DRAM peak below which no rate is assumed for further bytes
L2_OVER_DRAM = 2.0  # bandwidth of L2 over that of DRAM: 1.9 to 2.2 on an H200, by footprint (`l2_read`, ci/records/nvidia-h200/suite.json)
SAME_WORK = 0.05  # change of declared bytes that counts as none


@dataclass(frozen=True)
class BaseAndHead:
    """Base and head."""

    base: SideFigures
    head: SideFigures

    @cached_property
    def kernels(self) -> KernelPairs:
        """Kernels of both sides in pairs, and those that were added."""
        return pair(self.base.kernels, self.head.kernels)

    @property
    def counted(self) -> bool:
        """True if a profiler counted both sides' kernels."""
        return self.base.counted and self.head.counted

    @property
    def kernel_seconds(self) -> float:
        """Seconds of head's launch in kernels that base has too; all of it if nothing else is known to run."""
        alone = not self.head.copies and not self.kernels.added.parts
        seen = self.kernels.head.seconds
        return self.head.latency if alone or not seen else min(self.head.latency, seen)

    @cached_property
    def accesses(self) -> tuple[AccessChange, ...]:
        """Loads and stores of the kernels that both sides have; none without counters."""
        return (
            tuple(accesses(self.kernels, same_work=self.same_work or not self._both_declared))
            if self.counted
            else ()
        )

    @property
    def knows_accesses(self) -> bool:
        """True if sectors of loads or stores were counted."""
        return any(one.sectors is not None or one.used is not None for one in self.accesses)

    @cached_property
    def touched(self) -> float:
        """Growth of sectors per request in the records of kernels of the catalogue; 1 if unknown."""
        was, now = (
            self.base.measurement.sectors_per_request,
            self.head.measurement.sectors_per_request,
        )
        return now / was if was and now else 1.0

    @cached_property
    def pattern(self) -> float:
        """Growth of bytes from L2 for the same work, because sectors are used in part."""
        if not self.knows_accesses:
            return self.touched
        if not (asked := self.kernels.base.asked):
            return max(one.ratio for one in self.accesses)
        return 1 + math.fsum(one.wasted for one in self.accesses) / asked

    @property
    def _both_declared(self) -> bool:
        return bool(self.base.compulsory and self.head.compulsory)

    @property
    def same_work(self) -> bool:
        """True if both sides declare about the same bytes."""
        return self._both_declared and abs(self._declared - 1) <= SAME_WORK

    @property
    def _declared(self) -> float:
        was, now = self.base.compulsory, self.head.compulsory
        return now / was if was and now else 1.0

    @cached_property
    def asked(self) -> float:
        """Growth of the bytes that threads need: of the declared or the requested ones, whichever grew more.

        A kernel of the catalogue knows its bytes. The bytes that its SMs request from L2 also depend on L1: blocks that read the same
        table side by side requested half as much where they were slower (ci/records/nvidia-h200/l2_proof.json).
        """
        if (
            self.base.measurement.kernel_source is not None
            and self.head.measurement.kernel_source is not None
            and self._both_declared
        ):
            return self._declared
        was, now = self.kernels.base.asked, self.kernels.head.asked
        counted = now / was / max(1.0, self.pattern) if self.counted and was and now else 1.0
        return max(self._declared, counted)

    @cached_property
    def dram(self) -> float | None:
        """Growth of DRAM bytes; None if they were not counted."""
        was, now = self.kernels.base.dram, self.kernels.head.dram
        return now / was if self.counted and was and now else None

    @cached_property
    def misses(self) -> float:
        """Growth of DRAM bytes for the same requests to L2."""
        return (
            1.0 if self.dram is None else self.dram / max(1.0, self.pattern) / max(1.0, self.asked)
        )

    def seconds_of(self, factor: float) -> float:
        """Seconds that one of `pattern`, `asked` and `misses` accounts for at most; 0 if it did not grow."""
        factors = [max(1.0, one) for one in (self.pattern, self.asked, self.misses)]
        whole = math.log(math.prod(factors))
        if factor <= 1 or whole <= 0:
            return 0.0
        seconds = self.kernel_seconds * -math.expm1(-whole)
        return min(seconds, self._cap) * math.log(factor) / whole

    @property
    def _cap(self) -> float:
        """Seconds of the further bytes at the slowest assumed rate; infinite if the bytes are unknown."""
        peak = self.head.facts.dram_peak
        if not peak:
            return math.inf
        base, head = self.kernels.base, self.kernels.head
        if self.counted and base.dram is not None and head.dram is not None:
            asked = max(0.0, (head.asked or 0.0) - (base.asked or 0.0)) / L2_OVER_DRAM
            more = max(0.0, head.dram - base.dram, asked)
        elif self.base.compulsory and self.head.compulsory:
            more = max(0.0, self.head.compulsory * max(1.0, self.pattern) - self.base.compulsory)
        else:
            return math.inf
        return more / (SLOWEST * peak)

    @property
    def memory_share(self) -> float:
        """Share of head's launch in which DRAM would be busy at its peak, 0 to 1. The SM clock does not change it."""
        moved = self.kernels.head.dram if self.head.counted else self.head.compulsory
        peak = self.head.facts.dram_peak
        return min(1.0, moved / peak / self.head.latency) if moved and peak else 0.0


Pair = tuple[float | None, float | None]  # a figure of base and of head; None where unknown

GAP_SECONDS = 1.5e-6
"""Seconds that one more kernel or copy costs on a stream besides its own work: an empty kernel between two events takes 2 us."""


@dataclass(frozen=True)
class Estimate:
    """The change that a rule found, and its cost."""

    seconds: float  # seconds of the slow-down that it accounts for
    figures: Mapping[str, Pair] = field(
        default_factory=dict
    )  # by name: bytes, hertz, seconds, counts and shares
    details: Mapping[str, str] = field(default_factory=dict)  # codes and names, such as of a kernel
    open: bool = False
    """`seconds` is a lower bound: it may account for all that no other cause does."""
    reserve: float = 0.0
    """Further seconds at most, because it only lengthens waiting. They come out of the rest that all other causes leave."""
    measured: bool = False  # `reserve` is a difference of traced times: what it has of the slow-down is no upper bound


@dataclass(frozen=True)
class Need:
    """Evidence that a rule requires."""

    words: str  # how to get it
    met: Callable[[BaseAndHead], bool]


@dataclass(frozen=True)
class Rule:
    """One row of the table of rules."""

    name: str  # code of the cause, also in JSON
    looks_at: str
    threshold: float  # second argument of `find`
    means: str  # the quantity that the threshold limits
    estimate: str  # how the seconds are estimated
    needs: tuple[Need, ...]
    find: Callable[[BaseAndHead, float], Estimate | None]  # None below the threshold
