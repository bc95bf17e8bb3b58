"""Kernels, copies and memsets of this process from CUPTI's activity records, through `cupti-python` (the extra `cupti13`).

Records need no permission for counters. They hold names, times and launch shapes, no hardware counts.
Sources: CUPTI, CUpti_ActivityKernel, CUpti_ActivityMemcpy, CUpti_ActivityMemset; enum CUpti_ActivityMemoryKind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.records.uses import COPY_KINDS, Activity, CopyUse, KernelUse

KINDS = ("CONCURRENT_KERNEL", "MEMCPY", "MEMCPY2", "MEMSET")
"""CUpti_ActivityKind of kernels, copies, copies between devices and memsets. The kind KERNEL would run kernels one after another."""

PASSES = 2
"""Attempts while CUPTI delivers no record: the first records of a process may be lost."""

_MEMORY = {
    "PAGEABLE": "pageable",
    "PINNED": "pinned",
    "DEVICE": "device",
    "ARRAY": "array",
    "MANAGED": "managed",
    "DEVICE_STATIC": "device",
    "MANAGED_STATIC": "managed",
}


def use_of(cupti: Any, record: Any) -> KernelUse | CopyUse | None:
    """A record as plain values; None for one that is of no kernel, copy or memset."""
    kind = cupti.ActivityKind(int(record.kind)).name
    if kind == "CONCURRENT_KERNEL":
        return kernel(record)
    if kind in ("MEMCPY", "MEMCPY2"):
        return copy(cupti, record)
    return memset(cupti, record) if kind == "MEMSET" else None


def together(seen: Iterable[KernelUse | CopyUse]) -> Activity:
    """Single records added up: kernels of one name and shape, copies of one kind."""
    kernels: dict[tuple[Any, ...], KernelUse] = {}
    copies: dict[tuple[str, str, str], CopyUse] = {}
    for one in seen:
        if isinstance(one, KernelUse):
            key = (one.name, one.grid, one.block, one.registers, one.shared, one.local)
            had = kernels.get(key)
            kernels[key] = one if had is None else replace(had, launches=had.launches + 1, nanoseconds=had.nanoseconds + one.nanoseconds)
        else:
            way = (one.kind, one.source, one.destination)
            before = copies.get(way, replace(one, count=0, nbytes=0, nanoseconds=0))
            copies[way] = replace(
                before, count=before.count + 1, nbytes=before.nbytes + one.nbytes, nanoseconds=before.nanoseconds + one.nanoseconds
            )
    longest = sorted(copies.values(), key=lambda each: -each.nanoseconds)
    return Activity(
        kernels=tuple(kernels.values()),
        copies=tuple(each for each in longest if each.kind != "memset"),
        memsets=tuple(each for each in longest if each.kind == "memset"),
        source="CUPTI",
    )


def kernel(record: Any) -> KernelUse:
    """A record of a kernel as plain values."""
    return KernelUse(
        name=str(record.name),
        grid=(int(record.grid_x), int(record.grid_y), int(record.grid_z)),
        block=(int(record.block_x), int(record.block_y), int(record.block_z)),
        launches=1,
        nanoseconds=max(0, int(record.end) - int(record.start)),
        registers=int(record.registers_per_thread),
        shared=int(record.static_shared_memory) + int(record.dynamic_shared_memory),
        local=int(record.local_memory_per_thread),
    )


def copy(cupti: Any, record: Any) -> CopyUse:
    """A record of a copy as plain values."""
    name = cupti.ActivityMemcpyKind(int(record.copy_kind)).name  # "HTOD", "PTOP"
    kind = name.replace("TO", "2")
    return CopyUse(
        kind=kind if kind in COPY_KINDS else "other",
        source=memory(cupti, record.src_kind),
        destination=memory(cupti, record.dst_kind),
        count=1,
        nbytes=int(record.bytes),
        nanoseconds=max(0, int(record.end) - int(record.start)),
    )


def memset(cupti: Any, record: Any) -> CopyUse:
    """A record of a memset as plain values."""
    time = max(0, int(record.end) - int(record.start))
    return CopyUse("memset", "", memory(cupti, record.memory_kind), 1, int(record.bytes), time)


def memory(cupti: Any, kind: int) -> str:
    """CUPTI's kind of memory in our words."""
    known = {int(member): member.name for member in cupti.ActivityMemoryKind}
    return _MEMORY.get(known.get(int(kind), ""), "unknown")
