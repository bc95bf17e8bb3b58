"""The recording of Nsight Systems by measurement, from its SQLite export.

A kernel, copy or memset belongs to the range in which it was launched: the API call of its correlation id is inside of the range on the
same thread, as in `nsys stats --report nvtx_kern_sum`. A kernel of a graph belongs where the graph was launched. Pages of managed memory
move without a call, so their time decides: from the end of the work queued before a measured launch until its thread has waited for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gpumem.nsight import nsys_tables
from pytest_gpumem.nsight.nsys_tables import PROCESS, Range, RangesByThread, Tables, process_of, ranges_of
from pytest_gpumem.nsight.recording import BadReport, Recording
from pytest_gpumem.ranges import LAUNCH
from pytest_gpumem.records.migrations import BETWEEN_DEVICES, CPU_FAULT, GPU_FAULT, TO_DEVICE, TO_HOST, PageEvent, page_counts
from pytest_gpumem.records.profile import Besides, TestProfile
from pytest_gpumem.records.uses import CopyUse, KernelUse, copies_together, kernels_together, longest_first

_WAYS = {1: "H2D", 2: "D2H", 3: "H2A", 4: "A2H", 5: "A2A", 6: "A2D", 7: "D2A", 8: "D2D", 9: "H2H", 10: "P2P"}
"""Directions of copies ("CUDA Memcopy Kind" of the SQLite schema)."""
_MOVES = {11: TO_DEVICE, 12: TO_HOST, 13: BETWEEN_DEVICES}  # directions of migrations, which are in the same table
_IS_MIGRATION = f"copyKind IN ({', '.join(map(str, _MOVES))})"
_MEMORY = dict(enumerate(("PAGEABLE", "PINNED", "DEVICE", "ARRAY", "MANAGED", "DEVICE_STATIC", "MANAGED_STATIC", "UNKNOWN")))
"""Kinds of memory ("CUDA Memory Operations Memory Kind" of the SQLite schema). CUPTI numbers them otherwise."""
_CAUSES = {1: "prefetch", 2: "fault", 3: "speculation", 4: "eviction", 5: "access counters"}
"""Causes of migrations (CUPTI, `CUpti_ActivityUnifiedMemoryMigrationCause`), as in `migrations.CAUSES`."""
_ACCESSES = {1: "read", 2: "write", 3: "atomic", 4: "prefetch"}  # accesses that fault (CUPTI, `CUpti_ActivityUnifiedMemoryAccessType`)


def read_sqlite(tables: Tables) -> Recording:
    """The measurements in an export. Raises `BadReport`: the file is broken, of an unknown schema, or has no range of a test."""
    ranges = ranges_of(tables)
    if not ranges:
        raise BadReport("no NVTX range of the domain gpumem: record pytest --gpumem with --trace=cuda,nvtx, as `gpumem profile nsys` does")
    return _Reader(tables, ranges).recording()


class _Call(NamedTuple):
    start: int
    end: int
    thread: int


@dataclass
class _PlaceContent:
    """The work of one place."""

    kernels: list[KernelUse] = field(default_factory=list)
    copies: list[CopyUse] = field(default_factory=list)
    memsets: list[CopyUse] = field(default_factory=list)
    pages: list[PageEvent] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.kernels or self.copies or self.memsets or self.pages)

    def summed(self, *, pages: bool) -> Besides:
        """The sums, with `migrations` if the recording has pages at all."""
        return Besides(
            longest_first(kernels_together(self.kernels)),
            copies_together(self.copies),
            copies_together(self.memsets),
            page_counts(self.pages, maps=False) if pages else None,
        )


class _Window(NamedTuple):
    """The time in which pages that move belong to a measured launch."""

    opened: int  # start of its range; page faults of the host count from here
    start: int
    end: int
    range: Range


_Key = tuple[int, str, str]  # serialised process, test, label


class _Reader:
    def __init__(self, tables: Tables, ranges: RangesByThread) -> None:
        self._tables, self._ranges = tables, ranges
        self._calls: dict[tuple[int, int], _Call] = {}  # by process and correlation id
        self._waits: dict[int, list[_Call]] = defaultdict(list)  # by thread, calls that wait for the device
        self._works: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """By process, the call and the end of all work of the device; the start of the work if its call is unknown."""
        self._ends: dict[int, int] = {}
        """By `id` of a measured launch's range, the end of the last work that it launched."""
        self._measured: dict[_Key, _PlaceContent] = defaultdict(_PlaceContent)
        self._rest: dict[_Key, _PlaceContent] = defaultdict(_PlaceContent)
        self._outside = _PlaceContent()
        self._notes: list[str] = []

    def recording(self) -> Recording:
        self._read_calls()
        self._read_kernels()
        self._read_copies()
        self._read_memsets()
        pages = self._read_pages()
        launches: dict[_Key, int] = defaultdict(int)
        for one in self._ranges:
            if one.measuring is one:
                launches[_key(one)] += max(sum(inner.name.endswith(f".{LAUNCH}") for inner in one.inner), 1)
        profiles = []
        # In the order of their ranges, which is that of the session.
        for key in dict.fromkeys(_key(one) for one in sorted(self._ranges, key=lambda r: r.start)):
            process, test, label = key
            if key not in launches and not self._rest[key]:
                continue
            measured = self._measured[key].summed(pages=pages)
            profiles.append(
                TestProfile(
                    name=test,
                    nodeid=self._ranges.nodeid(process, test),
                    label=label,
                    launches=launches.get(key),
                    kernels=measured.kernels,
                    copies=measured.copies,
                    memsets=measured.memsets,
                    migrations=measured.migrations,
                    rest=self._rest[key].summed(pages=pages),
                    process=process_of(process),
                    tool="nsys",
                    tool_version=self._tables.version,
                )
            )
        return Recording(tuple(profiles), self._outside.summed(pages=pages), tuple(self._notes), "nsys", self._tables.version)

    def _read_calls(self) -> None:
        waits = self._tables.strings_with("Synchronize")
        for start, end, thread, correlation, name in self._tables.rows(
            nsys_tables.CALLS, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            call = _Call(start, end, thread or 0)
            if correlation:
                # The first: a second one with this number is a driver call within it.
                self._calls.setdefault((call.thread & PROCESS, correlation), call)
            if name in waits:
                self._waits[call.thread].append(call)
        for of_thread in self._waits.values():
            of_thread.sort()

    def _place(self, process: int | None, correlation: int | None, start: int, end: int) -> _PlaceContent:
        """The place of work of the device."""
        process = process or 0
        call = self._calls.get((process, correlation)) if correlation else None
        self._works[process].append((call.start if call is not None else start, end))
        around = self._ranges.around(call.thread, call.start, call.end) if call is not None else None
        if around is None:
            return self._outside
        measuring = around.measuring
        if measuring is None:
            return self._rest[_key(around)]
        self._ends[id(measuring)] = max(end, self._ends.get(id(measuring), end))
        return self._measured[_key(around)]

    def _read_kernels(self) -> None:
        shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        for start, end, correlation, process, name, *figures in self._tables.rows(
            nsys_tables.KERNELS,
            ("start", "end", "correlationId", "globalPid", "demangledName", *shape),
            ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory", "localMemoryPerThread"),
        ):
            registers, static, dynamic, local = figures[6:]
            one = KernelUse(
                self._tables.string(name),
                (figures[0], figures[1], figures[2]),
                (figures[3], figures[4], figures[5]),
                launches=1,
                nanoseconds=end - start,
                registers=registers,
                shared=None if static is None or dynamic is None else static + dynamic,
                local=local,
            )
            self._place(process, correlation, start, end).kernels.append(one)
        graphs = list(self._tables.rows(nsys_tables.WHOLE_GRAPHS, ("globalPid", "correlationId", "start", "end")))
        for process, correlation, start, end in graphs:
            self._place(process, correlation, start, end)
        if graphs:
            self._notes.append(f"{len(graphs)} graphs were recorded as a whole, without their kernels: record with --cuda-graph-trace=node")

    def _memory(self) -> dict[int, str]:
        names = self._tables.enumeration("ENUM_CUDA_MEM_KIND", _MEMORY)
        kinds = ("PAGEABLE", "PINNED", "MANAGED", "ARRAY", "DEVICE")
        return {key: next((kind.lower() for kind in kinds if kind in name.upper()), "unknown") for key, name in names.items()}

    def _read_copies(self) -> None:
        memory = self._memory()
        for start, end, nbytes, way, correlation, process, source, target, source_device, target_device, several in self._tables.rows(
            nsys_tables.COPIES,
            ("start", "end", "bytes", "copyKind", "correlationId", "globalPid"),
            ("srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "copyCount"),
            f"NOT {_IS_MIGRATION}",
        ):
            kind = _WAYS.get(way, "other")
            if kind == "D2D" and None not in (source_device, target_device) and source_device != target_device:
                kind = "P2P"
            kinds = memory.get(source, "unknown"), memory.get(target, "unknown")
            one = CopyUse(kind, *kinds, max(several or 1, 1), nbytes, end - start)
            self._place(process, correlation, start, end).copies.append(one)

    def _read_memsets(self) -> None:
        memory = self._memory()
        for start, end, nbytes, correlation, process, kind in self._tables.rows(
            nsys_tables.MEMSETS, ("start", "end", "bytes", "correlationId", "globalPid"), ("memKind",)
        ):
            one = CopyUse("memset", "", memory.get(kind, "unknown"), 1, nbytes, end - start)
            self._place(process, correlation, start, end).memsets.append(one)

    # Pages

    def _read_pages(self) -> bool:
        """RangePlace migrations and faults by their time; False if the file has none."""
        by_process: dict[int, list[PageEvent]] = defaultdict(list)
        for process, event in self._page_events():
            by_process[process or 0].append(event)
        for process, events in by_process.items():
            ranges = sorted((one for one in self._ranges if one.thread & PROCESS == process), key=lambda r: r.start)
            windows = self._windows(process, ranges)
            for event in events:
                self._page_place(event, windows, ranges).pages.append(event)
        every = [event for events in by_process.values() for event in events]
        by_fault = any(one.kind == TO_DEVICE and one.why == "fault" for one in every)
        if by_fault and not any(one.kind == GPU_FAULT for one in every):
            self._notes.append("pages moved by page faults that were not recorded themselves: record with --cuda-um-gpu-page-faults=true")
        return bool(every)

    def _page_events(self) -> Iterator[tuple[int | None, PageEvent]]:
        for start, end, nbytes, way, process, cause, address in self._tables.rows(
            nsys_tables.COPIES, ("start", "end", "bytes", "copyKind", "globalPid"), ("migrationCause", "virtualAddress"), _IS_MIGRATION
        ):
            yield process, PageEvent(_MOVES[way], nbytes, start, end, address or 0, _CAUSES.get(cause, "unknown"))
        for start, end, process, address, faults, access in self._tables.rows(
            nsys_tables.GPU_FAULTS, ("start", "end", "globalPid", "address", "numberOfPageFaults"), ("faultAccessType",)
        ):
            yield process, PageEvent(GPU_FAULT, faults, start, end, address, _ACCESSES.get(access, "unknown"))
        for start, process, address in self._tables.rows(nsys_tables.CPU_FAULTS, ("start", "globalPid", "address")):
            yield process, PageEvent(CPU_FAULT, 0, start, start, address, "unknown")

    def _windows(self, process: int, ranges: list[Range]) -> list[_Window]:
        """The windows of the measured launches in the order of time."""
        queued: list[tuple[int, int]] = []
        until = 0
        for called, end in sorted(self._works[process]):
            until = max(until, end)
            queued.append((called, until))
        windows = []
        for one in ranges:
            if one.measuring is one:
                earlier = bisect_left(queued, (one.start, 0)) - 1
                start = max(one.start, queued[earlier][1]) if earlier >= 0 else one.start
                windows.append(_Window(one.start, start, self._over(one), one))
        return windows

    def _over(self, one: Range) -> int:
        """The end of a measured launch: its thread had waited for it, or opened the next range."""
        own = max(one.end, self._ends.get(id(one), one.end))
        waits = self._waits[one.thread]
        position = bisect_left(waits, (one.end, 0, 0))
        following = self._ranges.next_start(one)
        if one.outer is not None:
            following = one.outer.end if following is None else min(following, one.outer.end)
        if position < len(waits) and (following is None or waits[position].start < following):
            return max(own, waits[position].end)
        return own if following is None else max(own, following)

    def _page_place(self, event: PageEvent, windows: list[_Window], ranges: list[Range]) -> _PlaceContent:
        position = bisect_right(windows, event.start, key=lambda w: w.opened) - 1
        if position >= 0:
            window = windows[position]
            # The host faults in its own time. The device first finishes the work that was queued before.
            start = window.opened if event.kind == CPU_FAULT else window.start
            if start <= event.start <= window.end:
                return self._measured[_key(window.range)]
        nearest = bisect_right(ranges, event.start, key=lambda r: r.start) - 1
        found: Range | None = ranges[nearest] if nearest >= 0 else None
        while found is not None and found.end < event.start:
            found = found.outer
        return self._outside if found is None else self._rest[_key(found)]


def _key(one: Range) -> _Key:
    place = one.place
    return one.thread & PROCESS, place.test, place.label
