"""Kernels of one launch as figures, and how those of two sides belong together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pytest_gpumem.records.uses import KernelUse


@dataclass(frozen=True)
class OneKernel:
    """All launches of one kernel within a single measured launch, whatever their shapes."""

    name: str
    count: float
    """Launches."""
    seconds: float
    """Running time of all of them, as the tool that watched saw it."""
    dram_read: float | None
    """Bytes."""
    dram_written: float | None
    """Bytes."""
    l2: tuple[float | None, float | None]
    """Bytes that the SMs read from L2 and wrote to it, in whole sectors."""
    l1: tuple[float | None, float | None]
    """Bytes of the sectors that loads and stores touch, before L1 serves any of them."""
    hit_rate: float | None
    """Share of what was asked of L2 that it had."""
    sectors: tuple[float | None, float | None]
    """Sectors of one load and of one store of a warp."""
    used: tuple[float | None, float | None]
    """Share of the sectors' bytes that loads and stores use."""
    occupancy: float | None
    """Achieved, 0 to 1."""
    blocks: int
    """Of its largest shape."""
    threads: int
    """Threads of a block of that shape."""
    registers: int | None
    local: int | None
    """Bytes of local memory of a thread."""

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return None if self.dram_read is None or self.dram_written is None else self.dram_read + self.dram_written

    @property
    def asked(self) -> float | None:
        """Bytes that the SMs asked of L2, reads and writes."""
        return _sum(self.l2)

    def share(self, part: float) -> OneKernel:
        """The same kernel launched `part` times as often."""

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
class Total:
    """Several kernels of one side together."""

    kernels: tuple[OneKernel, ...]

    @property
    def seconds(self) -> float:
        """Running time as it was watched."""
        return sum(kernel.seconds for kernel in self.kernels)

    @property
    def count(self) -> float:
        """Launches."""
        return sum(kernel.count for kernel in self.kernels)

    @property
    def dram_read(self) -> float | None:
        """Bytes."""
        return _sum(kernel.dram_read for kernel in self.kernels)

    @property
    def dram_written(self) -> float | None:
        """Bytes."""
        return _sum(kernel.dram_written for kernel in self.kernels)

    @property
    def dram(self) -> float | None:
        """Bytes read from and written to DRAM."""
        return _sum(kernel.dram for kernel in self.kernels)

    @property
    def asked(self) -> float | None:
        """Bytes asked of L2 by the SMs."""
        return _sum(kernel.asked for kernel in self.kernels)

    @property
    def hit_rate(self) -> float | None:
        """L2 hit rate, weighted by what was asked."""
        return self._mean(lambda kernel: kernel.hit_rate)

    @property
    def occupancy(self) -> float | None:
        """Achieved occupancy, weighted by time."""
        known = [(kernel.occupancy, kernel.seconds) for kernel in self.kernels if kernel.occupancy is not None]
        weight = sum(seconds for _, seconds in known)
        return sum(value * seconds for value, seconds in known) / weight if weight else None

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
        """Bytes that threads load (0) or store (1), each as often as it is asked for."""
        return _sum(
            None if (touched := kernel.l1[which]) is None or (used := kernel.used[which]) is None else touched * used
            for kernel in self.kernels
        )

    def _mean(self, figure: Callable[[OneKernel], float | None]) -> float | None:
        known = [(value, kernel.asked if kernel.asked is not None else kernel.seconds) for kernel in self.kernels
                 if (value := figure(kernel)) is not None]  # fmt: skip
        weight = sum(each for _, each in known)
        return sum(value * each for value, each in known) / weight if weight else None


@dataclass(frozen=True)
class Paired:
    """The kernels of two sides: those that do the same work, and those that only head runs."""

    pairs: tuple[tuple[Total, Total], ...]
    """Base's and head's kernels of the same work: one of each, or several where they cannot be told apart."""
    added: tuple[OneKernel, ...]
    """Kernels of head, or further launches of one, that base has no counterpart for."""
    replaced: tuple[OneKernel, ...]
    """Kernels of base that `added` stands for, such as a fused one that was split; empty where nothing went."""

    @property
    def alike(self) -> tuple[tuple[OneKernel, OneKernel], ...]:
        """The pairs of one kernel each."""
        return tuple((was.kernels[0], now.kernels[0]) for was, now in self.pairs if len(was.kernels) == len(now.kernels) == 1)

    @property
    def base(self) -> Total:
        """Base's kernels that have a counterpart."""
        return Total(tuple(kernel for was, _ in self.pairs for kernel in was.kernels))

    @property
    def head(self) -> Total:
        """Their counterparts."""
        return Total(tuple(kernel for _, now in self.pairs for kernel in now.kernels))


def pair(base: Sequence[OneKernel], head: Sequence[OneKernel]) -> Paired:
    """Put kernels of the same name together; those of other names in their order where there are as many, else they were added."""
    named = {kernel.name: kernel for kernel in head}
    pairs, added = [], []
    for was in base:
        if (now := named.get(was.name)) is None:
            continue
        if now.count > was.count > 0:
            added.append(now.share(1 - was.count / now.count))
            now = now.share(was.count / now.count)
        pairs.append((Total((was,)), Total((now,))))
    names = {kernel.name for kernel in base}
    gone = tuple(kernel for kernel in base if kernel.name not in named)
    new = tuple(kernel for kernel in head if kernel.name not in names)
    if sum(kernel.count for kernel in new) > sum(kernel.count for kernel in gone):
        return Paired(tuple(pairs), (*added, *new), gone)
    if len(gone) == len(new):
        pairs += [(Total((was,)), Total((now,))) for was, now in zip(gone, new, strict=True)]
    else:
        pairs.append((Total(gone), Total(new)))
    return Paired(tuple(pairs), tuple(added), ())


def by_name(uses: Sequence[KernelUse], launches: int) -> tuple[OneKernel, ...]:
    """All uses of each kernel together, as figures of one of so many launches."""
    found: dict[str, list[KernelUse]] = {}
    for use in uses:
        found.setdefault(use.name, []).append(use)
    return tuple(_one(name, same, launches) for name, same in found.items())


def _one(name: str, uses: Sequence[KernelUse], launches: int) -> OneKernel:
    def each(figure: Callable[[KernelUse], int | None]) -> float | None:
        total = _sum(figure(use) for use in uses)
        return None if total is None else total / launches

    def mean(figure: Callable[[KernelUse], float | None]) -> float | None:
        known = [(value, use.nanoseconds) for use in uses if (value := figure(use)) is not None]
        weight = sum(time for _, time in known)
        return sum(value * time for value, time in known) / weight if weight else None

    largest = max(uses, key=lambda use: use.nanoseconds)
    return OneKernel(
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
        blocks=largest.grid[0] * largest.grid[1] * largest.grid[2],
        threads=largest.block[0] * largest.block[1] * largest.block[2],
        registers=largest.registers,
        local=largest.local,
    )


def _sum(figures: Iterable[float | None]) -> float | None:
    known = list(figures)
    return None if not known or any(one is None for one in known) else sum(one or 0 for one in known)


LONGEST = 60
"""Characters of a name with its template arguments."""
_OPENS, _CLOSES = "<([{", ">)]}"


def base_name(name: str) -> str:
    """The function alone, without return type, namespaces, template arguments and parameters, as Nsight's base names are.

    Args:
        name: demangled, or mangled as CUPTI has it (Itanium C++ ABI); any other name stays as it is.
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
    """The last of the parts that lead a mangled name, each written as its length and itself; "" where there is none."""
    last, rest = "", re.sub(r"^_Z[NLK]*", "", name)
    while found := re.match(r"[0-9]+", rest):
        end = found.end() + int(found[0])
        last, rest = rest[found.end() : end], rest[end:]
    return last


def base_names(names: Iterable[str]) -> str:
    """Base names of some kernels, each once."""
    return ", ".join(dict.fromkeys(map(base_name, names)))


def only(base: Sequence[str], head: Sequence[str]) -> tuple[str, str]:
    """The kernels that only base runs, and those that only head runs: base names, with template arguments where only these differ."""
    gone, new = ([name for name in dict.fromkeys(one) if name not in other] for one, other in ((base, head), (head, base)))
    short = base_names(gone), base_names(new)
    return short if short[0] != short[1] else (_with_arguments(gone), _with_arguments(new))


def _with_arguments(names: Iterable[str]) -> str:
    whole = (name.removeprefix("void ").replace("(anonymous namespace)::", "").partition(">(")[0] for name in names)
    closed = (f"{one}>" if one.count("<") > one.count(">") else one for one in whole)
    return ", ".join(one if len(one) <= LONGEST else f"{one[:LONGEST]}..." for one in closed)
