"""Kernels of one launch as figures, and the pairs that the kernels of two sides form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_gpumem.records.uses import KernelUse

Accesses = tuple[float | None, float | None]  # a figure of loads and of stores; None where unknown


@dataclass(frozen=True)
class KernelFigures:
    """All launches of one kernel, of any shape, within one measured launch."""

    name: str
    count: float  # launches
    seconds: float  # running time of all of them, by the tool that recorded them
    dram_read: float | None  # bytes
    dram_written: float | None  # bytes
    l2: Accesses  # bytes that the SMs read from L2 and wrote to it, in whole sectors
    l1: Accesses  # bytes of the sectors that loads and stores touch, before L1 serves any of them
    hit_rate: float | None  # l2 hit rate, 0 to 1
    sectors: Accesses  # sectors of one load and of one store of a warp
    used: Accesses  # share of the sectors' bytes that loads and stores use
    occupancy: float | None  # achieved, 0 to 1
    blocks: int  # of its longest shape
    threads: int  # threads of a block of that shape
    registers: int | None

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return _sum((self.dram_read, self.dram_written))

    @property
    def asked(self) -> float | None:
        """Bytes that the SMs requested from L2, reads and writes."""
        return _sum(self.l2)

    def share(self, part: float) -> KernelFigures:
        """The same kernel with `part` of its launches."""

        def scaled(figure: float | None) -> float | None:
            return None if figure is None else figure * part

        return replace(
            self,
            count=self.count * part,
            seconds=self.seconds * part,
            dram_read=scaled(self.dram_read),
            dram_written=scaled(self.dram_written),
            l2=(scaled(self.l2[0]), scaled(self.l2[1])),
            l1=(scaled(self.l1[0]), scaled(self.l1[1])),
        )


@dataclass(frozen=True)
class KernelGroup:
    """Several kernels of one side together. Each figure is None unless it is known."""

    kernels: tuple[KernelFigures, ...]

    @property
    def seconds(self) -> float:
        """Running time, by the tool that recorded them."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def dram_read(self) -> float | None:
        """Bytes."""
        return _sum(kernel.dram_read for kernel in self.kernels)

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return _sum(kernel.dram for kernel in self.kernels)

    @property
    def asked(self) -> float | None:
        """Bytes that the SMs requested from L2."""
        return _sum(kernel.asked for kernel in self.kernels)

    @property
    def hit_rate(self) -> float | None:
        """L2 hit rate, weighted by requested bytes."""
        return self._mean(lambda kernel: kernel.hit_rate)

    def l2(self, which: int) -> float | None:
        """Bytes that the SMs read from L2 (0) or wrote to it (1)."""
        return _sum(kernel.l2[which] for kernel in self.kernels)

    def sectors(self, which: int) -> float | None:
        """Sectors of one load (0) or store (1)."""
        return self._mean(lambda kernel: kernel.sectors[which])

    def used(self, which: int) -> float | None:
        """Share of the sectors' bytes that loads (0) or stores (1) use."""
        return self._mean(lambda kernel: kernel.used[which])

    def wanted(self, which: int) -> float | None:
        """Bytes that threads load (0) or store (1), each as often as it is requested."""
        return _sum(
            None if (touched := kernel.l1[which]) is None or (used := kernel.used[which]) is None else touched * used
            for kernel in self.kernels
        )

    def _mean(self, figure: Callable[[KernelFigures], float | None]) -> float | None:
        return _mean((figure(kernel), kernel.asked if kernel.asked is not None else kernel.seconds) for kernel in self.kernels)


@dataclass(frozen=True)
class KernelPairs:
    """The kernels of two sides: those that do the same work, and those that only head runs."""

    pairs: tuple[tuple[KernelGroup, KernelGroup], ...]
    """Base's and head's kernels of the same work: one of each, or several if they cannot be told apart."""
    added: tuple[KernelFigures, ...]  # kernels of head, or further launches of one, without a counterpart in base
    replaced: tuple[KernelFigures, ...]  # kernels of base that `added` replaces, such as a fused one that was split; empty if none went

    @property
    def alike(self) -> tuple[tuple[KernelFigures, KernelFigures], ...]:
        """The pairs of one kernel each."""
        return tuple((was.kernels[0], now.kernels[0]) for was, now in self.pairs if len(was.kernels) == len(now.kernels) == 1)

    @property
    def base(self) -> KernelGroup:
        """Base's kernels that have a counterpart."""
        return KernelGroup(tuple(kernel for was, _ in self.pairs for kernel in was.kernels))

    @property
    def head(self) -> KernelGroup:
        """Their counterparts."""
        return KernelGroup(tuple(kernel for _, now in self.pairs for kernel in now.kernels))


def pair(base: Sequence[KernelFigures], head: Sequence[KernelFigures]) -> KernelPairs:
    """Pair kernels by name, the others by their order if both sides have as many. If head has more of the others, they were added."""
    named = {kernel.name: kernel for kernel in head}
    pairs, added = [], []
    for was in base:
        if (now := named.get(was.name)) is None:
            continue
        if now.count > was.count > 0:
            added.append(now.share(1 - was.count / now.count))
            now = now.share(was.count / now.count)
        pairs.append((KernelGroup((was,)), KernelGroup((now,))))
    names = {kernel.name for kernel in base}
    gone = tuple(kernel for kernel in base if kernel.name not in named)
    new = tuple(kernel for kernel in head if kernel.name not in names)
    if sum(kernel.count for kernel in new) > sum(kernel.count for kernel in gone):
        return KernelPairs(tuple(pairs), (*added, *new), gone)
    if len(gone) == len(new):
        pairs += [(KernelGroup((was,)), KernelGroup((now,))) for was, now in zip(gone, new, strict=True)]
    else:
        pairs.append((KernelGroup(gone), KernelGroup(new)))
    return KernelPairs(tuple(pairs), tuple(added), ())


def by_name(uses: Sequence[KernelUse], launches: int) -> tuple[KernelFigures, ...]:
    """The figures of each kernel in one of `launches` launches."""
    found: dict[str, list[KernelUse]] = {}
    for use in uses:
        found.setdefault(use.name, []).append(use)
    return tuple(_figures(name, same, launches) for name, same in found.items())


def _figures(name: str, uses: Sequence[KernelUse], launches: int) -> KernelFigures:
    def each(figure: Callable[[KernelUse], int | None]) -> float | None:
        total = _sum(figure(use) for use in uses)
        return None if total is None else total / launches

    def mean(figure: Callable[[KernelUse], float | None]) -> float | None:
        return _mean((figure(use), use.nanoseconds) for use in uses)

    longest = max(uses, key=lambda use: use.nanoseconds)
    return KernelFigures(
        name=name,
        count=sum(use.launches for use in uses) / launches,
        seconds=sum(use.nanoseconds for use in uses) / launches / 1e9,
        dram_read=each(lambda use: use.dram_read),
        dram_written=each(lambda use: use.dram_written),
        l2=(each(lambda use: use.l2_read), each(lambda use: use.l2_written)),
        l1=(each(lambda use: use.l1_load), each(lambda use: use.l1_store)),
        hit_rate=mean(lambda use: use.l2_hit_rate),
        sectors=(mean(lambda use: use.sectors_per_request), mean(lambda use: use.sectors_per_store)),
        used=(mean(lambda use: use.used_of_load), mean(lambda use: use.used_of_store)),
        occupancy=mean(lambda use: use.occupancy),
        blocks=longest.grid[0] * longest.grid[1] * longest.grid[2],
        threads=longest.block[0] * longest.block[1] * longest.block[2],
        registers=longest.registers,
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    known = list(figures)
    return None if not known or any(one is None for one in known) else sum(one or 0 for one in known)


def _mean(weighted: Iterable[tuple[float | None, float]]) -> float | None:
    """The mean of the known figures by their weights; None without any."""
    known = [(value, weight) for value, weight in weighted if value is not None]
    whole = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / whole if whole else None


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
    gone, new = ([name for name in dict.fromkeys(one) if name not in other] for one, other in ((base, head), (head, base)))
    short = base_names(gone), base_names(new)
    return short if short[0] != short[1] else (_with_arguments(gone), _with_arguments(new))


def _with_arguments(names: Iterable[str]) -> str:
    whole = (name.removeprefix("void ").replace("(anonymous namespace)::", "").partition(">(")[0] for name in names)
    closed = (f"{one}>" if one.count("<") > one.count(">") else one for one in whole)
    return ", ".join(one if len(one) <= LONGEST else f"{one[:LONGEST]}..." for one in closed)
