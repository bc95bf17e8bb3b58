"""Counts from CUPTI through `cupti-python` (the extra `cupti13`): page faults and migrations of
managed memory, kernels and copies. Its records and counters are off again after each pass.

Sources: CUPTI, CUpti_ActivityUnifiedMemoryCounter3 and cuptiActivityConfigureUnifiedMemoryCounter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import runtime as R  # noqa: N812

from pytest_gpumem.devices.cuda import what_ran
from pytest_gpumem.devices.cuda.compiler import HOLD
from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, USE_KINDS
from pytest_gpumem.devices.cuda.hints import malloc_managed, prefetch
from pytest_gpumem.devices.cuda.modules import MODULES
from pytest_gpumem.devices.protocol import Counters, NotCounted, Span, Undelivered
from pytest_gpumem.records.migrations import (
    BETWEEN_DEVICES,
    CPU_FAULT,
    GPU_FAULT,
    MAPPED,
    TO_DEVICE,
    TO_HOST,
    PageCounts,
    PageEvent,
    page_counts,
)
from pytest_gpumem.records.what_ran import WhatRan

BUFFER_BYTES = 2**17
"""Of one buffer of records; CUPTI requests more when it is full. A first record waits for the
buffer: 8 MiB take 6 ms (H100)."""
BEACON_BYTES = 2 * 2**20
"""Size of one block of the driver's: no other pages share it, so no fault beside it moves it."""
WAKING = 6  # passes over the beacon alone after which counters that deliver nothing are given up
OPTIONAL = ("REMOTE_MAP", "BYTES_TRANSFER_DTOD")  # counters that not every platform has
CAUSES = {
    "USER": "prefetch",
    "COHERENCE": "fault",
    "PREFETCH": "speculation",
    "EVICTION": "eviction",
    "ACCESS_COUNTERS": "access counters",
}
"""CUpti_ActivityUnifiedMemoryMigrationCause in our words. CUPTI's PREFETCH is what the driver moved
"speculatively": neighbours of a page that faulted."""
_KINDS = {
    "BYTES_TRANSFER_HTOD": TO_DEVICE,
    "BYTES_TRANSFER_DTOH": TO_HOST,
    "BYTES_TRANSFER_DTOD": BETWEEN_DEVICES,
    "GPU_PAGE_FAULT": GPU_FAULT,
    # Its value is where the program was: each record is a fault.
    "CPU_PAGE_FAULT_COUNT": CPU_FAULT,
    "REMOTE_MAP": MAPPED,
}
"""CUpti_ActivityUnifiedMemoryCounterKind in our words."""


class CudaCounters(Counters):
    """CUPTI's counters of unified memory and its records of activity, for a device.

    The beacon is managed memory that is moved on purpose, to check that CUPTI counts. On an H200
    (driver 580.159.04) the first two passes of a process deliver nothing, and some later ones.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._beacon = 0  # its address
        self._awake = False
        self._cupti: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._receive: Callable[[Any], None] | None = None  # takes a record, in CUPTI's thread
        self._counts_pages = False
        self._delivered = 0  # records
        self._failed: Exception | None = None

    def pages(self, work: Callable[[], None]) -> PageCounts:
        """Count between two moves of the beacon. Raises `Undelivered`: CUPTI missed a move."""
        with self._subscribed():
            for _ in range(0 if self._awake else WAKING):
                # The first passes do not count.
                events, _ = self._page_events(lambda: None)
                if self._moves(events) > 0:
                    break
            events, maps = self._page_events(work)
            moves = self._moves(events)
            if moves < 2:
                raise Undelivered(
                    f"CUPTI reported {moves} of 2 moves of pages that were made to try it, "
                    "so its other counts may lack some"
                )
            self._awake = True
            self._refuse_losses()
        counted = [each for each in events if not self._is_beacon(each)]
        return page_counts(counted, maps=maps)

    def spans(self, work: Callable[[], None]) -> list[Span]:
        records: list[tuple[str, int, int, int]] = []

        def receive(record: Any) -> None:
            name, blocks = "", 0
            if self._cupti.ActivityKind(int(record.kind)).name == "CONCURRENT_KERNEL":
                name = str(record.name)
                blocks = int(record.grid_x) * int(record.grid_y) * int(record.grid_z)
            if name != HOLD:
                records.append((name, blocks, int(record.start), int(record.end)))

        with self._subscribed():
            self._run(USE_KINDS, receive, work)
            self._refuse_losses()
        # Nanoseconds since 1970 as seconds would lose a quarter of a microsecond.
        first = min((start for _, _, start, _ in records), default=0)
        return [
            Span(name, blocks, (start - first) * 1e-9, (end - first) * 1e-9)
            for name, blocks, start, end in records
        ]

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        with self._subscribed() as cupti, MODULES.launches() as launches:
            seen, times = what_ran.PassRecords(cupti), list[int]()

            def body() -> None:
                times.append(int(cupti.get_timestamp()))
                work()
                times.append(int(cupti.get_timestamp()))
                wait()

            with self._refusals("the attributes of launches"):
                cupti.activity_enable_launch_attributes(1)  # access-policy windows
            with self._refusals("to watch a launch", cupti.cuptiError):
                self._run(what_ran.KINDS, seen.receive, body)
            self._refuse_losses()
        return seen.what_ran(launches, times[0], times[1])

    loading = staticmethod(MODULES.loading)

    def close(self) -> None:
        """Free the beacon."""
        address, self._beacon = self._beacon, 0
        if address:
            R.cudaFree(address)

    @contextmanager
    def _subscribed(self) -> Iterator[Any]:
        """Hold CUPTI for a pass, whose records come through buffers of ours."""
        with CALLBACKS.subscribed() as cupti:
            # RuntimeError: there is no libcupti, or an old version
            self._cupti, self._errors = cupti, (cupti.cuptiError, RuntimeError)
            with self._refusals("buffers of records"):
                cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self._completed)
            yield cupti

    @contextmanager
    def _refusals(self, what: str, *errors: type[Exception]) -> Iterator[None]:
        expected = errors or self._errors
        try:
            yield
        except expected as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise NotCounted(f"CUPTI refuses {what}: {lines[0]}") from error

    def _page_events(self, work: Callable[[], None]) -> tuple[list[PageEvent], bool]:
        """Return the events of a pass, and True if mappings were counted."""
        maps = False
        for name in _KINDS:
            try:
                with self._refusals("to count unified memory"):
                    self._count(name)
                maps = maps or name == "REMOTE_MAP"
            except NotCounted:
                if name not in OPTIONAL:
                    raise
        events: list[PageEvent] = []

        def receive(record: Any) -> None:
            page_event = _page_event(self._cupti, record)
            if page_event is not None:
                events.append(page_event)

        def between_moves() -> None:
            self._move()
            work()
            self._move()

        self._run(("UNIFIED_MEMORY_COUNTER",), receive, between_moves)
        return events, maps

    def _move(self) -> None:
        """Prefetch the beacon to the device and back to the host, and wait."""
        if not self._beacon:
            doing = "allocating managed memory to try the counters on"
            self._beacon = malloc_managed(BEACON_BYTES, doing)
            check(R.cudaMemset(self._beacon, 0, BEACON_BYTES), doing)
        for to_host in (False, True):
            result = prefetch(self._beacon, BEACON_BYTES, self._index, to_host, 0)
            if int(result[0]) != 0:
                R.cudaGetLastError()
                raise NotCounted(f"pages cannot be moved to try the counters on: {result[0].name}")
        check(R.cudaStreamSynchronize(0), "moving managed memory to try the counters on")

    def _is_beacon(self, event: PageEvent) -> bool:
        return self._beacon <= event.address < self._beacon + BEACON_BYTES

    def _moves(self, events: Sequence[PageEvent]) -> int:
        """Return how many moves there and back were recorded whole."""
        moved = {TO_DEVICE: 0, TO_HOST: 0}
        for event in events:
            if event.kind in moved and self._is_beacon(event):
                moved[event.kind] += event.value
        return min(moved.values()) // BEACON_BYTES

    def _count(self, name: str) -> None:
        cupti = self._cupti
        config = cupti.ActivityUnifiedMemoryCounterConfig(1)
        config[0].scope = int(cupti.ActivityUnifiedMemoryCounterScope.PROCESS_SINGLE_DEVICE)
        config[0].kind = int(getattr(cupti.ActivityUnifiedMemoryCounterKind, name))
        config[0].device_id = self._index
        config[0].enable = 1
        cupti.activity_configure_unified_memory_counter(config.ptr, 1)

    def _run(
        self, kinds: Sequence[str], receive: Callable[[Any], None], work: Callable[[], None]
    ) -> None:
        """Deliver all records of some kinds (`CUpti_ActivityKind`) while `work` runs."""
        cupti = self._cupti
        self._receive, self._delivered, self._failed = receive, 0, None
        self._counts_pages = "UNIFIED_MEMORY_COUNTER" in kinds
        enabled = []
        try:
            for kind in kinds:
                with self._refusals(f"records of {kind}"):
                    cupti.activity_enable(getattr(cupti.ActivityKind, kind))
                enabled.append(kind)
            work()
            seen = -1
            while self._delivered != seen:  # CUPTI reads them in another thread
                seen = self._delivered
                cupti.activity_flush_all(1)
        finally:
            for kind in enabled:
                cupti.activity_disable(getattr(cupti.ActivityKind, kind))
            self._receive = None
        if self._failed is not None:
            raise NotCounted(f"a record of CUPTI could not be read: {self._failed}")

    def _completed(self, activities: Iterable[Any]) -> None:
        # A record is read while CUPTI still holds its buffer. What is raised here would be lost in
        # CUPTI's thread.
        try:
            of_pages = int(self._cupti.ActivityKind.UNIFIED_MEMORY_COUNTER)
            for activity in activities:
                is_of_pages = int(activity.kind) == of_pages
                if self._receive is not None and is_of_pages == self._counts_pages:
                    self._delivered += 1
                    self._receive(activity)
        except Exception as error:
            self._failed = error

    def _refuse_losses(self) -> None:
        dropped = np.zeros(1, np.uint64)
        try:
            self._cupti.activity_get_num_dropped_records(0, 0, dropped.ctypes.data)
        except self._errors:
            return  # not every version answers without a context
        if dropped[0]:
            raise NotCounted(f"CUPTI dropped {int(dropped[0])} records")


def _page_event(cupti: Any, record: Any) -> PageEvent | None:
    """A record as plain values; None for another counter."""
    kind = cupti.ActivityUnifiedMemoryCounterKind(int(record.counter_kind)).name
    if kind not in _KINDS:
        return None
    faulted = kind == "GPU_PAGE_FAULT"
    known = cupti.ActivityUnifiedMemoryMigrationCause
    if faulted:
        known = cupti.ActivityUnifiedMemoryAccessType
    name = {int(member): member.name for member in known}.get(int(record.flags_), "UNKNOWN")
    return PageEvent(
        kind=_KINDS[kind],
        value=int(record.value),
        start=int(record.start),
        end=int(record.end),
        address=int(record.address),
        why=name.lower() if faulted else CAUSES.get(name, "unknown"),
    )
