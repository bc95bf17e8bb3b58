"""A record of what one launch ran, from CUPTI's records of activity and its callbacks of launches.

Sources: CUPTI, CUpti_ActivityKernel9 and its successors, CUpti_ActivityMemcpy, CUpti_ActivityMemset, CUpti_ActivityMemory,
CUpti_ActivitySynchronization, CUpti_ActivityAPI; CUDA Driver API, CUaccessPolicyWindow.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from msgspec.structs import replace

from pytest_gpumem.devices.cuda.cupti import copy_use, memory_kind, memset_use
from pytest_gpumem.devices.cuda.graph_nodes import NodeKernel
from pytest_gpumem.devices.cuda.modules import Launches, LaunchFunction, UnknownCode
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
    "STREAM",
)
"""CUpti_ActivityKind of all records that are read."""

_QUERY = re.compile(
    r"Get|Query|Peek|Is[A-Z]|Occupancy|CanAccess|Elapsed|CaptureInfo|SetDevice|CtxSetCurrent|CtxPush|CtxPop|PrimaryCtx"
    r"|ExchangeStreamCaptureMode|PushCallConfiguration|PopCallConfiguration"
)
"""Calls that change nothing on the device and are left out: how often a library asks may depend on the time that work takes."""
_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?(_ptsz|_ptds)?$")
_NO_STREAM = 2**32 - 1
_WAITS = {
    "CONTEXT_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "device"),
    "STREAM_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "stream"),
    "EVENT_SYNCHRONIZE": (StepKind.SYNCHRONISATION, "event"),
    "STREAM_WAIT_EVENT": (StepKind.JOIN, ""),
}
"""CUpti_ActivitySynchronizationType in our words."""
_WINDOW = struct.Struct(
    "<QQfii"
)  # CUaccessPolicyWindow: base_ptr, num_bytes, hitRatio, hitProp, missProp
_PROPERTIES = {
    0: AccessProperty.NORMAL,
    1: AccessProperty.STREAMING,
    2: AccessProperty.PERSISTING,
}  # CUaccessProperty


class _Codes(Protocol):
    """The interface of `modules.Modules`."""

    def code(self, name: str, function: int | None) -> str: ...


class PassRecords:
    """Records of one pass. `receive` is called while CUPTI still holds a record's buffer."""

    def __init__(self) -> None:
        self.steps: list[tuple[tuple[int, int, int], Step, bool]] = []
        """Position in the launch, step, and True for a kernel that was launched by a call of its own."""
        self.calls: list[tuple[int, str]] = []  # start in nanoseconds on CUPTI's clock, and name
        self.waits: list[tuple[int, int, Step]] = []  # start, position and step
        self.priorities: dict[int, int] = {}  # by stream; 0 is left out

    def receive(self, cupti: Any, record: Any) -> None:
        kind = cupti.ActivityKind(int(record.kind)).name
        if kind in ("RUNTIME", "DRIVER"):
            self.calls.append((int(record.start), call_name(cupti, kind, int(record.cbid))))
        elif kind == "STREAM":
            if priority := int(record.priority):
                self.priorities[int(record.stream_id)] = (
                    priority - 2**32 if priority >= 2**31 else priority
                )
        elif kind == "SYNCHRONIZATION":
            if (
                known := _WAITS.get(cupti.ActivitySynchronizationType(int(record.type)).name)
            ) is not None:
                self.waits.append(
                    (
                        int(record.start),
                        int(record.correlation_id),
                        Step(*known, stream=_stream(record)),
                    )
                )
        elif kind == "CONCURRENT_KERNEL":
            graph = int(record.graph_node_id)
            self.steps.append((_place(record), kernel(record), graph == 0))
        else:
            self.steps.append((_place(record), memory_step(cupti, kind, record), False))

    def what_ran(self, launches: Launches, begin: int, end: int, codes: _Codes) -> WhatRan:
        """The record of the launch.
        `launches`: calls that launch a kernel or a graph.
        `begin`, `end`: nanoseconds on CUPTI's clock. Calls and waits outside are not the launch's.
        `codes`: tells machine code.
        Raises `Undelivered`: CUPTI delivered another number of kernels than were launched.
        """
        calls = Counter(
            name for start, name in self.calls if begin <= start <= end and not _QUERY.search(name)
        )
        waits = [
            ((number, 0, 0), step, False)
            for start, number, step in self.waits
            if begin <= start <= end
        ]
        ordered = sorted((*self.steps, *waits), key=lambda one: one[0])
        kernels = iter(
            _of_kernels(
                ordered, launches, graph_launched=any("GraphLaunch" in name for name in calls)
            )
        )
        steps, unknown = [], dict[str, None]()
        for _, step, _ in ordered:
            known: dict[str, Any] = {}
            if step.kind is StepKind.KERNEL:
                known, why = _identity(step.name, *next(kernels), codes)
                unknown |= {} if why is None else {why: None}
            if step.stream is not None and step.stream in self.priorities:
                known["priority"] = self.priorities[step.stream]
            steps.append(replace(step, **known))
        return what_ran(steps, calls, not_watched="; ".join(unknown) or None)


def _of_kernels(
    ordered: Sequence[tuple[tuple[int, int, int], Step, bool]],
    launches: Launches,
    *,
    graph_launched: bool,
) -> list[tuple[int | None, tuple[str, ...] | None]]:
    """The function and the arguments of each kernel, None where they are unknown. `graph_launched`: a call launched a graph."""
    own = [(place[0], step.name) for place, step, called in ordered if called]
    of_graphs = [
        (place[0], step.name)
        for place, step, called in ordered
        if step.kind is StepKind.KERNEL and not called
    ]
    if len(own) != len(launches.kernels):
        raise Undelivered(f"CUPTI delivered {len(own)} of {len(launches.kernels)} kernels")
    if graph_launched and not of_graphs:
        raise Undelivered("CUPTI delivered no kernel of the graph that was launched")
    called_by = iter(
        _launches([place for place, _ in own], [name for _, name in own], launches.kernels)
    )
    in_graphs = iter(_arguments_in_graphs(of_graphs, launches.graphs))
    found: list[tuple[int | None, tuple[str, ...] | None]] = []
    for _, step, called in ordered:
        if step.kind is StepKind.KERNEL:
            launch = next(called_by) if called else None
            found.append(
                (None, next(in_graphs))
                if not called
                else (None, None)
                if launch is None
                else (launch.function, launch.arguments)
            )
    return found


def _identity(
    name: str, function: int | None, arguments: tuple[str, ...] | None, codes: _Codes
) -> tuple[dict[str, Any], str | None]:
    """The machine code and the arguments of a kernel, as fields of its step, and why one of them is unknown."""
    try:
        code = codes.code(name, function)
    except UnknownCode as why:
        return {}, str(why)
    unread = (
        f"the arguments of {name} cannot be read, so they are not in the digest"
        if arguments is None
        else None
    )
    return {"code": code, "arguments": arguments}, unread


def _launches(
    numbers: Sequence[int], names: Sequence[str], launches: Sequence[LaunchFunction]
) -> list[LaunchFunction | None]:
    """The call that launched each kernel: by CUPTI's number of it, or where runtime and driver number it differently, by the order."""
    by_number = {launch.correlation: launch for launch in launches}
    found = [by_number.get(number) for number in numbers]
    if any(
        launch is None or launch.name != name for launch, name in zip(found, names, strict=True)
    ):
        found = list(launches)
    return [
        None if launch is None or launch.name != name else launch
        for launch, name in zip(found, names, strict=True)
    ]


def _arguments_in_graphs(
    kernels: Sequence[tuple[int, str]], graphs: Sequence[Sequence[NodeKernel] | None]
) -> list[tuple[str, ...] | None]:
    """The arguments of each kernel of a graph: the launches of graphs follow each other as their calls do, and kernels of one name as the
    nodes do.
    `kernels`: number of the call, and name.
    `graphs`: the kernels of each graph that was launched.
    """
    numbers = list(dict.fromkeys(number for number, _ in kernels))
    launched = [graph for graph in graphs if graph is None or graph]  # others have no kernel
    if len(numbers) != len(launched):
        return [None] * len(kernels)
    ran, left = Counter(kernels), dict[tuple[int, str], Iterator[NodeKernel]]()
    for number, graph in zip(numbers, launched, strict=True):
        for name in {name for of, name in ran if of == number}:
            nodes = [node for node in graph or () if node.name == name]
            left[number, name] = iter(
                nodes
                if len(nodes) == ran[number, name]
                else [NodeKernel(name, None)] * ran[number, name]
            )
    return [next(left[kernel]).arguments for kernel in kernels]


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
    """The number of the call, then of the graph's node; nodes of parallel branches begin in any order."""
    graph = int(getattr(record, "graph_node_id", 0))
    return int(record.correlation_id), graph, int(getattr(record, "start", 0))


def _stream(record: Any) -> int | None:
    return None if (stream := int(record.stream_id)) == _NO_STREAM else stream
