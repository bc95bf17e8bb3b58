"""A record of what one launch ran, from CUPTI's records of activity and its callbacks of launches.

Sources: CUPTI, CUpti_ActivityKernel9 and its successors, CUpti_ActivityMemcpy,
CUpti_ActivityMemset, CUpti_ActivitySynchronization; CUDA Driver API, CUaccessPolicyWindow.
"""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from pytest_gpumem.devices.cuda.cupti import USE_KINDS
from pytest_gpumem.devices.cuda.hints import PROPERTIES
from pytest_gpumem.devices.cuda.modules import MODULES, LaunchCall, LaunchedKernel
from pytest_gpumem.devices.protocol import Undelivered, WindowSpec
from pytest_gpumem.records.what_ran import Step, StepKind, WhatRan, what_ran

KINDS = (*USE_KINDS, "SYNCHRONIZATION")  # CUpti_ActivityKind of all records that are read

_NO_STREAM = 2**32 - 1
_WAITS = {
    "CONTEXT_SYNCHRONIZE": "device",
    "STREAM_SYNCHRONIZE": "stream",
    "EVENT_SYNCHRONIZE": "event",
}
"""What the host waits for, by CUpti_ActivitySynchronizationType."""
# CUaccessPolicyWindow: base_ptr, num_bytes, hitRatio, hitProp, missProp
_WINDOW = struct.Struct("<QQfii")


class PassRecords:
    """The records of a pass."""

    def __init__(self, cupti: Any) -> None:
        self._cupti = cupti
        self._steps: list[tuple[tuple[int, int, int], Step]] = []
        """With the number of the call, the node of its graph, and the start."""

    def receive(self, record: Any) -> None:
        cupti = self._cupti
        kind = cupti.ActivityKind(int(record.kind)).name
        if kind == "CONCURRENT_KERNEL":
            step = _kernel_step(record)
        elif kind == "SYNCHRONIZATION":
            name = _WAITS.get(cupti.ActivitySynchronizationType(int(record.type)).name)
            if name is None:
                return
            step = Step(StepKind.SYNCHRONISATION, name)
        elif kind == "MEMSET":
            memory = _memory_kind(cupti, record.memory_kind)
            step = Step(StepKind.MEMSET, memory=memory, nbytes=int(record.bytes))
        else:
            direction = cupti.ActivityMemcpyKind(int(record.copy_kind)).name  # "HTOD", "PTOP"
            step = Step(
                StepKind.COPY,
                direction.replace("TO", "2"),
                source=_memory_kind(cupti, record.src_kind),
                memory=_memory_kind(cupti, record.dst_kind),
                nbytes=int(record.bytes),
            )
        stream = int(record.stream_id)
        if stream != _NO_STREAM:
            step = replace(step, stream=stream)
        # Nodes of parallel branches of a graph begin in any order.
        node = int(getattr(record, "graph_node_id", 0))
        place = int(record.correlation_id), node, int(getattr(record, "start", 0))
        self._steps.append((place, step))

    def what_ran(self, launches: Sequence[LaunchCall], begin: int, end: int) -> WhatRan:
        """Return the record, without waits before `begin` and after `end`, in nanoseconds on
        CUPTI's clock. Raises `Undelivered`: kernels of another number of launches."""
        ordered = []
        calls: dict[int, list[str]] = {}  # names of the kernels of each call that launches
        for (number, _, start), step in sorted(self._steps, key=operator.itemgetter(0)):
            if step.kind is StepKind.SYNCHRONISATION and not begin <= start <= end:
                continue
            ordered.append(step)
            if step.kind is StepKind.KERNEL:
                calls.setdefault(number, []).append(step.name)
        # The runtime and the driver number a call differently, but both in the order of the calls.
        launched = [launch for launch in launches if launch.kernels != []]  # a graph may have none
        launched.sort(key=lambda launch: launch.correlation)
        if not calls and all(launch.kernels is None for launch in launched):
            launched = []
        if len(calls) != len(launched):
            raise Undelivered(
                f"CUPTI delivered the kernels of {len(calls)} of {len(launched)} launches"
            )
        identities: list[Any] = []
        for names, launch in zip(calls.values(), launched, strict=True):
            identities += _of_launch(names, launch)
        steps, unknown = list[Step](), list[str]()
        for step in ordered:
            if step.kind is not StepKind.KERNEL:
                steps.append(step)
                continue
            code, arguments, why = identities.pop(0)
            steps.append(replace(step, code=code, arguments=arguments))
            if why and why not in unknown:
                unknown.append(why)
        return what_ran(steps, not_watched="; ".join(unknown) or None)


def _of_launch(
    names: Sequence[str], launch: LaunchCall
) -> Iterator[tuple[str | None, tuple[str, ...] | None, str]]:
    """The digest of each kernel's module, its arguments, and why either is unknown. Kernels of a
    name run as the graph's nodes follow."""
    nodes: dict[str, list[LaunchedKernel]] = {}
    for kernel in launch.kernels or ():
        nodes.setdefault(kernel.name, []).append(kernel)
    for name in set(names):
        if len(nodes.get(name, ())) != names.count(name):
            nodes[name] = []
    for name in names:
        if not nodes[name]:
            yield None, None, f"the launch of {name} is not known"
            continue
        kernel = nodes[name].pop(0)
        code, why = MODULES.digest(kernel, in_graph=launch.graph)
        if kernel.arguments is None and not why:
            why = f"the arguments of {name} cannot be read"
        yield code, kernel.arguments, why


def _kernel_step(record: Any) -> Step:
    return Step(
        StepKind.KERNEL,
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
    known = {int(member): member.name for member in cupti.ActivityMemoryKind}
    return str(known.get(int(kind), "UNKNOWN")).removesuffix("_STATIC").lower()
