"""The kernels of a measured launch, the pairs that those of two sides form, and their names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from pytest_gpumem.records.uses import KernelUse


@dataclass(frozen=True)
class KernelGroup:
    """Kernels that run within one measured launch. A figure is None unless it is known of all of them."""

    parts: tuple[tuple[KernelUse, float], ...] = ()
    """Each with the divisor of its sums: 10 where a tool recorded ten measured launches, 20 for one of the two launches in each."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each name once."""
        return tuple(dict.fromkeys(use.name for use, _ in self.parts))

    @property
    def count(self) -> float:
        """Launches of kernels."""
        return sum(use.launches / divisor for use, divisor in self.parts)

    @property
    def seconds(self) -> float:
        """Running time, by the tool that recorded them."""
        return sum(use.nanoseconds / divisor for use, divisor in self.parts) / 1e9

    @property
    def dram_read(self) -> float | None:
        """Bytes."""
        return self._sum(lambda use: use.dram_read)

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return self._sum(lambda use: use.dram_read, lambda use: use.dram_written)

    @property
    def asked(self) -> float | None:
        """Bytes that the SMs requested from L2, in whole sectors."""
        return self._sum(lambda use: use.l2_read, lambda use: use.l2_written)

    @property
    def hit_rate(self) -> float | None:
        """L2 hit rate, 0 to 1."""
        return self._mean(lambda use: use.l2_hit_rate)

    @property
    def occupancy(self) -> float | None:
        """Achieved occupancy, 0 to 1."""
        return self._mean(lambda use: use.occupancy, by_time=True)

    def l2(self, which: int) -> float | None:
        """Bytes that the SMs read from L2 (0) or wrote to it (1), in whole sectors."""
        return self._sum(lambda use: (use.l2_read, use.l2_written)[which])

    def sectors(self, which: int) -> float | None:
        """Sectors of one load (0) or store (1) of a warp."""
        return self._mean(lambda use: (use.sectors_per_request, use.sectors_per_store)[which])

    def used(self, which: int) -> float | None:
        """Share of the sectors' bytes that loads (0) or stores (1) use."""
        return self._mean(lambda use: (use.used_of_load, use.used_of_store)[which])

    def wanted(self, which: int) -> float | None:
        """Bytes that threads load (0) or store (1), each as often as it is requested: the used share of what L1 is asked for."""

        def of(use: KernelUse) -> float | None:
            touched, used = ((use.l1_load, use.used_of_load), (use.l1_store, use.used_of_store))[
                which
            ]
            return None if touched is None or used is None else touched * used

        return self._sum(of)

    @cached_property
    def longest(self) -> KernelUse:
        """The kernel and shape that takes longest."""
        return max(self.parts, key=lambda part: part[0].nanoseconds / part[1])[0]

    @property
    def threads(self) -> tuple[int, int]:
        """Blocks, and threads of a block, of the longest."""
        return prod(self.longest.grid), prod(self.longest.block)

    def share(self, part: float) -> KernelGroup:
        """The same kernels with `part` of their launches."""
        return KernelGroup(tuple((use, divisor / part) for use, divisor in self.parts))

    def by_name(self) -> dict[str, KernelGroup]:
        """The kernels of each name."""
        return {
            name: KernelGroup(tuple(part for part in self.parts if part[0].name == name))
            for name in self.names
        }

    def _sum(self, *figures: Callable[[KernelUse], float | None]) -> float | None:
        known = [(figure(use), divisor) for use, divisor in self.parts for figure in figures]
        return (
            None
            if not known or any(one is None for one, _ in known)
            else sum((one or 0) / divisor for one, divisor in known)
        )

    def _mean(
        self, figure: Callable[[KernelUse], float | None], *, by_time: bool = False
    ) -> float | None:
        """The mean of what is known, weighted by the requested bytes; by time where these are unknown."""
        by_time = by_time or self.asked is None
        known = [
            (
                value,
                (use.nanoseconds if by_time else (use.l2_read or 0) + (use.l2_written or 0))
                / divisor,
            )
            for use, divisor in self.parts
            if (value := figure(use)) is not None
        ]
        whole = sum(weight for _, weight in known)
        return sum(value * weight for value, weight in known) / whole if whole else None


def together(groups: Iterable[KernelGroup]) -> KernelGroup:
    """Several groups as one."""
    return KernelGroup(tuple(part for group in groups for part in group.parts))


@dataclass(frozen=True)
class KernelPairs:
    """The kernels of two sides: those that do the same work, and those that only head runs."""

    pairs: tuple[tuple[KernelGroup, KernelGroup], ...]
    """Base's and head's kernels of the same work: of one name each, or of several if they cannot be told apart."""
    added: KernelGroup  # kernels of head, or further launches of one, without a counterpart in base
    replaced: KernelGroup  # kernels of base that `added` replaces, such as a fused one that was split; empty if none went

    @property
    def alike(self) -> tuple[tuple[KernelGroup, KernelGroup], ...]:
        """The pairs of one kernel each."""
        return tuple((was, now) for was, now in self.pairs if len(was.names) == len(now.names) == 1)

    @cached_property
    def base(self) -> KernelGroup:
        """Base's kernels that have a counterpart."""
        return together(was for was, _ in self.pairs)

    @cached_property
    def head(self) -> KernelGroup:
        """Their counterparts."""
        return together(now for _, now in self.pairs)


def pair(base: KernelGroup, head: KernelGroup) -> KernelPairs:
    """Pair kernels by name, the others by their order if both sides have as many. If head has more of the others, they were added."""
    before, after = base.by_name(), head.by_name()
    pairs, added = list[tuple[KernelGroup, KernelGroup]](), list[KernelGroup]()
    for was, now in ((was, after[name]) for name, was in before.items() if name in after):
        part = was.count / now.count if now.count else 1.0
        if 0 < part < 1:
            added.append(now.share(1 - part))
        pairs.append((was, now.share(part) if 0 < part < 1 else now))
    gone = [was for name, was in before.items() if name not in after]
    new = [now for name, now in after.items() if name not in before]
    if together(new).count > together(gone).count:
        return KernelPairs(tuple(pairs), together([*added, *new]), together(gone))
    pairs += (
        zip(gone, new, strict=True) if len(gone) == len(new) else [(together(gone), together(new))]
    )
    return KernelPairs(tuple(pairs), together(added), KernelGroup())


# Names

LONGEST = 60  # characters of a name with its template arguments
_OPENS, _CLOSES = "<([{", ">)]}"


def base_name(name: str) -> str:
    """The function alone, without return type, namespaces, template arguments and parameters, as Nsight's base names.
    `name`: demangled, or mangled as CUPTI reports it (Itanium C++ ABI); any other name is returned as it is.
    """
    if name.startswith("_Z"):
        return _mangled(name) or name
    depth, kept = 0, []
    for letter in name.replace("->", "  "):
        depth -= letter in _CLOSES
        if depth <= 0 and letter not in _OPENS + _CLOSES:
            kept.append(letter)
        depth += letter in _OPENS
    words = "".join(kept).rpartition("::")[2].split()
    return words[-1] if words else name


def _mangled(name: str) -> str:
    """The last of the parts at the start of a mangled name, each of which is its length and itself; "" without one."""
    last, rest = "", re.sub(r"^_Z[NLK]*", "", name)
    while found := re.match(r"[0-9]+", rest):
        end = found.end() + int(found[0])
        last, rest = rest[found.end() : end], rest[end:]
    return last


def base_names(names: Iterable[str]) -> str:
    """Base names of some kernels, each once."""
    return ", ".join(dict.fromkeys(map(base_name, names)))


def only(base: Sequence[str], head: Sequence[str]) -> tuple[str, str]:
    """The kernels that only base runs, and those that only head runs: base names, or with template arguments if only these differ."""
    gone, new = (
        [name for name in dict.fromkeys(one) if name not in other]
        for one, other in ((base, head), (head, base))
    )
    short = base_names(gone), base_names(new)
    return short if short[0] != short[1] else (_with_arguments(gone), _with_arguments(new))


def _with_arguments(names: Iterable[str]) -> str:
    whole = (
        name.removeprefix("void ").replace("(anonymous namespace)::", "").partition(">(")[0]
        for name in names
    )
    closed = (f"{one}>" if one.count("<") > one.count(">") else one for one in whole)
    return ", ".join(one if len(one) <= LONGEST else f"{one[:LONGEST]}..." for one in closed)
