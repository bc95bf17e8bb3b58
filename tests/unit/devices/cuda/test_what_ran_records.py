"""What one launch ran, from records of CUPTI as an H100 delivered them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings has no wheel for this machine")

from pytest_gpumem.devices.cuda.graph_nodes import NodeKernel
from pytest_gpumem.devices.cuda.modules import Launches, LaunchFunction, UnknownCode
from pytest_gpumem.devices.cuda.what_ran import PassRecords, call_name, window
from pytest_gpumem.devices.protocol import NotCounted
from pytest_gpumem.records.what_ran import StepKind, WhatRan

KINDS = [
    "CONCURRENT_KERNEL",
    "MEMCPY",
    "MEMCPY2",
    "MEMSET",
    "MEMORY2",
    "SYNCHRONIZATION",
    "RUNTIME",
    "DRIVER",
    "STREAM",
]
CUPTI = SimpleNamespace(
    ActivityKind=IntEnum("ActivityKind", KINDS),
    ActivityMemcpyKind=IntEnum("ActivityMemcpyKind", ["HTOD", "DTOH"]),
    ActivityMemoryKind=IntEnum("ActivityMemoryKind", ["PAGEABLE", "PINNED", "DEVICE", "MANAGED"]),
    ActivityMemoryOperationType=IntEnum("ActivityMemoryOperationType", ["ALLOCATION", "RELEASE"]),
    ActivitySynchronizationType=IntEnum(
        "ActivitySynchronizationType",
        ["EVENT_SYNCHRONIZE", "STREAM_WAIT_EVENT", "STREAM_SYNCHRONIZE", "CONTEXT_SYNCHRONIZE"],
    ),
    runtime_api_trace_cbid=IntEnum(
        "runtime", ["cudaGetDevice_v3020", "cudaMemAdvise_v12020", "cudaGraphLaunch_ptsz_v10000"]
    ),
    driver_api_trace_cbid=IntEnum("driver", ["cuLaunchKernel_ptsz", "cuMemcpyHtoDAsync_v2"]),
)
NO_STREAM = 2**32 - 1


class Codes:
    """Tells the code of a function as its number."""

    def code(self, name: str, function: int | None) -> str:
        if function == 0:
            raise UnknownCode(f"the machine code of {name} is not known")
        return f"code {function}"


def kernel(number: int, name: str = "scale", **changes: Any) -> Any:
    plain = {
        **{f"grid_{axis}": side for axis, side in zip("xyz", (64, 1, 1), strict=True)},
        **{f"block_{axis}": side for axis, side in zip("xyz", (256, 1, 1), strict=True)},
        **{f"cluster_{axis}": 0 for axis in "xyz"},
        "name": name,
        "correlation_id": number,
        "start": number,
        "graph_node_id": 0,
        "stream_id": 14,
        "registers_per_thread": 16,
        "static_shared_memory": 0,
        "dynamic_shared_memory": 0,
        "local_memory_per_thread": 0,
        "p_access_policy_window": 0,
    }
    return record("CONCURRENT_KERNEL", **{**plain, **changes})


def record(kind: str, **fields: Any) -> Any:
    return SimpleNamespace(kind=CUPTI.ActivityKind[kind], **fields)


def call(kind: str, name: str, start: int) -> Any:
    names = CUPTI.runtime_api_trace_cbid if kind == "RUNTIME" else CUPTI.driver_api_trace_cbid
    return record(kind, cbid=names[name], start=start)


def ran(
    *records: Any,
    launches: list[LaunchFunction] | None = None,
    graphs: Sequence[Sequence[NodeKernel] | None] = (),
    begin: int = 0,
    end: int = 1000,
) -> WhatRan:
    seen, collected = PassRecords(), Launches()
    for one in records:
        seen.receive(CUPTI, one)
    called = [
        LaunchFunction(
            one.correlation_id, one.name, one.correlation_id, (f"{one.correlation_id:x}",)
        )
        for one in records
        if hasattr(one, "grid_x") and not one.graph_node_id
    ]
    collected.kernels, collected.graphs = called if launches is None else launches, list(graphs)
    return seen.what_ran(collected, begin, end, Codes())


def test_steps_stand_in_the_order_of_their_calls() -> None:
    found = ran(
        kernel(3),
        record(
            "MEMCPY",
            correlation_id=1,
            copy_kind=1,
            src_kind=2,
            dst_kind=3,
            bytes=4096,
            start=9,
            end=10,
            stream_id=14,
        ),
        record("MEMSET", correlation_id=2, memory_kind=3, bytes=64, start=9, end=10, stream_id=15),
        record(
            "MEMORY2",
            correlation_id=4,
            memory_operation_type=1,
            memory_kind=3,
            bytes=1024,
            stream_id=NO_STREAM,
        ),
        record(
            "MEMORY2",
            correlation_id=5,
            memory_operation_type=2,
            memory_kind=3,
            bytes=1024,
            stream_id=NO_STREAM,
        ),
        record("SYNCHRONIZATION", correlation_id=6, start=6, type=3, stream_id=14),
        record("SYNCHRONIZATION", correlation_id=7, start=7, type=2, stream_id=15),
    )
    kinds = [(step.kind.value, step.name, step.stream) for step in found.launch]
    assert kinds == [
        ("copy", "H2D", 0),
        ("memset", "", 1),
        ("kernel", "scale", 0),
        ("allocation", "", None),
        ("free", "", None),
        ("synchronisation", "stream", 0),
        ("join", "", 1),
    ]
    copy, memset, work, allocation, *_ = found.launch
    assert (copy.source, copy.memory, copy.nbytes) == ("pinned", "device", 4096)
    assert (memset.source, memset.memory, memset.nbytes) == (None, "device", 64)
    assert (work.code, work.registers, work.cluster, work.window) == ("code 3", 16, None, None)
    assert (allocation.memory, allocation.nbytes) == ("device", 1024)
    assert found.digest is not None


def test_calls_are_counted_without_queries_and_without_what_waits_for_the_launch() -> None:
    waits = record("SYNCHRONIZATION", correlation_id=9, start=11, type=4, stream_id=NO_STREAM)
    calls = [
        call("RUNTIME", "cudaMemAdvise_v12020", 5),
        call("RUNTIME", "cudaGetDevice_v3020", 6),
        call("DRIVER", "cuLaunchKernel_ptsz", 7),
        call("RUNTIME", "cudaMemAdvise_v12020", 11),
    ]
    found = ran(kernel(1), *calls, waits, begin=2, end=10)
    assert found.calls == {"cuLaunchKernel": 1, "cudaMemAdvise": 1}
    assert [step.kind for step in found.launch] == [StepKind.KERNEL]


def test_a_name_has_no_version_and_a_newer_call_a_number() -> None:
    assert (
        call_name(CUPTI, "DRIVER", CUPTI.driver_api_trace_cbid["cuMemcpyHtoDAsync_v2"])
        == "cuMemcpyHtoDAsync"
    )
    assert (
        call_name(CUPTI, "RUNTIME", CUPTI.runtime_api_trace_cbid["cudaGraphLaunch_ptsz_v10000"])
        == "cudaGraphLaunch"
    )
    assert call_name(CUPTI, "RUNTIME", 77) == "runtime function 77"


def test_kernels_are_matched_by_number_or_where_these_differ_by_their_order() -> None:
    records = [kernel(1, "a"), kernel(2, "a"), kernel(3, "b")]
    by_number = [LaunchFunction(2, "a", 20), LaunchFunction(1, "a", 10), LaunchFunction(3, "b", 30)]
    assert [step.code for step in ran(*records, launches=by_number).launch] == [
        "code 10",
        "code 20",
        "code 30",
    ]
    by_order = [
        LaunchFunction(101, "a", 10),
        LaunchFunction(102, "a", 20),
        LaunchFunction(103, "b", 30),
    ]
    assert [step.code for step in ran(*records, launches=by_order).launch] == [
        "code 10",
        "code 20",
        "code 30",
    ]


def test_kernels_that_are_missing_are_no_record() -> None:
    with pytest.raises(NotCounted, match="delivered 1 of 2 kernels"):
        ran(kernel(1), launches=[LaunchFunction(1, "scale", 1), LaunchFunction(2, "scale", 2)])
    with pytest.raises(NotCounted, match="no kernel of the graph"):
        ran(call("RUNTIME", "cudaGraphLaunch_ptsz_v10000", 5))


def test_kernels_of_a_graph_have_no_call_of_their_own() -> None:
    found = ran(kernel(5, "b", graph_node_id=8, start=2), kernel(5, "a", graph_node_id=7, start=3))
    assert [(step.name, step.code) for step in found.launch] == [
        ("a", "code None"),
        ("b", "code None"),
    ]


def test_a_kernel_without_known_code_leaves_no_digest() -> None:
    found = ran(kernel(0), kernel(1))
    assert (found.digest, found.not_watched) == (None, "the machine code of scale is not known")
    assert [step.code for step in found.launch] == [None, "code 1"]


def test_a_kernel_has_the_arguments_of_its_launch_or_of_its_node() -> None:
    records = [
        kernel(1, "a"),
        kernel(4, "b", graph_node_id=8),
        kernel(4, "a", graph_node_id=7),
        kernel(4, "a", graph_node_id=9),
    ]
    nodes = [NodeKernel("a", ("5",)), NodeKernel("a", ("6",)), NodeKernel("b", ("7", "p256"))]
    found = ran(*records, graphs=[[], nodes])
    assert [step.arguments for step in found.launch] == [("1",), ("5",), ("7", "p256"), ("6",)]
    assert found.digest is not None


@pytest.mark.parametrize(
    "graphs",
    [
        [],
        [None],
        [[NodeKernel("a", None)]],
        [[NodeKernel("b", ("1",))]],
        [[NodeKernel("a", ("1",))] * 2],
    ],
)
def test_arguments_that_are_not_known_leave_no_digest(
    graphs: list[Sequence[NodeKernel] | None],
) -> None:
    found = ran(kernel(4, "a", graph_node_id=7), graphs=graphs)
    assert (found.digest, found.not_watched) == (
        None,
        "the arguments of a cannot be read, so they are not in the digest",
    )
    unread = ran(kernel(1, "a"), launches=[LaunchFunction(1, "a", 1)])
    assert (unread.digest, unread.launch[0].code) == (None, "code 1")


def test_a_streams_priority_and_a_cluster() -> None:
    found = ran(
        kernel(1, cluster_x=2, cluster_y=1, cluster_z=1),
        record("STREAM", stream_id=14, priority=2**32 - 5),
    )
    (step,) = found.launch
    assert (step.priority, step.cluster) == (-5, (2, 1, 1))


def test_the_window_of_a_launch() -> None:
    raw = bytes.fromhex(
        "000080d0897f000000001000000000000000803f0200000001000000"
    )  # as an H100 delivered it
    buffer = ctypes.create_string_buffer(raw, len(raw))
    assert window(ctypes.addressof(buffer)) == "1 MiB at hit ratio 1, persisting, else streaming"
    nothing = ctypes.create_string_buffer(bytes(len(raw)), len(raw))
    assert (window(ctypes.addressof(nothing)), window(0)) == (None, None)
