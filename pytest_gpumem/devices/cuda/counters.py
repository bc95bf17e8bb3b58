"""Counts from CUPTI through `cupti-python` (the extra `cupti13`): page faults and migrations of
managed memory, kernels and copies.

CUPTI is imported at the first count. Its counters are off again when `pages` and `spans` return.
Sources: CUPTI, CUpti_ActivityUnifiedMemoryCounter3 and cuptiActivityConfigureUnifiedMemoryCounter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from pytest_gpumem.devices.cuda import what_ran
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, USE_KINDS
from pytest_gpumem.devices.cuda.modules import MODULES
from pytest_gpumem.devices.cuda.own_kernels import HOLD
from pytest_gpumem.devices.protocol import Activity, Counters, NotCounted, Span, Undelivered
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
"""Of one buffer of records; CUPTI asks for more when it is full. A first record waits for the
buffer: 8 MiB take 6 ms (H100)."""
PASSES = 2  # attempts: the first records of a process may be lost
WAKING = 6  # passes over the beacon alone after which counters that deliver nothing are given up
NEEDED = ("BYTES_TRANSFER_HTOD", "BYTES_TRANSFER_DTOH", "CPU_PAGE_FAULT_COUNT", "GPU_PAGE_FAULT")
"""Counters without which nothing is counted."""
WANTED = ("REMOTE_MAP", "BYTES_TRANSFER_DTOD")  # counters that not every platform has
CAUSES = {
    "USER": "prefetch",
    "COHERENCE": "fault",
    "PREFETCH": "speculation",
    "EVICTION": "eviction",
    "ACCESS_COUNTERS": "access counters",
}
"""CUpti_ActivityUnifiedMemoryMigrationCause in our words. CUPTI's PREFETCH is what the driver moved
"speculatively", of its own accord."""
_KINDS = {
    "BYTES_TRANSFER_HTOD": TO_DEVICE,
    "BYTES_TRANSFER_DTOH": TO_HOST,
    "BYTES_TRANSFER_DTOD": BETWEEN_DEVICES,
    "GPU_PAGE_FAULT": GPU_FAULT,
    # Its value is where the program was: each record is one fault.
    "CPU_PAGE_FAULT_COUNT": CPU_FAULT,
    "REMOTE_MAP": MAPPED,
}
"""CUpti_ActivityUnifiedMemoryCounterKind in our words."""


class MovedOnPurpose(Protocol):
    """The interface of `managed.Beacon`."""

    @property
    def nbytes(self) -> int: ...
    def move(self) -> None: ...
    def holds(self, address: int) -> bool: ...


class CudaCounters:
    """CUPTI's counters of unified memory and its records of activity, for one device.
    `beacon`: moves to the device and back before and after the counted work. If CUPTI misses one of
    these moves, the count is discarded.
    """

    def __init__(self, index: int, beacon: MovedOnPurpose) -> None:
        self._index, self._beacon = index, beacon
        self._awake = False
        self._cupti: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._events: list[PageEvent] = []
        self._failed: Exception | None = None
        self._receive: Callable[[Any, Any], None] | None = None
        self._others = 0  # records of other kinds that were delivered

    def pages(self, work: Callable[[], None]) -> PageCounts:
        """Count while `work` runs. `work` waits for the work that it queues.
        Raises `NotCounted`: cupti-python or CUPTI is missing or too old, or the platform or another
        tool keeps the counters from us.
        Raises `Undelivered`: CUPTI missed the beacon's moves. On an H200 (driver 580.159.04) some
        passes do.
        """
        with self._held() as cupti:
            for _ in range(0 if self._awake else WAKING):
                # The first passes of a process may deliver nothing (see `managed.Beacon`); none of
                # them is the one that counts.
                self._record(cupti, lambda: None)
                if self._seen() > 0:
                    break
            maps = self._record(cupti, work)
            if self._seen() < 2:
                raise Undelivered(
                    f"CUPTI reported {self._seen()} of 2 moves of pages that were made to try it, "
                    "so its other counts may lack some"
                )
            self._awake = True
            self._refuse_losses(cupti)
        return page_counts(
            [
                page_event
                for page_event in self._events
                if not self._beacon.holds(page_event.address)
            ],
            maps=maps,
        )

    def activity(self, work: Callable[[], None]) -> Activity:
        """Record the kernels of `work`. Raises `NotCounted`: as `watch`, or none was delivered."""
        for _ in range(PASSES):
            kernels = [span for span in self.spans(work) if span.grid]
            if kernels:
                return Activity(kernels)
        raise NotCounted(f"CUPTI reported no kernel in {PASSES} passes")

    def spans(self, work: Callable[[], None]) -> list[Span]:
        """Record each kernel, copy and memset, but holds. Raises `NotCounted`: as `watch`."""
        records: list[tuple[str, int, int, int]] = []

        def receive(cupti: Any, record: Any) -> None:
            name, blocks = "", 0
            if cupti.ActivityKind(int(record.kind)).name == "CONCURRENT_KERNEL":
                name = str(record.name)
                blocks = int(record.grid_x) * int(record.grid_y) * int(record.grid_z)
            if name != HOLD:
                records.append((name, blocks, int(record.start), int(record.end)))

        self.watch(USE_KINDS, receive, work)
        # Nanoseconds since 1970 as seconds would lose a quarter of a microsecond.
        first = min((start for _, _, start, _ in records), default=0)
        return [
            Span(name, blocks, (start - first) * 1e-9, (end - first) * 1e-9)
            for name, blocks, start, end in records
        ]

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        """Record each step of `work`, which queues; `wait` waits for it, and is no part of it.
        Raises `NotCounted`: as `watch`; or CUPTI did not deliver all kernels.
        """
        seen, times = what_ran.PassRecords(), list[int]()
        with self._held() as cupti, MODULES.launches() as launches:

            def body() -> None:
                times.append(int(cupti.get_timestamp()))
                work()
                times.append(int(cupti.get_timestamp()))
                wait()

            try:
                cupti.activity_enable_launch_attributes(1)  # access-policy windows
            except self._errors as error:
                raise self._refusal("the attributes of launches", error) from error
            try:
                self.watch(what_ran.KINDS, seen.receive, body)
            except cupti.cuptiError as error:
                raise self._refusal("to watch a launch", error) from error
        return seen.what_ran(launches, times[0], times[1])

    @contextmanager
    def loading(self) -> Iterator[None]:
        with ExitStack() as stack:
            with suppress(NotCounted):  # the pass that needs it says why
                stack.enter_context(MODULES.loading())
            yield

    def watch(
        self, kinds: Sequence[str], receive: Callable[[Any, Any], None], work: Callable[[], None]
    ) -> None:
        """Deliver CUPTI's records of other kinds while `work` runs. `work` waits for the work that
        it queues.

        CUPTI takes one callback for all records, so this method belongs to the same class.
        `kinds`: names of `CUpti_ActivityKind`.
        `receive`: is given the module and each record, in CUPTI's own thread.
        Raises `NotCounted`: cupti-python or CUPTI is missing or too old, or another tool holds it.
        """
        with self._held() as cupti:
            self._receive = receive
            try:
                self._run(cupti, kinds, work)
            finally:
                self._receive = None
            self._refuse_losses(cupti)

    def _record(self, cupti: Any, work: Callable[[], None]) -> bool:
        """One pass, its records in `_events`; gives whether mappings were among the counters."""
        try:
            self._configure(cupti, NEEDED)
        except self._errors as error:
            raise self._refusal("to count unified memory", error) from error
        also = [name for name in WANTED if self._try(cupti, name)]

        def between_moves() -> None:
            self._beacon.move()
            work()
            self._beacon.move()

        self._run(cupti, ("UNIFIED_MEMORY_COUNTER",), between_moves)
        return "REMOTE_MAP" in also

    def _run(self, cupti: Any, kinds: Sequence[str], work: Callable[[], None]) -> None:
        """Have all records of some kinds delivered that there are while `work` runs; they are off
        again afterwards."""
        self._events, self._others, self._failed = [], 0, None
        enabled = []
        try:
            try:
                for kind in kinds:
                    cupti.activity_enable(getattr(cupti.ActivityKind, kind))
                    enabled.append(kind)
            except self._errors as error:
                raise self._refusal(f"records of {kind}", error) from error
            work()
            self._flush(cupti)
        finally:
            for kind in enabled:
                cupti.activity_disable(getattr(cupti.ActivityKind, kind))
        if self._failed is not None:
            raise NotCounted(f"a record of CUPTI could not be read: {self._failed}")

    @staticmethod
    def _refusal(what: str, error: Exception) -> NotCounted:
        return NotCounted(f"CUPTI refuses {what}: {_text(error)}{_hint(error)}")

    def _seen(self) -> int:
        """Moves of the beacon to the device and back that were recorded whole."""
        moved = {TO_DEVICE: 0, TO_HOST: 0}
        for page_event in self._events:
            if page_event.kind in moved and self._beacon.holds(page_event.address):
                moved[page_event.kind] += page_event.value
        return min(moved.values()) // self._beacon.nbytes

    @contextmanager
    def _held(self) -> Iterator[Any]:
        """Hold CUPTI for a pass: its records come to this process alone, through buffers of
        ours."""
        with CALLBACKS.held() as cupti:
            # RuntimeError: cupti-python found no libcupti, or an old one
            self._cupti, self._errors = cupti, (cupti.cuptiError, RuntimeError)
            try:
                cupti.activity_register_callbacks(lambda: (BUFFER_BYTES, 0), self._completed)
            except self._errors as error:
                raise NotCounted(f"CUPTI does not start: {_text(error)}{_hint(error)}") from error
            yield cupti

    def _configure(self, cupti: Any, names: Sequence[str]) -> None:
        configs = cupti.ActivityUnifiedMemoryCounterConfig(len(names))
        for i, name in enumerate(names):
            configs[i].scope = int(cupti.ActivityUnifiedMemoryCounterScope.PROCESS_SINGLE_DEVICE)
            configs[i].kind = int(getattr(cupti.ActivityUnifiedMemoryCounterKind, name))
            configs[i].device_id = self._index
            configs[i].enable = 1
        cupti.activity_configure_unified_memory_counter(configs.ptr, len(names))

    def _try(self, cupti: Any, name: str) -> bool:
        if not hasattr(cupti.ActivityUnifiedMemoryCounterKind, name):
            return False
        try:
            self._configure(cupti, [name])
        except self._errors:
            return False
        return True

    def _flush(self, cupti: Any) -> None:
        """Have CUPTI deliver all records: it reads them from the driver in a thread of its own."""
        seen = -1
        while len(self._events) + self._others != seen:
            seen = len(self._events) + self._others
            cupti.activity_flush_all(1)

    def _completed(self, activities: Iterable[Any]) -> None:
        # A record is read while CUPTI still holds its buffer. What is raised here would be lost in
        # CUPTI's thread.
        try:
            for activity in activities:
                kind = int(activity.kind)
                if kind == int(self._cupti.ActivityKind.UNIFIED_MEMORY_COUNTER):
                    page_event = event(self._cupti, activity)
                    if page_event is not None:
                        self._events.append(page_event)
                elif self._receive is not None:
                    self._others += 1
                    self._receive(self._cupti, activity)
        except Exception as error:
            self._failed = error

    def _refuse_losses(self, cupti: Any) -> None:
        dropped = np.zeros(1, np.uint64)
        try:
            cupti.activity_get_num_dropped_records(0, 0, dropped.ctypes.data)
        except self._errors:
            return  # not every version answers without a context
        if dropped[0]:
            raise NotCounted(f"CUPTI dropped {int(dropped[0])} records")


def event(cupti: Any, activity: Any) -> PageEvent | None:
    """A record of CUPTI as plain values; None for one of another counter."""
    kind = cupti.ActivityUnifiedMemoryCounterKind(int(activity.counter_kind)).name
    if kind not in _KINDS:
        return None
    faulted = kind == "GPU_PAGE_FAULT"
    known = (
        cupti.ActivityUnifiedMemoryAccessType
        if faulted
        else cupti.ActivityUnifiedMemoryMigrationCause
    )
    name = {int(member): member.name for member in known}.get(int(activity.flags_), "UNKNOWN")
    why = name.lower() if faulted else CAUSES.get(name, "unknown")
    return PageEvent(
        _KINDS[kind],
        int(activity.value),
        int(activity.start),
        int(activity.end),
        int(activity.address),
        why,
    )


def _text(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _hint(error: Exception) -> str:
    return (
        " (its version must be that of libcupti)"
        if "NOT_SUPPORTED" not in str(error) and "VERSION" in str(error).upper()
        else ""
    )


_: type[Counters] = CudaCounters
