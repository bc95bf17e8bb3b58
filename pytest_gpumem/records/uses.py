"""Copies and memsets."""

from __future__ import annotations

from pytest_gpumem.records.record import Bytes, Count, Record

COPY_KINDS = ("H2D", "D2H", "D2D", "P2P", "H2H", "H2A", "A2H", "A2A", "A2D", "D2A", "other")
"""Direction of a copy: host, device, array, or one device to another ("P2P"). Migrations of managed
memory are not among them."""

MEMORY_KINDS = ("pageable", "pinned", "device", "array", "managed", "unknown")
"""Kind of memory on one side of a copy (CUPTI, `CUpti_ActivityMemoryKind`)."""


class CopyUse(Record, frozen=True):
    """All copies of one kind between the same kinds of memory, or all memsets of one kind of
    memory."""

    kind: str  # One of `COPY_KINDS`; "memset" for a memset
    source: str  # Memory that is read, one of `MEMORY_KINDS`; "" for a memset
    destination: str  # Memory that is written, one of `MEMORY_KINDS`
    count: Count  # Number of copies or memsets
    nbytes: Bytes  # Bytes, summed over `count`
