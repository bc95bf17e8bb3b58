"""The time of a launch: its traffic between DRAM, L2, the SMs and the host, and the bound of each.

A launch is known by its accesses and its shape alone. For each access the model asks how many of its bytes hit L2, given what earlier
launches left there, what streams by between two uses of a line, and the access-policy window. The bounds are DRAM and L2 traffic over
bandwidth, loads in flight over latency (Little's law), and link traffic over bandwidth; a norm joins them, as none hides another wholly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pytest_gpumem.devices.protocol import AccessProperty, Allocation, WindowSpec
from pytest_gpumem.devices.simulated.datasheets import Datasheet
from pytest_gpumem.devices.simulated.l2 import L2Lines, State, miss_ratio
from pytest_gpumem.devices.simulated.pages import PageLog, Pages
from pytest_gpumem.kernels.kernel import Access, LaunchShape

_SECTORS = 4.0  # sectors of a coalesced warp-wide request of 4-byte words
_WORDS = 8.0  # words of 4 bytes in a sector: a request that moves eight times what it asks for has a sector for each word
_KNOWN = 1024  # launches whose outcome is remembered
_SATURATED = 2 / 3
"""Share of a launch's time from which on writes that keep the memory busy fill the queue of
dirty lines."""


@dataclass
class Use:
    """The accesses of one launch to one allocation, together."""

    allocation: Allocation
    pages: Pages | None  # of managed memory
    itemsize: int
    footprint: float = 0.0  # bytes that move for the distinct bytes touched, whole sectors counted
    reads: float = 0.0  # of them, read
    writes: float = 0.0  # of them, written
    read_requests: float = 0.0  # bytes that threads ask for
    write_requests: float = 0.0
    inflation: float = 1.0  # bytes moved for a byte asked for
    l2_inflation: float = 1.0  # the same between L2 and the SMs, where no neighbour helps
    dependent: bool = False
    random: bool = False
    nearby: bool = False
    onward: bool = False
    through_l1: bool = False
    page_by_page: bool = False
    per_sm: float = math.inf  # bytes of it that one SM reads over and over; infinite where no load finds a line of it in L1
    by_all: bool = False  # all SMs read the same lines over and over

    def add(self, access: Access, sheet: Datasheet) -> None:
        """Count an access."""
        sectors = max(access.sectors_per_request, 1.0)
        extra = sectors - _SECTORS
        # The fifth sector of a misaligned request is the next warp's first: most of it hits.
        moved = 1.0 + (extra * sheet.edge_cost if 0.0 < extra <= 1.0 else extra) / _SECTORS
        self.inflation = max(self.inflation, moved)
        self.l2_inflation = max(self.l2_inflation, sectors / _SECTORS)
        # Whole sectors move, unless neighbours ask for the rest of each soon after.
        whole = 1.0 if access.nearby else moved
        distinct = min(
            access.footprint * whole, max(float(access.footprint), float(self.allocation.nbytes))
        )
        self.footprint = max(self.footprint, distinct)
        self.dependent |= access.dependent
        self.random |= access.random
        self.nearby |= access.nearby
        self.onward |= access.onward
        self.through_l1 |= access.through_l1
        self.page_by_page |= access.page_by_page
        if access.direction == "read":
            self.reads = max(self.reads, distinct)
            self.read_requests += access.requested
        else:
            self.writes = max(self.writes, distinct)
            self.write_requests += access.requested

    @property
    def scattered(self) -> bool:
        """Requests leave sectors partly used, and no neighbour asks for the rest. One sector more is a misaligned request."""
        return self.l2_inflation > 1.0 + 1.0 / _SECTORS and not self.nearby and not self.dependent

    @property
    def density(self) -> float:
        """Share of the allocation's sectors that a scattered access moves; 1 for any other."""
        return (
            min(1.0, self.footprint / self.allocation.nbytes)
            if self.scattered and self.l2_inflation >= _WORDS
            else 1.0
        )


@dataclass(frozen=True)
class LaunchWork:
    """One launch as the model sees it."""

    uses: tuple[Use, ...]
    local: tuple[Use, ...]  # of them, those in device memory
    threads: int  # threads in flight
    loops: bool  # threads load again and again: their index arithmetic comes on top of the latency. Otherwise other blocks hide it.
    loads_in_flight: int
    dependent_steps: float  # length of the longest chain of dependent accesses
    addresses: tuple[int, ...]  # where its memory lies
    footprint: float  # distinct bytes touched in device memory
    reach: float  # bytes over which they lie: dependent accesses touch lines all over an array
    written: float  # of them, written
    on_chip: float = 0.0  # seconds for which L1 and shared memory are busy with its requests
    on_chip_loads: float = 0.0  # loads from shared memory that threads wait for, over all threads
    turnover: float = 0.0  # seconds in which blocks make room for the blocks that wait for a place


def work_of(
    sheet: Datasheet,
    pages: Mapping[int, Pages],
    accesses: Sequence[tuple[Access, Allocation, int]],
    shape: LaunchShape,
    loads_in_flight: int,
    dependent_steps: float | None,
    on_chip_cycles: float = 0.0,
    on_chip_loads: float = 0.0,
) -> LaunchWork:
    """Gather the accesses of a launch by allocation.
    `pages`: of managed memory, by the identity of the allocation.
    `accesses`: each with its allocation and the size of an element.
    `shape`: grid and block.
    `loads_in_flight`: independent loads of one thread.
    `dependent_steps`: length of the chain of dependent accesses, where the kernel says it.
    `on_chip_cycles`: cycles that one SM's L1 and shared memory would need for all requests.
    `on_chip_loads`: loads from shared memory that threads wait for.
    """
    uses: dict[int, Use] = {}
    steps = 0.0
    per_sm = min(
        sheet.max_blocks_per_sm,
        sheet.max_threads_per_sm // max(1, shape.threads),
        sheet.shared_bytes_per_sm // shape.shared_bytes
        if shape.shared_bytes
        else sheet.max_blocks_per_sm,
    )
    for access, allocation, itemsize in accesses:
        use = uses.setdefault(id(allocation), Use(allocation, pages.get(id(allocation)), itemsize))
        use.add(access, sheet)
        if access.wrapping:
            of_block = _of_block(allocation.nbytes // itemsize, shape) * itemsize
            use.per_sm = min(
                float(allocation.nbytes),
                of_block * min(float(per_sm), max(1.0, shape.blocks / sheet.sm_count)),
            )
            use.by_all = of_block * shape.blocks > allocation.nbytes
        if access.dependent:
            steps = max(steps, access.requested / itemsize)
    resident = max(1, min(shape.blocks, sheet.sm_count * max(1, per_sm)))
    threads = resident * max(1, shape.threads)
    gathered = tuple(uses.values())
    local = tuple(u for u in gathered if not u.allocation.kind.on_host)
    loads = max((u.read_requests / u.itemsize for u in local), default=0.0) + on_chip_loads
    return LaunchWork(
        uses=gathered,
        local=local,
        threads=threads,
        loops=loads > shape.blocks * shape.threads * max(1, loads_in_flight),
        loads_in_flight=max(1, loads_in_flight),
        dependent_steps=float(dependent_steps) if dependent_steps is not None else steps / threads,
        addresses=tuple(u.allocation.address or u.allocation.host_address for u in gathered),
        footprint=sum(u.footprint for u in local),
        reach=sum(float(u.allocation.nbytes) if u.dependent else u.footprint for u in local),
        written=sum(u.writes for u in local),
        # A grid of fewer blocks than there are SMs leaves the rest idle.
        on_chip=on_chip_cycles / (max(1, min(shape.blocks, sheet.sm_count)) * sheet.sm_clock),
        on_chip_loads=on_chip_loads,
        turnover=max(0.0, shape.blocks / resident - 1.0)
        * math.sqrt(shape.threads)
        * sheet.fit.turnover,
    )


def _of_block(elements: int, shape: LaunchShape) -> int:
    """Distinct elements that one block of a grid-stride loop touches, element i modulo their number."""
    step = math.gcd(elements, max(1, shape.blocks * shape.threads))
    return elements if shape.threads >= step else elements // step * shape.threads


@dataclass
class _Hits:
    """Hits and misses of one use."""

    first: float  # share of the first touches that miss
    again: float  # share of the repeated accesses that miss, in bytes
    wait: float  # share of the repeated loads whose warp waits for DRAM
    normal: float  # bytes left with the normal property
    persisting: float  # bytes left in the set-aside
    penalty: float  # factor on misses
    released: float = 0.0  # bytes that persisted and are normal lines from now on


class Timing:
    """The model of one device's memory system."""

    def __init__(self, sheet: Datasheet, l2: L2Lines) -> None:
        self._sheet = sheet
        self._l2 = l2
        self.pages = PageLog(sheet)  # migrations and faults of managed pages
        self._known: dict[object, tuple[LaunchWork, float, State]] = {}
        """Launches of late: seconds and L2 afterwards, by all that decides them. The work is kept: its identity stays its own."""

    def persisting(self, work: LaunchWork, window: WindowSpec) -> float:
        """Bytes that are to persist for one launch."""
        if window.hit is not AccessProperty.PERSISTING:
            return 0.0
        return window.hit_ratio * sum(
            u.footprint * self._covered(u.allocation, window) for u in work.local
        )

    def kernel(self, work: LaunchWork, window: WindowSpec | None, beside: float = 0.0) -> float:
        """Seconds of one launch; leaves L2 and the pages as the launch leaves them.
        `work`: the launch.
        `window`: its window.
        `beside`: bytes that are to persist for kernels that run already.
        """
        faults, managed, remote = self._migrate(work)
        # Samples repeat the same few launches, each of which finds what the one before it found.
        now = id(work), window, beside, managed, remote, self._l2.state()
        known = self._known.get(now)
        if known is not None:
            self._l2.restore(known[2])
            return known[1] + faults
        seconds = self._through_the_caches(work, window, beside, managed, remote)
        if len(self._known) == _KNOWN:
            self._known.clear()
        self._known[now] = work, seconds, self._l2.state()
        return seconds + faults

    def _through_the_caches(
        self,
        work: LaunchWork,
        window: WindowSpec | None,
        beside: float,
        managed: float,
        remote: float,
    ) -> float:
        """Seconds of one launch without its page faults; leaves L2 as the launch leaves it."""
        sheet, l2 = self._sheet, self._l2
        local = work.local
        link = self._link_time(work) + remote / (sheet.pinned_bandwidth * sheet.zero_copy_share)
        total = work.footprint
        # How busy writes keep the memory decides how much of the cache waits to be written back.
        write_time = work.written / (sheet.dram_peak * sheet.fit.write_efficiency)
        saturating = work.written > l2.capacity
        pressure = (
            sheet.fit.write_pressure * self._write_share(work, local, write_time)
            if saturating
            else 0.0
        )
        capacity = max(1.0, l2.capacity * (1.0 - pressure))

        whole = miss_ratio(total / capacity, sheet.fit.knee, sheet.fit.sharpness)
        hits = [self._hits(u, total, whole, capacity, local, window, beside) for u in local]
        read = write = incoming = random = sparse = hit = 0.0
        for u, h in zip(local, hits, strict=True):
            again = max(0.0, u.read_requests * u.inflation - u.reads)
            rewritten = max(0.0, u.write_requests * u.inflation - u.writes)
            # L2 completes a sector that is written in part before it writes it back.
            filled = u.writes if u.scattered else 0.0
            use_read = (max(u.reads, filled) * h.first + again * h.again) * h.penalty
            use_write = u.writes * h.first + rewritten * h.again
            # Where lines are used in part, each row of DRAM is opened for fewer bytes.
            sparse += (use_read + use_write) * (u.density**-sheet.fit.sparsity - 1.0)
            read += use_read
            write += use_write
            incoming += max(use_read, u.writes * h.first)
            served = (u.reads + u.writes) * (1.0 - h.first) + (again + rewritten) * (1.0 - h.again)
            hit += (
                served
                * u.l2_inflation
                / u.inflation
                * (sheet.fit.merging if u.nearby and u.writes else 1.0)
            )
            if u.random and not u.dependent:
                random += use_read + use_write
        left = 0.0
        write += l2.write_back(incoming)
        for u, h in zip(local, hits, strict=True):
            cached = min(u.writes, sheet.dirty_share * sheet.l2_bytes)
            before = l2.lines(u.allocation).dirty
            write += l2.touch(u.allocation, normal=h.normal, persisting=h.persisting, dirty=cached)
            if h.released:
                l2.release(u.allocation, h.released)
            left += max(0.0, l2.lines(u.allocation).dirty - before) if u.writes else 0.0
        # Dirty lines that stay in L2 are billed to the launch that evicts them.
        write = max(
            0.0,
            write - min(left, sum(u.writes * h.first for u, h in zip(local, hits, strict=True))),
        )

        moved = read + write
        dram_time = self._dram_time(read, write, random, sparse)
        if saturating and sheet.fit.squeeze_share > l2.outside_share:
            # Too little cache to gather writes in: they reach DRAM in worse order.
            room = 1.0 - sheet.fit.squeeze_slope * (sheet.fit.squeeze_share - l2.outside_share)
            dram_time += (
                write
                / (sheet.dram_peak * sheet.fit.write_efficiency)
                * (1.0 / max(0.05, room) - 1.0)
            )
        l2_time = hit / sheet.l2_bandwidth
        away = remote / managed if managed else 0.0
        latency_time = (
            max(self._latency_time(work, local, hits, away), self._on_chip_wait(work))
            + work.turnover
        )
        body = self._join(dram_time, l2_time, latency_time, link, work.on_chip)
        ramp = sheet.ramp * min(1.0, moved / total) if total > 0.0 else 0.0
        return sheet.launch + ramp + body

    def _join(self, *bounds: float) -> float:
        top = max(bounds)
        if top <= 0.0:
            return 0.0
        p = self._sheet.overlap
        return float(top * sum((b / top) ** p for b in bounds) ** (1.0 / p))

    def _migrate(self, work: LaunchWork) -> tuple[float, float, float]:
        """Seconds of page faults, bytes of managed memory touched, and of them bytes that are read or written across the link."""
        seconds = managed = remote = 0.0
        for u in work.uses:
            if u.pages is None:
                continue
            managed += u.footprint
            touched = u.pages.touched_by_device(
                min(1.0, u.footprint / u.allocation.nbytes), writes=u.writes > 0.0
            )
            if touched.moved or touched.evicted:
                self._l2.forget(u.allocation)
            seconds += self.pages.faulted(
                u.allocation.address, touched, writes=u.writes > 0.0, page_by_page=u.page_by_page
            )
            remote += touched.remote
        return seconds, managed, remote

    def _link_time(self, work: LaunchWork) -> float:
        if len(work.local) == len(work.uses):
            return 0.0
        bandwidth = self._sheet.pinned_bandwidth * self._sheet.zero_copy_share
        # A sector that crosses alone needs a packet of its own.
        there = [
            (u, u.l2_inflation * (self._sheet.sector_packets if u.scattered else 1.0))
            for u in work.uses
            if u.allocation.kind.on_host
        ]
        reads = sum(u.read_requests * moved for u, moved in there)
        writes = sum(u.write_requests * moved for u, moved in there)
        # The link is full duplex.
        return max(reads, writes) / bandwidth

    def _write_share(self, work: LaunchWork, local: Sequence[Use], write_time: float) -> float:
        """How near the writes are to saturating the memory, if all repeated accesses hit: 0 to 1."""
        read_time = sum(u.reads for u in local) / (
            self._sheet.dram_peak * self._sheet.fit.read_efficiency
        )
        loads = (
            max((u.read_requests / u.itemsize for u in local if not u.dependent), default=0.0)
            / work.threads
            / work.loads_in_flight
        )
        busy = write_time / self._join(
            write_time + read_time, loads * self._hit_time(work), self._on_chip_wait(work)
        )
        return min(1.0, busy / _SATURATED)

    def _hit_time(self, work: LaunchWork) -> float:
        return self._sheet.fit.l2_hit_time if work.loops else self._sheet.l2_latency

    def _on_chip_wait(self, work: LaunchWork) -> float:
        """Seconds for which a thread waits for shared memory; what a loop costs beside its load is the same as with a load from L2."""
        sheet = self._sheet
        each = sheet.shared_latency_cycles / sheet.sm_clock + max(
            0.0, self._hit_time(work) - sheet.l2_latency
        )
        return work.on_chip_loads / work.threads / work.loads_in_flight * each

    def _hits(
        self,
        u: Use,
        total: float,
        whole: float,
        capacity: float,
        local: Sequence[Use],
        window: WindowSpec | None,
        beside: float,
    ) -> _Hits:
        fit, l2 = self._sheet.fit, self._l2
        lines = l2.lines(u.allocation)
        if u.footprint <= 0.0:
            return _Hits(1.0, 1.0, 1.0, 0.0, 0.0, 1.0)
        resident = min(1.0, lines.normal / u.footprint) * (1.0 - whole)
        if u.onward:
            # Lines of earlier launches are reused once the whole array has passed through the cache.
            array = float(u.allocation.nbytes)
            resident = min(1.0, lines.normal / array) * (
                1.0 - miss_ratio(array / capacity, fit.knee, fit.sharpness)
            )
        held = min(1.0, lines.persisting / u.footprint)
        first = max(0.0, 1.0 - held - resident)
        # Between two uses of a line, every access of the launch advances by the same share of its requests.
        requested = max(u.read_requests, u.write_requests)
        share = u.footprint / (requested * u.inflation) if requested > 0.0 else 1.0
        passing = (
            0.0
            if u.nearby
            else sum(
                min(v.footprint, max(v.read_requests, v.write_requests) * v.inflation * share)
                for v in local
            )
        )
        # A line that is written has one home: both partitions of L2 may keep a copy of one that is only read.
        room = capacity * fit.shared_l2 if u.by_all and not u.writes else capacity
        miss = miss_ratio(passing / room, fit.knee, fit.sharpness)
        kept = min(1.0, l2.capacity / max(total, 1.0))
        left = u.footprint * kept
        if u.onward:
            left = min(lines.normal + left * first, float(u.allocation.nbytes))
        covered = self._covered(u.allocation, window)
        if (
            window is None
            or covered <= 0.0
            or (l2.set_aside == 0 and window.hit is AccessProperty.PERSISTING)
        ):
            again = miss * (1.0 - held)
            return _Hits(first, again, again, left, lines.persisting, 1.0)
        if window.hit is AccessProperty.NORMAL:
            again = miss * (1.0 - held)
            return _Hits(
                first,
                again,
                again,
                left,
                lines.persisting,
                1.0,
                released=window.hit_ratio * covered * lines.persisting,
            )
        ratio = window.hit_ratio * covered if window.hit is AccessProperty.PERSISTING else 0.0
        persisting = ratio * u.footprint
        lost = (
            miss_ratio(
                (persisting + beside) / l2.set_aside, fit.persisting_knee, fit.persisting_sharpness
            )
            if l2.set_aside
            else 0.0
        )
        # A streaming line goes first; what it finds is what normal lines would find, at a discount.
        retained = fit.streaming_retention if window.miss is AccessProperty.STREAMING else 1.0
        streaming, streams = (1.0 - miss) * retained, covered - ratio
        # A persisting line that its set-aside has lost is found where a normal one would be.
        sector = ratio * (1.0 - lost * miss) + (1.0 - covered) * (1.0 - miss) + streams * streaming
        # A streaming line may go between its read and its write.
        twice = (
            fit.streaming_update * streams * (1.0 - streaming) / max(1.0 - sector, 1e-9)
            if u.reads and u.writes
            else 0.0
        )
        # A warp waits for the last of its sectors, and the hit ratio chooses sectors one by one.
        return _Hits(
            first=first,
            again=1.0 - sector,
            wait=1.0 - sector**_SECTORS,
            normal=(1.0 - covered + streams * streaming) * u.footprint * kept,
            persisting=persisting * (1.0 - lost),
            penalty=1.0 + fit.thrash * lost * min(1.0, ratio) + twice,
        )

    @staticmethod
    def _covered(allocation: Allocation, window: WindowSpec | None) -> float:
        """Share of an allocation that lies under a window."""
        if window is None or allocation.nbytes == 0:
            return 0.0
        end = min(window.address + window.nbytes, allocation.address + allocation.nbytes)
        return max(0, end - max(window.address, allocation.address)) / allocation.nbytes

    def _dram_time(self, read: float, write: float, random: float, sparse: float) -> float:
        sheet, fit = self._sheet, self._sheet.fit
        moved = read + write
        if moved <= 0.0:
            return 0.0
        r, w = read / moved, write / moved
        efficiency = r * fit.read_efficiency + w * fit.write_efficiency - fit.turnaround * 4 * r * w
        return (moved + sparse + random * (1.0 / sheet.random_efficiency - 1.0)) / (
            sheet.dram_peak * efficiency
        )

    def _latency_time(
        self, work: LaunchWork, local: Sequence[Use], hits: Sequence[_Hits], away: float
    ) -> float:
        """Seconds for which threads wait for their loads; `away` is the share of managed memory that lies beyond the link."""
        sheet, fit = self._sheet, self._sheet.fit
        beyond_link = max(
            (
                1.0 if u.allocation.kind.on_host else away if u.pages is not None else 0.0
                for u in work.uses
                if u.dependent
            ),
            default=0.0,
        )
        slowest = work.dependent_steps * sheet.link_latency * beyond_link
        updates = 0.0
        for u, h in zip(local, hits, strict=True):
            if u.read_requests <= 0.0:
                continue
            first = min(1.0, u.reads / (u.read_requests * u.inflation))
            waits = (first * h.first + (1.0 - first) * h.wait) * h.penalty
            if u.dependent:
                step = sheet.l2_latency + waits * (sheet.dram_latency - sheet.l2_latency)
                if u.through_l1 and u.allocation.nbytes <= sheet.shared_bytes_per_sm:
                    # Only the first pass leaves the SM. A node's index is one of the sectors that make up the footprint.
                    beyond = min(1.0, u.reads / (u.read_requests * u.inflation))
                    step = beyond * step + (1.0 - beyond) * sheet.l1_latency_cycles / sheet.sm_clock
                slowest = max(slowest, work.dependent_steps * step)
            else:
                loads = u.read_requests / u.itemsize / work.threads / work.loads_in_flight
                beyond = miss_ratio(
                    u.per_sm / sheet.shared_bytes_per_sm, fit.l1_knee, fit.l1_sharpness
                )
                near = self._hit_time(work) - (1.0 - beyond) * (
                    sheet.l2_latency - sheet.l1_latency_cycles / sheet.sm_clock
                )
                waiting = loads * (near + beyond * waits * fit.l2_miss_time)
                slowest = max(slowest, waiting)
                # The store to an array that is updated may alias the next load, which therefore comes after it.
                updates += waiting if u.writes else 0.0
        return max(slowest, updates)

    def copy(self, destination: Allocation, source: Allocation, nbytes: float) -> float:
        """Seconds of a copy between any two kinds of memory, after its launch and its start."""
        sheet = self._sheet
        pageable = destination.kind.pageable or source.kind.pageable
        if source.kind.on_host and destination.kind.on_host:
            return nbytes / sheet.host_bandwidth
        if source.kind.on_host:
            return nbytes / (sheet.pageable_to_device if pageable else sheet.pinned_bandwidth)
        if destination.kind.on_host:
            return nbytes / (sheet.pageable_to_host if pageable else sheet.pinned_bandwidth)
        return 0.0
