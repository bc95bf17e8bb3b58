"""Counts from CUPTI through `cupti-python` (the extra `cupti13`): page faults and migrations of
managed memory, kernels and copies, and what a launch ran. All is off again after each pass.

Sources: CUPTI, Activity API, CUpti_ActivityUnifiedMemoryCounter3, CUpti_ActivityKernel9 and its
successors; CUDA Driver API, CUaccessPolicyWindow.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from cuda.bindings import runtime as R
from msgspec.structs import replace

from pytest_gpumem.devices.cuda.compiler import HOLD
from pytest_gpumem.devices.cuda.context import check
from pytest_gpumem.devices.cuda.cupti import CALLBACKS, USE_KINDS
from pytest_gpumem.devices.cuda.modules import MODULES, LaunchedKernel, Launches
from pytest_gpumem.devices.cuda.places import malloc_managed, prefetch
from pytest_gpumem.devices.cuda.streams import PROPERTIES
from pytest_gpumem.devices.protocol import Counters, NotCounted, Span, Undelivered, WindowSpec
from pytest_gpumem.records.what_ran import (
    PageCounts,
    PageEvent,
    Step,
    WhatRan,
    page_counts,
    what_ran,
)

BUFFER_BYTES = 2**17
"""Of a buffer of records, for which a first record waits; CUPTI requests more when it is full."""
BEACON_BYTES = 2 * 2**20
"""A block of the driver's: no fault beside it moves it."""
WAKING = 6  # passes over the beacon after which counters that deliver nothing are given up
OPTIONAL = ("REMOTE_MAP", "BYTES_TRANSFER_DTOD")  # counters that not every platform has
CAUSES = {
    "USER": "prefetch",
    "COHERENCE": "fault",
    "PREFETCH": "speculation",
    "EVICTION": "eviction",
    "ACCESS_COUNTERS": "access counters",
}
"""CUpti_ActivityUnifiedMemoryMigrationCause in our words; PREFETCH are neighbours of a fault."""
_KINDS = {
    "BYTES_TRANSFER_HTOD": "to_device",
    "BYTES_TRANSFER_DTOH": "to_host",
    "BYTES_TRANSFER_DTOD": "between_devices",
    "GPU_PAGE_FAULT": "gpu_faults",
    # Its value is where the program was: each record is a fault.
    "CPU_PAGE_FAULT_COUNT": "cpu_faults",
    "REMOTE_MAP": "mapped",
}
"""CUpti_ActivityUnifiedMemoryCounterKind as fields of `PageCounts`."""
_NO_STREAM = 2**32 - 1
_WAITS = {
    "CONTEXT_SYNCHRONIZE": "device",
    "STREAM_SYNCHRONIZE": "stream",
    "EVENT_SYNCHRONIZE": "event",
}
"""What the host waits for, by CUpti_ActivitySynchronizationType."""
# CUaccessPolicyWindow: base_ptr, num_bytes, hitRatio, hitProp, missProp
_WINDOW = struct.Struct("<QQfii")
_PlacedStep = tuple[tuple[int, int, int], Step]
"""A step with the number of its call, the node of its graph, and its start."""


class CudaCounters(Counters):
    """CUPTI's counters of unified memory and its records of activity, for a device. The beacon is
    managed memory that is moved on purpose: some passes deliver nothing, mostly the first two."""

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
        spans: list[Span] = []
        with self._subscribed() as cupti:
            # Nanoseconds since 1970 as seconds would lose a quarter of a microsecond.
            begun = self._now()

            def receive(record: Any) -> None:
                name, blocks = "", 0
                if cupti.ActivityKind(int(record.kind)).name == "CONCURRENT_KERNEL":
                    name = str(record.name)
                    blocks = int(record.grid_x) * int(record.grid_y) * int(record.grid_z)
                if name != HOLD:
                    start, end = int(record.start) - begun, int(record.end) - begun
                    stream = int(record.stream_id)
                    spans.append(Span(name, blocks, start * 1e-9, end * 1e-9, stream))

            self._run(USE_KINDS, receive, work)
            self._refuse_losses()
        return spans

    def what_ran(self, work: Callable[[], None], wait: Callable[[], None]) -> WhatRan:
        with self._subscribed() as cupti, MODULES.launches() as launches:
            steps, times = list[_PlacedStep](), list[int]()

            def receive(record: Any) -> None:
                step = _step(cupti, record)
                if step is not None:
                    # Nodes of parallel branches of a graph begin in any order.
                    node = int(getattr(record, "graph_node_id", 0))
                    start = int(getattr(record, "start", 0))
                    steps.append(((int(record.correlation_id), node, start), step))

            def body() -> None:
                times.append(self._now())
                work()
                times.append(self._now())
                wait()

            with self._refusals("the attributes of launches"):
                cupti.activity_enable_launch_attributes(1)  # access-policy windows
            self._run((*USE_KINDS, "SYNCHRONIZATION"), receive, body)
            self._refuse_losses()
        return _what_ran(steps, launches, times[0], times[1])

    loading = staticmethod(MODULES.loading)

    def detach(self) -> None:
        if CALLBACKS.detach():
            self._awake = False

    def close(self) -> None:
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
    def _refusals(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise NotCounted(f"CUPTI refuses {what}: {lines[0]}") from error

    def _now(self) -> int:
        """Nanoseconds by CUPTI's clock, which fails once the context is lost."""
        with self._refusals("to tell the time"):
            return int(self._cupti.get_timestamp())

    def _page_events(self, work: Callable[[], None]) -> tuple[list[PageEvent], bool]:
        """The events of a pass, and True if mappings were counted."""
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
        """How many moves there and back were recorded whole."""
        moved = {"to_device": 0, "to_host": 0}
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
                with self._refusals("to deliver records"):
                    cupti.activity_flush_all(1)
        finally:
            for kind in enabled:
                with suppress(*self._errors):  # a lost context
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
        with suppress(*self._errors):  # not every version answers without a context
            self._cupti.activity_get_num_dropped_records(0, 0, dropped.ctypes.data)
        if dropped[0]:
            raise NotCounted(f"CUPTI dropped {int(dropped[0])} records")


def _page_event(cupti: Any, record: Any) -> PageEvent | None:
    """A record as plain values; None for another counter."""
    kind = cupti.ActivityUnifiedMemoryCounterKind(int(record.counter_kind)).name
    if kind not in _KINDS:
        return None
    why = CAUSES.get(_name(cupti.ActivityUnifiedMemoryMigrationCause, record.flags_), "unknown")
    if kind == "GPU_PAGE_FAULT":
        why = _name(cupti.ActivityUnifiedMemoryAccessType, record.flags_).lower()
    return PageEvent(
        kind=_KINDS[kind],
        value=int(record.value),
        start=int(record.start),
        end=int(record.end),
        address=int(record.address),
        why=why,
    )


def _step(cupti: Any, record: Any) -> Step | None:
    """A record of activity as a step; None for a wait of another kind."""
    kind = cupti.ActivityKind(int(record.kind)).name
    if kind == "CONCURRENT_KERNEL":
        step = _kernel_step(record)
    elif kind == "SYNCHRONIZATION":
        name = _WAITS.get(cupti.ActivitySynchronizationType(int(record.type)).name)
        if name is None:
            return None
        step = Step("synchronisation", name)
    elif kind == "MEMSET":
        memory = _memory_kind(cupti, record.memory_kind)
        step = Step("memset", memory=memory, nbytes=int(record.bytes))
    else:
        direction = cupti.ActivityMemcpyKind(int(record.copy_kind)).name  # "HTOD", "PTOP"
        step = Step(
            "copy",
            direction.replace("TO", "2"),
            source=_memory_kind(cupti, record.src_kind),
            memory=_memory_kind(cupti, record.dst_kind),
            nbytes=int(record.bytes),
        )
    stream = int(record.stream_id)
    return step if stream == _NO_STREAM else replace(step, stream=stream)


def _what_ran(steps: Sequence[_PlacedStep], launches: Launches, begin: int, end: int) -> WhatRan:
    """The record of a pass, without waits before `begin` and after `end`, in nanoseconds on CUPTI's
    clock. Raises `Undelivered`: kernels of another number of launches."""
    ordered = []
    calls: dict[int, list[str]] = {}  # names of the kernels of each call that launches
    for (number, _, start), step in sorted(steps, key=operator.itemgetter(0)):
        if step.kind == "synchronisation" and not begin <= start <= end:
            continue
        ordered.append(step)
        if step.kind == "kernel":
            calls.setdefault(number, []).append(step.name)
    # The runtime and the driver number a call differently, but both in the order of the calls.
    # [] is a launch without kernels, None one whose kernels are not known.
    launched = [launches[call] for call in sorted(launches) if launches[call] != []]
    if not calls and not any(launched):
        launched = []
    if len(calls) != len(launched):
        raise Undelivered(
            f"CUPTI delivered the kernels of {len(calls)} of {len(launched)} launches"
        )
    identities: list[Any] = []
    for names, kernels in zip(calls.values(), launched, strict=True):
        identities += _of_launch(names, kernels or ())
    launched_steps, unknown = list[Step](), list[str]()
    for step in ordered:
        if step.kind != "kernel":
            launched_steps.append(step)
            continue
        code, arguments, why = identities.pop(0)
        launched_steps.append(replace(step, code=code, arguments=arguments))
        if why and why not in unknown:
            unknown.append(why)
    return what_ran(launched_steps, not_watched="; ".join(unknown) or None)


def _of_launch(
    names: Sequence[str], kernels: Iterable[LaunchedKernel]
) -> Iterator[tuple[str | None, tuple[str, ...] | None, str]]:
    """The digest of each kernel's module, its arguments, and why either is unknown. Kernels of a
    name run as the graph's nodes follow."""
    nodes: dict[str, list[LaunchedKernel]] = {}
    for kernel in kernels:
        nodes.setdefault(kernel.name, []).append(kernel)
    for name in set(names):
        if len(nodes.get(name, ())) != names.count(name):
            nodes[name] = []
    for name in names:
        if not nodes[name]:
            yield None, None, f"the launch of {name} is not known"
            continue
        kernel = nodes[name].pop(0)
        code, why = MODULES.digest(kernel)
        if kernel.arguments is None and not why:
            why = f"the arguments of {name} cannot be read"
        yield code, kernel.arguments, why


def _kernel_step(record: Any) -> Step:
    return Step(
        "kernel",
        str(record.name),
        grid=(int(record.grid_x), int(record.grid_y), int(record.grid_z)),
        block=(int(record.block_x), int(record.block_y), int(record.block_z)),
        shared=int(record.static_shared_memory),
        dynamic_shared=int(record.dynamic_shared_memory),
        registers=int(record.registers_per_thread),
        local=int(record.local_memory_per_thread),
        window=_window(int(record.p_access_policy_window)),
    )


def _window(address: int) -> str | None:
    if not address:
        return None
    base, nbytes, ratio, hit, miss = _WINDOW.unpack(ctypes.string_at(address, _WINDOW.size))
    if not nbytes:
        return None
    return WindowSpec(base, nbytes, ratio, PROPERTIES[hit], PROPERTIES[miss]).words


def _memory_kind(cupti: Any, kind: int) -> str:
    """A CUpti_ActivityMemoryKind in our words: "pinned", or "device" for DEVICE_STATIC too."""
    return _name(cupti.ActivityMemoryKind, kind).removesuffix("_STATIC").lower()


def _name(enumeration: Any, number: int) -> str:
    """The name of a member; "UNKNOWN" for what this cupti-python does not know."""
    names = {int(member): member.name for member in enumeration}
    return str(names.get(int(number), "UNKNOWN"))
