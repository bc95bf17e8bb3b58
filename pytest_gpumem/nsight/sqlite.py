"""What Nsight Systems recorded of each measurement, from its SQLite export.

A kernel, copy or memset belongs to the ranges in which it was launched: the API call of its correlation id lies inside of the range on the
same thread, as in `nsys stats --report nvtx_kern_sum`. A kernel of a graph belongs where the graph was launched
(`--cuda-graph-trace=node`). Pages of managed memory move without a call, so migrations and faults are told by their time: they belong to
a measured launch from the end of what was queued before it until its thread has waited for it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gpumem.nsight import sqlite_tables
from pytest_gpumem.nsight.recording import Recording, copies_together, kernels_together
from pytest_gpumem.nsight.sqlite_ranges import Range, RangesByThread, ranges_of
from pytest_gpumem.nsight.sqlite_tables import PROCESS, BadReport, Tables, process_of
from pytest_gpumem.ranges import LAUNCH
from pytest_gpumem.records.migrations import BETWEEN_DEVICES, CPU_FAULT, GPU_FAULT, TO_DEVICE, TO_HOST, PageEvent, page_counts
from pytest_gpumem.records.profile import Besides, TestProfile
from pytest_gpumem.records.uses import CopyUse, KernelUse

_WAYS = {1: "H2D", 2: "D2H", 3: "H2A", 4: "A2H", 5: "A2A", 6: "A2D", 7: "D2A", 8: "D2D", 9: "H2H", 10: "P2P"}
"""Ways of copies ("CUDA Memcopy Kind" of the SQLite schema)."""
_MOVES = {11: TO_DEVICE, 12: TO_HOST, 13: BETWEEN_DEVICES}
"""Ways of migrations, which the same table holds."""
_MEMORY = dict(enumerate(("PAGEABLE", "PINNED", "DEVICE", "ARRAY", "MANAGED", "DEVICE_STATIC", "MANAGED_STATIC", "UNKNOWN")))
"""Kinds of memory ("CUDA Memory Operations Memory Kind" of the SQLite schema), which are not numbered as CUPTI's."""
_CAUSES = {1: "prefetch", 2: "fault", 3: "speculation", 4: "eviction", 5: "access counters"}
"""Why pages moved (CUPTI, `CUpti_ActivityUnifiedMemoryMigrationCause`), in the words of `migrations.CAUSES`."""
_ACCESSES = {1: "read", 2: "write", 3: "atomic", 4: "prefetch"}
"""What faulted (CUPTI, `CUpti_ActivityUnifiedMemoryAccessType`)."""


def read_sqlite(tables: Tables) -> Recording:
    """The measurements in an export.

    Raises:
        BadReport: the file is broken, of an unknown schema, or holds no range of a test.
    """
    ranges = ranges_of(tables)
    if not ranges.threads:
        raise BadReport("no NVTX range of the domain gpumem: record pytest --gpumem with --trace=cuda,nvtx, as `gpumem profile nsys` does")
    return _Reader(tables, ranges).recording()


class _Call(NamedTuple):
    start: int
    end: int
    thread: int


class _Work(NamedTuple):
    """Something that the device did on a call."""

    process: int
    called: int
    """Nanosecond of the call; that of its own start where the call is not known."""
    end: int


@dataclass
class _Found:
    """What one place holds."""

    kernels: list[KernelUse] = field(default_factory=list)
    copies: list[CopyUse] = field(default_factory=list)
    memsets: list[CopyUse] = field(default_factory=list)
    pages: list[PageEvent] = field(default_factory=list)


class _Window(NamedTuple):
    """Time in which pages that move belong to a measured launch."""

    start: int
    end: int
    called: int
    """Nanosecond from which on what the host touches belongs to it."""
    range: Range


_Key = tuple[int, str, str]
"""Serialised process, test, label."""


class _Reader:
    def __init__(self, tables: Tables, ranges: RangesByThread) -> None:
        self._tables, self._ranges = tables, ranges
        self._calls: dict[tuple[int, int], _Call] = {}
        self._waits: dict[int, list[_Call]] = defaultdict(list)
        self._works: list[_Work] = []
        self._ends: dict[int, int] = {}
        """By `id` of a measured launch's range, when the last thing was over that it launched."""
        self._measured: dict[_Key, _Found] = defaultdict(_Found)
        self._rest: dict[_Key, _Found] = defaultdict(_Found)
        self._outside = _Found()
        self._notes: list[str] = []

    def recording(self) -> Recording:
        self._read_calls()
        self._read_kernels()
        self._read_copies()
        self._read_memsets()
        told = self._read_pages()
        launches: dict[_Key, int] = defaultdict(int)
        for one in self._ranges:
            if one.measuring is one:
                inside = sum(inner.name.endswith(f".{LAUNCH}") for inner in one.inner)
                launches[self._key(one)] += max(inside, 1)
        # In the order of their ranges, which is that of the session.
        keys = dict.fromkeys(self._key(one) for one in sorted(self._ranges, key=lambda r: r.start))
        profiles = []
        for key in keys:
            taken, rest = self._measured[key], self._rest[key]
            if key not in launches and not (rest.kernels or rest.copies or rest.memsets or rest.pages):
                continue
            profiles.append(
                TestProfile(
                    name=key[1],
                    nodeid=self._ranges.nodeid(key[0], key[1]),
                    label=key[2],
                    launches=launches.get(key),
                    kernels=kernels_together(taken.kernels),
                    copies=copies_together(taken.copies),
                    memsets=copies_together(taken.memsets),
                    migrations=page_counts(taken.pages, maps=False) if told else None,
                    rest=_besides(rest, told),
                    process=process_of(key[0]),
                    tool="nsys",
                    tool_version=self._tables.version,
                )
            )
        return Recording(tuple(profiles), _besides(self._outside, told), tuple(self._notes), "nsys", self._tables.version)

    def _key(self, one: Range) -> _Key:
        place = one.place
        return one.thread & PROCESS, place.test, place.label

    def _read_calls(self) -> None:
        """Calls of CUDA's API, by process and correlation id; and those that waited, by thread."""
        waits = self._tables.strings_with("Synchronize")
        for start, end, thread, correlation, name in self._tables.rows(
            sqlite_tables.CALLS, ("start", "end", "globalTid", "correlationId", "nameId")
        ):
            call = _Call(start, end, thread or 0)
            if correlation:
                # The first: a second of that number would be a driver call within it.
                self._calls.setdefault((call.thread & PROCESS, correlation), call)
            if name in waits:
                self._waits[call.thread].append(call)
        for of_thread in self._waits.values():
            of_thread.sort()

    def _where(self, process: int | None, correlation: int | None, start: int, end: int) -> _Found:
        """Where something belongs that the device did, which is noted for the windows."""
        process = process or 0
        call = self._calls.get((process, correlation)) if correlation else None
        self._works.append(_Work(process, call.start if call is not None else start, end))
        around = self._ranges.around(call.thread, call.start, call.end) if call is not None else None
        if around is None:
            return self._outside
        measuring = around.measuring
        if measuring is None:
            return self._rest[self._key(around)]
        self._ends[id(measuring)] = max(end, self._ends.get(id(measuring), end))
        return self._measured[self._key(around)]

    def _read_kernels(self) -> None:
        shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        for start, end, correlation, process, name, *figures in self._tables.rows(
            sqlite_tables.KERNELS,
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
            self._where(process, correlation, start, end).kernels.append(one)
        whole = 0
        for start, end, correlation, process in self._tables.rows(
            sqlite_tables.WHOLE_GRAPHS, ("start", "end", "correlationId", "globalPid")
        ):
            self._where(process, correlation, start, end)
            whole += 1
        if whole:
            self._notes.append(f"{whole} graphs were recorded as a whole, without their kernels: record with --cuda-graph-trace=node")

    def _memory(self) -> dict[int, str]:
        names = self._tables.enumeration("ENUM_CUDA_MEM_KIND", _MEMORY)
        kinds = ("PAGEABLE", "PINNED", "MANAGED", "ARRAY", "DEVICE")
        return {key: next((kind.lower() for kind in kinds if kind in name.upper()), "unknown") for key, name in names.items()}

    def _read_copies(self) -> None:
        memory = self._memory()
        for (
            start,
            end,
            nbytes,
            way,
            correlation,
            process,
            source,
            destination,
            source_device,
            destination_device,
            several,
        ) in self._tables.rows(
            sqlite_tables.COPIES,
            ("start", "end", "bytes", "copyKind", "correlationId", "globalPid"),
            ("srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "copyCount"),
            f"copyKind NOT IN ({', '.join(map(str, _MOVES))})",
        ):
            kind = _WAYS.get(way, "other")
            if kind == "D2D" and None not in (source_device, destination_device) and source_device != destination_device:
                kind = "P2P"
            one = CopyUse(
                kind, memory.get(source, "unknown"), memory.get(destination, "unknown"), max(several or 1, 1), nbytes, end - start
            )
            self._where(process, correlation, start, end).copies.append(one)

    def _read_memsets(self) -> None:
        memory = self._memory()
        for start, end, nbytes, correlation, process, kind in self._tables.rows(
            sqlite_tables.MEMSETS, ("start", "end", "bytes", "correlationId", "globalPid"), ("memKind",)
        ):
            one = CopyUse("memset", "", memory.get(kind, "unknown"), 1, nbytes, end - start)
            self._where(process, correlation, start, end).memsets.append(one)

    # Pages

    def _read_pages(self) -> bool:
        """Sort migrations and faults by their time; gives whether there are any in the whole file."""
        events = list(self._page_events())
        windows, spans = self._windows(), self._spans()
        for process, one in events:
            self._page_place(process, one, windows, spans).pages.append(one)
        kinds = {one.kind for _, one in events}
        moved_by_fault = any(one.kind == TO_DEVICE and one.why == "fault" for _, one in events)
        if moved_by_fault and GPU_FAULT not in kinds:
            self._notes.append("pages moved by page faults that were not recorded themselves: record with --cuda-um-gpu-page-faults=true")
        return bool(events)

    def _page_events(self) -> Iterator[tuple[int, PageEvent]]:
        for start, end, nbytes, way, process, cause, address in self._tables.rows(
            sqlite_tables.COPIES,
            ("start", "end", "bytes", "copyKind", "globalPid"),
            ("migrationCause", "virtualAddress"),
            f"copyKind IN ({', '.join(map(str, _MOVES))})",
        ):
            yield process or 0, PageEvent(_MOVES[way], nbytes, start, end, address or 0, _CAUSES.get(cause, "unknown"))
        for start, end, process, address, faults, access in self._tables.rows(
            sqlite_tables.GPU_FAULTS, ("start", "end", "globalPid", "address", "numberOfPageFaults"), ("faultAccessType",)
        ):
            yield process or 0, PageEvent(GPU_FAULT, faults, start, end, address, _ACCESSES.get(access, "unknown"))
        for start, process, address in self._tables.rows(sqlite_tables.CPU_FAULTS, ("start", "globalPid", "address")):
            yield process or 0, PageEvent(CPU_FAULT, 0, start, start, address, "unknown")

    def _windows(self) -> dict[int, list[_Window]]:
        """By process, the windows of the measured launches in the order of time."""
        before: dict[int, list[tuple[int, int]]] = defaultdict(list)
        until: dict[int, int] = {}
        for work in sorted(self._works, key=lambda w: w.called):
            until[work.process] = max(work.end, until.get(work.process, 0))
            before[work.process].append((work.called, until[work.process]))
        windows: dict[int, list[_Window]] = defaultdict(list)
        for one in self._ranges:
            if one.measuring is one:
                process = one.thread & PROCESS
                earlier = bisect_left(before[process], (one.start, 0)) - 1
                start = max(one.start, before[process][earlier][1]) if earlier >= 0 else one.start
                windows[process].append(_Window(start, self._over(one), one.start, one))
        for of_process in windows.values():
            of_process.sort(key=lambda w: w.called)
        return windows

    def _over(self, one: Range) -> int:
        """When a measured launch was over: its thread had waited for it, or gone on to the next range."""
        own = max(one.end, self._ends.get(id(one), one.end))
        waits = self._waits[one.thread]
        position = bisect_left(waits, (one.end, 0, 0))
        waited = waits[position].end if position < len(waits) else None
        following = self._ranges.next_start(one)
        if one.outer is not None:
            following = one.outer.end if following is None else min(following, one.outer.end)
        if waited is not None and (following is None or waits[position].start < following):
            return max(own, waited)
        return max(own, following) if following is not None else own

    def _spans(self) -> dict[int, list[Range]]:
        """By process, the outermost ranges and those of labels, in the order of time."""
        spans: dict[int, list[Range]] = defaultdict(list)
        for one in self._ranges:
            spans[one.thread & PROCESS].append(one)
        for of_process in spans.values():
            of_process.sort(key=lambda r: r.start)
        return spans

    def _page_place(self, process: int, event: PageEvent, windows: dict[int, list[_Window]], spans: dict[int, list[Range]]) -> _Found:
        of_process = windows.get(process, [])
        position = bisect_right(of_process, event.start, key=lambda w: w.called) - 1
        if position >= 0:
            window = of_process[position]
            # What the host touches, it touches in its own time; what the device does waits for what was queued before.
            start = window.called if event.kind == CPU_FAULT else window.start
            if start <= event.start <= window.end:
                return self._measured[self._key(window.range)]
        ranges = spans.get(process, [])
        found: Range | None = None
        nearest = bisect_right(ranges, event.start, key=lambda r: r.start) - 1
        if nearest >= 0:
            found = ranges[nearest]
            while found is not None and found.end < event.start:
                found = found.outer
        return self._outside if found is None else self._rest[self._key(found)]


def _besides(found: _Found, told: bool) -> Besides:
    return Besides(
        kernels_together(found.kernels),
        copies_together(found.copies),
        copies_together(found.memsets),
        page_counts(found.pages, maps=False) if told else None,
    )
