"""Kernels of one launch as figures, and how those of two sides belong together."""

from __future__ import annotations

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
    asked: float | None
    """Bytes that the SMs asked of L2, reads and writes, in whole sectors."""
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
            asked=scaled(self.asked),
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

    def sectors(self, which: int) -> float | None:
        """Sectors of one load (0) or store (1)."""
        return self._mean(lambda kernel: kernel.sectors[which])

    def used(self, which: int) -> float | None:
        """Share of the sectors' bytes that loads (0) or stores (1) use."""
        return self._mean(lambda kernel: kernel.used[which])

    def _mean(self, figure: Callable[[OneKernel], float | None]) -> float | None:
        known = [(value, kernel.asked if kernel.asked is not None else kernel.seconds) for kernel in self.kernels
                 if (value := figure(kernel)) is not None]  # fmt: skip
        weight = sum(each for _, each in known)
        return sum(value * each for value, each in known) / weight if weight else None


@dataclass(frozen=True)
class Paired:
    """The kernels of two sides: those that do the same work, and those that only head runs."""

    base: Total
    head: Total
    added: tuple[OneKernel, ...]
    """Kernels of head, or further launches of one, that base has no counterpart for."""
    replaced: tuple[OneKernel, ...]
    """Kernels of base that `added` stands for, such as a fused one that was split; empty where nothing went."""


def pair(base: Sequence[OneKernel], head: Sequence[OneKernel]) -> Paired:
    """Put kernels of the same name together; those of other names in their order where there are as many, else they were added."""
    names = {kernel.name for kernel in base} & {kernel.name for kernel in head}
    common_base, common_head, added = [], [], []
    for kernel in base:
        if kernel.name in names:
            common_base.append(kernel)
    for kernel in head:
        if kernel.name in names:
            was = next(one for one in base if one.name == kernel.name)
            if kernel.count > was.count > 0:
                common_head.append(kernel.share(was.count / kernel.count))
                added.append(kernel.share(1 - was.count / kernel.count))
            else:
                common_head.append(kernel)
    gone = tuple(kernel for kernel in base if kernel.name not in names)
    new = tuple(kernel for kernel in head if kernel.name not in names)
    if sum(kernel.count for kernel in new) > sum(kernel.count for kernel in gone):
        return Paired(Total(tuple(common_base)), Total(tuple(common_head)), (*added, *new), gone)
    return Paired(Total((*common_base, *gone)), Total((*common_head, *new)), tuple(added), ())


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
        asked=each(lambda use: None if use.l2_read is None or use.l2_written is None else use.l2_read + use.l2_written),
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
