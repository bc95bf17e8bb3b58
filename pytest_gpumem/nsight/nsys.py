"""The recording of Nsight Systems by measurement, from its SQLite export.

A kernel, copy or memset belongs to the range in which it was launched: the API call of its correlation id is inside of the range on the
same thread, as in `nsys stats --report nvtx_kern_sum`. A kernel of a graph belongs where the graph was launched. Pages of managed memory
move without a call: CUPTI counts them, launch by launch.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_gpumem.nsight import nsys_tables
from pytest_gpumem.nsight.nsys_tables import (
    PROCESS,
    Range,
    RangesByThread,
    Tables,
    process_of,
    ranges_of,
)
from pytest_gpumem.nsight.recording import BadReport
from pytest_gpumem.ranges import LAUNCH
from pytest_gpumem.records.profile import TestProfile
from pytest_gpumem.records.uses import (
    CopyUse,
    KernelUse,
    copies_together,
    kernels_together,
    longest_first,
)

_WAYS = {
    1: "H2D",
    2: "D2H",
    3: "H2A",
    4: "A2H",
    5: "A2A",
    6: "A2D",
    7: "D2A",
    8: "D2D",
    9: "H2H",
    10: "P2P",
}
"""Directions of copies ("CUDA Memcopy Kind" of the SQLite schema)."""
_NO_MIGRATION = "copyKind NOT IN (11, 12, 13)"
"""Pages of managed memory that moved are in the same table."""
_MEMORY = dict(
    enumerate(
        (
            "PAGEABLE",
            "PINNED",
            "DEVICE",
            "ARRAY",
            "MANAGED",
            "DEVICE_STATIC",
            "MANAGED_STATIC",
            "UNKNOWN",
        )
    )
)
"""Kinds of memory ("CUDA Memory Operations Memory Kind" of the SQLite schema). CUPTI numbers them otherwise."""


def read_sqlite(tables: Tables) -> tuple[TestProfile, ...]:
    """The measurements in an export, one profile for each and for each process, in the order of the session.
    Raises `BadReport`: the file is broken, of an unknown schema, or has no range of a test.
    """
    ranges = ranges_of(tables)
    if not ranges:
        raise BadReport(
            "no NVTX range of the domain gpumem: record pytest --gpumem with --trace=cuda,nvtx, as `gpumem profile nsys` does"
        )
    return _Reader(tables, ranges).profiles()


class _ApiCall(NamedTuple):
    start: int
    end: int
    thread: int


@dataclass
class _PlaceContent:
    """The work of the measured launches of one place."""

    kernels: list[KernelUse] = field(default_factory=list)
    copies: list[CopyUse] = field(default_factory=list)
    memsets: list[CopyUse] = field(default_factory=list)


_Key = tuple[int, str, str]  # serialised process, test, label


class _Reader:
    def __init__(self, tables: Tables, ranges: RangesByThread) -> None:
        self._tables, self._ranges = tables, ranges
        self._calls: dict[tuple[int, int], _ApiCall] = {}  # by process and correlation id
        self._measured: dict[_Key, _PlaceContent] = defaultdict(_PlaceContent)

    def profiles(self) -> tuple[TestProfile, ...]:
        self._read_calls()
        self._read_kernels()
        self._read_copies()
        self._read_memsets()
        launches: dict[_Key, int] = defaultdict(int)
        for one in self._ranges:
            if one.measuring is one:
                launches[_key(one)] += max(
                    sum(inner.name.endswith(f".{LAUNCH}") for inner in one.inner), 1
                )
        profiles = []
        # In the order of their ranges, which is that of the session.
        for key in dict.fromkeys(_key(one) for one in sorted(self._ranges, key=lambda r: r.start)):
            process, test, label = key
            if key not in launches:
                continue
            measured = self._measured[key]
            profiles.append(
                TestProfile(
                    name=test,
                    nodeid=self._ranges.nodeid(process, test),
                    label=label,
                    launches=launches.get(key),
                    kernels=longest_first(kernels_together(measured.kernels)),
                    copies=copies_together(measured.copies),
                    memsets=copies_together(measured.memsets),
                    process=process_of(process),
                    tool="nsys",
                    tool_version=self._tables.version,
                )
            )
        return tuple(profiles)

    def _read_calls(self) -> None:
        for start, end, thread, correlation in self._tables.rows(
            nsys_tables.CALLS, ("start", "end", "globalTid", "correlationId")
        ):
            if correlation:
                # The first: a second one with this number is a driver call within it.
                self._calls.setdefault(
                    ((thread or 0) & PROCESS, correlation), _ApiCall(start, end, thread or 0)
                )

    def _place(self, process: int | None, correlation: int | None) -> _PlaceContent:
        """The place of work of the device."""
        call = self._calls.get((process or 0, correlation)) if correlation else None
        around = (
            self._ranges.around(call.thread, call.start, call.end) if call is not None else None
        )
        if around is None or around.measuring is None:
            return _PlaceContent()  # of no measured launch
        return self._measured[_key(around)]

    def _read_kernels(self) -> None:
        shape = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        for start, end, correlation, process, name, *figures in self._tables.rows(
            nsys_tables.KERNELS,
            ("start", "end", "correlationId", "globalPid", "demangledName", *shape),
            (
                "registersPerThread",
                "staticSharedMemory",
                "dynamicSharedMemory",
                "localMemoryPerThread",
            ),
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
            self._place(process, correlation).kernels.append(one)

    def _memory(self) -> dict[int, str]:
        names = self._tables.enumeration("ENUM_CUDA_MEM_KIND", _MEMORY)
        kinds = ("PAGEABLE", "PINNED", "MANAGED", "ARRAY", "DEVICE")
        return {
            key: next((kind.lower() for kind in kinds if kind in name.upper()), "unknown")
            for key, name in names.items()
        }

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
            target,
            source_device,
            target_device,
            several,
        ) in self._tables.rows(
            nsys_tables.COPIES,
            ("start", "end", "bytes", "copyKind", "correlationId", "globalPid"),
            ("srcKind", "dstKind", "srcDeviceId", "dstDeviceId", "copyCount"),
            _NO_MIGRATION,
        ):
            kind = _WAYS.get(way, "other")
            if (
                kind == "D2D"
                and None not in (source_device, target_device)
                and source_device != target_device
            ):
                kind = "P2P"
            kinds = memory.get(source, "unknown"), memory.get(target, "unknown")
            one = CopyUse(kind, *kinds, max(several or 1, 1), nbytes, end - start)
            self._place(process, correlation).copies.append(one)

    def _read_memsets(self) -> None:
        memory = self._memory()
        for start, end, nbytes, correlation, process, kind in self._tables.rows(
            nsys_tables.MEMSETS,
            ("start", "end", "bytes", "correlationId", "globalPid"),
            ("memKind",),
        ):
            one = CopyUse("memset", "", memory.get(kind, "unknown"), 1, nbytes, end - start)
            self._place(process, correlation).memsets.append(one)


def _key(one: Range) -> _Key:
    place = one.place
    return one.thread & PROCESS, place.test, place.label
