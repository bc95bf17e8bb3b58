"""A record of what one launch ran, from CUPTI's records of activity and its callbacks of launches.

Sources: CUPTI, CUpti_ActivityKernel9 and its successors, CUpti_ActivityMemcpy,
CUpti_ActivityMemset, CUpti_ActivityMemory, CUpti_ActivitySynchronization, CUpti_ActivityAPI; CUDA
Driver API, CUaccessPolicyWindow.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from msgspec.structs import replace

from pytest_gpumem.devices.cuda.arguments import Kernel
from pytest_gpumem.devices.cuda.cupti import copy_use, memory_kind, memset_use
from pytest_gpumem.devices.cuda.modules import MODULES, Launch, UnknownModule
from pytest_gpumem.devices.protocol import AccessProperty, Undelivered, WindowSpec
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran

KINDS = (
    "CONCURRENT_KERNEL",
    "MEMCPY",
    "MEMCPY2",
    "MEMSET",
    "MEMORY2",
    "SYNCHRONIZATION",
    "RUNTIME",
    "DRIVER",
)
"""CUpti_ActivityKind of all records that are read."""

_QUERY = re.compile(
    r"Get|Query|Peek|Is[A-Z]|Occupancy|CanAccess|Elapsed|CaptureInfo|SetDevice|CtxSetCurrent"
    r"|CtxPush|CtxPop|PrimaryCtx"
    r"|ExchangeStreamCaptureMode|PushCallConfiguration|PopCallConfiguration"
)
"""Calls that change nothing on the device and are left out: how often a library asks may depend on
the time that work takes."""
_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?(_ptsz|_ptds)?$")
_NO_STREAM = 2**32 - 1
_WAITS = {
    "CONTEXT_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "device"),
    "STREAM_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "stream"),
    "EVENT_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "event"),
    "STREAM_WAIT_EVENT": (StepKind.JOIN, ""),
}
"""CUpti_ActivitySynchronizationType in our words."""
_WAITING = (StepKind.SYNCHRONISATION, StepKind.JOIN)
# CUaccessPolicyWindow: base_ptr, num_bytes, hitRatio, hitProp, missProp
_WINDOW = struct.Struct("<QQfii")
# CUaccessProperty
_PROPERTIES = {
    0: AccessProperty.NORMAL,
    1: AccessProperty.STREAMING,
    2: AccessProperty.PERSISTING,
}


class _PlacedStep(NamedTuple):
    """A step of the pass with its place in the launch."""

    place: tuple[int, int, int]  # number of the call, node of its graph, start
    step: Step


class PassRecords:
    """Records of one pass. `receive` is called while CUPTI still holds a record's buffer."""

    def __init__(self) -> None:
        self._steps: list[_PlacedStep] = []
        self._calls: list[tuple[int, str]] = []  # start in nanoseconds on CUPTI's clock, and name

    def receive(self, cupti: Any, record: Any) -> None:
        kind = cupti.ActivityKind(int(record.kind)).name
        if kind in ("RUNTIME", "DRIVER"):
            self._calls.append((int(record.start), call_name(cupti, kind, int(record.cbid))))
        elif kind == "SYNCHRONIZATION":
            wait = _WAITS.get(cupti.ActivitySynchronizationType(int(record.type)).name)
            if wait is not None:
                self._steps.append(_PlacedStep(_place(record), Step(*wait, stream=_stream(record))))
        elif kind == "CONCURRENT_KERNEL":
            self._steps.append(_PlacedStep(_place(record), kernel(record)))
        else:
            self._steps.append(_PlacedStep(_place(record), memory_step(cupti, kind, record)))

    def what_ran(self, launches: Sequence[Launch], begin: int, end: int) -> WhatRan:
        """Return the record of the launch.
        `launches`: calls that launch a kernel or a graph.
        `begin`, `end`: nanoseconds on CUPTI's clock. Calls and waits outside are not the launch's.
        Raises `Undelivered`: CUPTI delivered the kernels of another number of launches.
        """
        calls: Counter[str] = Counter()
        for start, name in self._calls:
            if begin <= start <= end and not _QUERY.search(name):
                calls[name] += 1
        ordered = []
        for placed in sorted(self._steps, key=lambda placed: placed.place):
            if placed.step.kind not in _WAITING or begin <= placed.place[2] <= end:
                ordered.append(placed)
        kernels = [placed for placed in ordered if placed.step.kind is StepKind.KERNEL]
        identities = iter(_identities(kernels, launches))
        steps, unknown = list[Step](), list[str]()
        for _, step in ordered:
            if step.kind is not StepKind.KERNEL:
                steps.append(step)
                continue
            code, arguments, why = next(identities)
            steps.append(replace(step, code=code, arguments=arguments))
            if why and why not in unknown:
                unknown.append(why)
        return what_ran(steps, calls, not_watched="; ".join(unknown) or None)


_Identity = tuple[str | None, tuple[str, ...] | None, str]
"""Digest of a kernel's module, its arguments, and why one of them is unknown."""


def _identities(kernels: Sequence[_PlacedStep], launches: Sequence[Launch]) -> Iterator[_Identity]:
    """What tells each kernel. `kernels`: in order.

    The runtime and the driver number a call differently, but both in the order of the calls.
    """
    by_call = groupby(kernels, key=lambda kernel: kernel.place[0])
    groups = [[kernel.step.name for kernel in group] for _, group in by_call]
    launched = [launch for launch in launches if launch.kernels != []]  # a graph may have none
    launched.sort(key=lambda launch: launch.correlation)
    if len(groups) != len(launched):
        raise Undelivered(
            f"CUPTI delivered the kernels of {len(groups)} of {len(launched)} launches"
        )
    for names, launch in zip(groups, launched, strict=True):
        yield from _of_launch(names, launch)


def _of_launch(names: Sequence[str], launch: Launch) -> Iterator[_Identity]:
    """What tells each kernel of a launch. Kernels of one name run as the graph's nodes follow."""
    known = launch.kernels or []
    left: dict[str, Iterator[Kernel]] = {}
    for name in set(names):
        nodes = [kernel for kernel in known if kernel.name == name]
        left[name] = iter(nodes if len(nodes) == names.count(name) else [])
    for name in names:
        kernel = next(left[name], None)
        if kernel is None:
            yield None, None, f"the launch of {name} is not known"
            continue
        try:
            code = MODULES.digest(kernel, in_graph=launch.graph)
        except UnknownModule as reason:
            yield None, kernel.arguments, str(reason)
            continue
        why = "" if kernel.arguments is not None else f"the arguments of {name} cannot be read"
        yield code, kernel.arguments, why


def call_name(cupti: Any, kind: str, number: int) -> str:
    """Name of a function of the runtime or the driver, without its version: "cudaMemAdvise"."""
    known = cupti.runtime_api_trace_cbid if kind == "RUNTIME" else cupti.driver_api_trace_cbid
    try:
        return _VERSION.sub("", known(number).name)
    except ValueError:  # newer than cupti-python
        return f"{kind.lower()} function {number}"


def kernel(record: Any) -> Step:
    """A record of a kernel."""
    cluster = (int(record.cluster_x), int(record.cluster_y), int(record.cluster_z))
    return Step(
        StepKind.KERNEL,
        str(record.name),
        grid=(int(record.grid_x), int(record.grid_y), int(record.grid_z)),
        block=(int(record.block_x), int(record.block_y), int(record.block_z)),
        cluster=cluster if any(side > 1 for side in cluster) else None,
        shared=int(record.static_shared_memory),
        dynamic_shared=int(record.dynamic_shared_memory),
        registers=int(record.registers_per_thread),
        local=int(record.local_memory_per_thread),
        window=window(int(record.p_access_policy_window)),
        stream=_stream(record),
    )


def window(address: int) -> str | None:
    """The access-policy window at an address, in words; None for none."""
    if not address:
        return None
    base, nbytes, ratio, hit, miss = _WINDOW.unpack(ctypes.string_at(address, _WINDOW.size))
    if not nbytes:
        return None
    normal = AccessProperty.NORMAL
    return WindowSpec(
        base, nbytes, ratio, _PROPERTIES.get(hit, normal), _PROPERTIES.get(miss, normal)
    ).words


def memory_step(cupti: Any, kind: str, record: Any) -> Step:
    """A record of a copy, a memset, or of memory that is allocated or freed."""
    if kind == "MEMORY2":
        freed = (
            cupti.ActivityMemoryOperationType(int(record.memory_operation_type)).name == "RELEASE"
        )
        memory = memory_kind(cupti, record.memory_kind)
        return Step(
            StepKind.FREE if freed else StepKind.ALLOCATION,
            memory=memory,
            nbytes=int(record.bytes),
            stream=_stream(record),
        )
    use = memset_use(cupti, record) if kind == "MEMSET" else copy_use(cupti, record)
    name = "" if kind == "MEMSET" else use.kind
    return Step(
        StepKind.MEMSET if kind == "MEMSET" else StepKind.COPY,
        name,
        source=use.source or None,
        memory=use.destination,
        nbytes=use.nbytes,
        stream=_stream(record),
    )


def _place(record: Any) -> tuple[int, int, int]:
    """The number of the call, then of the graph's node; nodes of parallel branches begin in any
    order."""
    graph = int(getattr(record, "graph_node_id", 0))
    return int(record.correlation_id), graph, int(getattr(record, "start", 0))


def _stream(record: Any) -> int | None:
    stream = int(record.stream_id)
    return None if stream == _NO_STREAM else stream
