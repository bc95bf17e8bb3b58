"""Calls of CUDA as CUPTI's callbacks tell them, the table of what waits, and windows over their sums."""

from __future__ import annotations

import ctypes
import enum
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpumem.devices.allocation_sites import PACKAGE
from pytest_gpumem.devices.calls import CallLog, CallWindow, PlainCalls, calls_counted
from pytest_gpumem.devices.footprints import SourceFootprints
from pytest_gpumem.devices.waits import CALLS, base_name, copy_waits, memset_waits
from pytest_gpumem.records.calls import Calls
from pytest_gpumem.records.what_ran import Step, StepKind

if sys.platform != "linux":
    pytest.skip("cuda-bindings is for Linux here", allow_module_level=True)

from cuda.bindings import driver as D  # noqa: N812

from pytest_gpumem.devices.cuda import calls as cuda
from pytest_gpumem.devices.cuda.cupti import ApiCall

PAGEABLE, PINNED, DEVICE = 0x1000, 0x2000, 0x3000
KERNEL = Step(StepKind.KERNEL)


@pytest.mark.parametrize(
    ("source", "destination", "ordered", "expected"),
    [
        ("pageable", "device", False, "waits"),
        ("pinned", "device", False, "waits"),
        ("device", "pageable", False, "waits"),
        ("device", "device", False, "does not"),
        ("pageable", "pinned", False, "waits"),
        ("pageable", "pinned", True, "waits"),
        ("pageable", "device", True, "may"),
        ("device", "pageable", True, "may"),
        ("device", "pinned", True, "does not"),
        ("pinned", "device", True, "does not"),
        ("device", "device", True, "does not"),
        ("managed", "device", False, "may"),
        ("array", "device", True, "does not"),
    ],
)
def test_a_copy_waits_by_its_memory(
    source: str, destination: str, ordered: bool, expected: str
) -> None:
    """CUDA Driver API, API synchronization behavior, Memcpy."""
    assert copy_waits(source, destination, ordered=ordered) == expected


def test_a_memset_waits_for_pinned_and_managed_memory() -> None:
    assert [memset_waits(kind, ordered=False) for kind in ("device", "pinned", "managed")] == [
        "does not",
        "waits",
        "waits",
    ]
    assert memset_waits("pinned", ordered=True) == "does not"


def test_versions_of_a_call_have_one_entry() -> None:
    assert {base_name(name) for name in ("cuMemFree_v2", "cuMemFree")} == {"cuMemFree"}
    assert base_name("cuMemcpyHtoDAsync_v2_ptsz") == "cuMemcpyHtoDAsync"
    assert CALLS[base_name("cuStreamSynchronize_ptsz")] == ("waits", "stream")


# Callbacks

NAMES = (
    *(
        "cuLaunchKernel",
        "cuLaunchKernel_ptsz",
        "cuLaunchKernelEx",
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuMemFree_v2",
        "cuMemAlloc_v2",
    ),
    *(
        "cuMemcpyHtoD_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpy2D_v2",
        "cuMemcpy3DAsync_v2",
        "cuMemcpyAsync",
        "cuMemcpy3DBatchAsync",
    ),
    *(
        "cuMemcpyBatchAsync_v2",
        "cuMemsetD32_v2",
        "cuMemsetD8Async",
        "cuModuleLoadData",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
    ),
    *(
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
        "cuMemcpyHtoA_v2",
        "cuEventQuery",
        "cuStreamEndCaptureToCig",
    ),
    *(
        "cuMemcpyDtoHAsync_v2_ptsz",
        "cuMemsetD8Async_ptsz",
        "cuMemsetD2D8Async",
        "cuMemcpyAtoA_v2",
        "cuMemcpyPeerAsync",
    ),
    *(
        "cuGraphExecUpdate_v2",
        "cuGraphNodeSetEnabled",
        "cuGraphExecMemcpyNodeSetParams",
        "cuGraphExecDestroy",
    ),
)


class Callbacks:
    """Calls as CUPTI reports them: at their begin and at their end."""

    def __init__(self, calls: cuda.CudaCalls) -> None:
        self.calls = calls
        driver = enum.IntEnum("driver", {name: at for at, name in enumerate(NAMES)})  # type: ignore[misc]
        calls._number(SimpleNamespace(driver_api_trace_cbid=driver))
        self.window = calls.log.open()

    def _report(
        self, receive: Any, number: int, site: int, words: tuple[int, ...], result: int = 0
    ) -> None:
        parameters = (ctypes.c_uint64 * max(1, len(words)))(*words)
        status = ctypes.c_int(result)
        data = ApiCall(
            site=site,
            parameters=ctypes.addressof(parameters),
            result=ctypes.addressof(status),
            correlation=7,
        )
        receive(number, ctypes.addressof(data))

    def begin(self, name: str, *words: int) -> None:
        if NAMES.index(name) not in self.calls._launches:  # of launches only the ends are received
            self._report(self.calls._begun, NAMES.index(name), 0, words)

    def end(self, name: str, *words: int, result: int = 0) -> None:
        number = NAMES.index(name)
        receive = self.calls._launched if number in self.calls._launches else self.calls._followed
        self._report(receive, number, 1, words, result)

    def __call__(self, name: str, *words: int, result: int = 0) -> None:
        self.begin(name, *words)
        self.end(name, *words, result=result)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callbacks:
    kinds = {PAGEABLE: "pageable", PINNED: "pinned", DEVICE: "device"}
    monkeypatch.setattr(cuda, "_memory", lambda address: kinds.get(address & 0xF000, "unknown"))
    monkeypatch.setattr(cuda, "native_frames", lambda: ())
    monkeypatch.setattr(D, "cuStreamIsCapturing", lambda stream: (D.CUresult(0), 0))
    return Callbacks(cuda.CudaCalls())


def read(calls: Callbacks) -> Calls:
    return calls.window.read(Path(__file__).parent)


def waits(calls: Callbacks) -> list[tuple[str, str, bool]]:
    return [(one.call, one.of, one.sure) for one in read(calls).waiting]


def test_launches_and_their_stream(calls: Callbacks) -> None:
    def launch(stream: int) -> tuple[int, ...]:
        return 1, 0, 0, 0, 0, stream

    calls("cuLaunchKernel", *launch(0))
    calls("cuLaunchKernel", *launch(1))
    calls("cuLaunchKernel", *launch(0x77))
    calls("cuLaunchKernel_ptsz", *launch(0))
    calls("cuLaunchKernel", *launch(0), result=1)  # refused: nothing ran
    config = D.CUlaunchConfig()
    config.hStream = D.CUstream(0)
    calls("cuLaunchKernelEx", int(config.getPtr()))
    assert (read(calls).kernels, read(calls).default_stream) == (5, 3)


def test_copies_by_kind_bytes_and_wait(calls: Callbacks) -> None:
    calls("cuMemcpyHtoD_v2", DEVICE, PAGEABLE, 100)
    calls("cuMemcpyDtoHAsync_v2", PINNED, DEVICE, 50, 5)
    calls("cuMemcpyDtoHAsync_v2", PAGEABLE, DEVICE, 25, 5)
    calls("cuMemcpyAsync", DEVICE, DEVICE, 10, 5)
    calls("cuMemcpyHtoA_v2", 0x99, 0, PAGEABLE, 7)
    found = {
        (one.kind, one.source, one.destination): (one.count, one.nbytes)
        for one in read(calls).copies
    }
    assert found == {
        ("H2D", "pageable", "device"): (1, 100),
        ("D2H", "device", "pinned"): (1, 50),
        ("D2H", "device", "pageable"): (1, 25),
        ("D2D", "device", "device"): (1, 10),
        ("H2A", "pageable", "array"): (1, 7),
    }
    assert waits(calls) == [
        ("cuMemcpyHtoD", "copy", True),
        ("cuMemcpyDtoHAsync", "copy", False),
        ("cuMemcpyHtoA", "copy", True),
    ]


def test_copies_of_boxes_and_batches(calls: Callbacks) -> None:
    plane, box = D.CUDA_MEMCPY2D(), D.CUDA_MEMCPY3D()
    plane.srcMemoryType, plane.srcHost, plane.dstMemoryType = (
        D.CUmemorytype.CU_MEMORYTYPE_HOST,
        PAGEABLE,
        D.CUmemorytype.CU_MEMORYTYPE_DEVICE,
    )
    plane.WidthInBytes, plane.Height = 16, 3
    calls("cuMemcpy2D_v2", int(plane.getPtr()))
    box.srcMemoryType, box.dstMemoryType, box.dstHost = (
        D.CUmemorytype.CU_MEMORYTYPE_DEVICE,
        D.CUmemorytype.CU_MEMORYTYPE_HOST,
        PINNED,
    )
    box.WidthInBytes, box.Height, box.Depth = 8, 2, 5
    calls("cuMemcpy3DAsync_v2", int(box.getPtr()), 3)
    lists = [(ctypes.c_uint64 * 2)(*of) for of in ((DEVICE, DEVICE), (PINNED, PAGEABLE), (40, 60))]
    calls("cuMemcpyBatchAsync_v2", *map(ctypes.addressof, lists), 2)
    found = {(one.source, one.destination): one.nbytes for one in read(calls).copies}
    assert found == {
        ("pageable", "device"): 48 + 60,
        ("device", "pinned"): 80,
        ("pinned", "device"): 40,
    }
    assert read(calls).not_counted is None
    calls("cuMemcpy3DBatchAsync", 1)
    assert read(calls).not_counted == "cuMemcpy3DBatchAsync is not read"


def test_waits_have_the_line_and_the_time(calls: Callbacks) -> None:
    calls("cuStreamSynchronize", 0)
    calls("cuMemFree_v2", DEVICE)
    calls("cuMemFree_v2", 0)  # does nothing
    calls("cuMemAlloc_v2", 0, 64)
    assert "cuEventQuery" not in [
        one.name for one in calls.calls._calls.values()
    ]  # it has no callback
    assert waits(calls) == [
        ("cuStreamSynchronize", "stream", True),
        ("cuMemFree", "free", True),
        ("cuMemAlloc", "allocation", False),
    ]
    first = read(calls).waiting[0]
    assert (first.file, first.function) == (
        Path(__file__).name,
        "_report",
    )  # the innermost line of code that is the user's
    assert first.seconds > 0
    assert read(calls).waits == 2


@pytest.mark.parametrize(
    ("stream", "version", "expected"),
    [(0, "", 1), (1, "", 1), (0x77, "", 0), (0, "_ptsz", 0), (1, "_ptsz", 1)],
)
def test_work_on_the_legacy_default_stream_is_told_apart(
    calls: Callbacks, stream: int, version: str, expected: int
) -> None:
    calls(f"cuMemcpyDtoHAsync_v2{version}", PINNED, DEVICE, 12, stream)
    assert read(calls).default_stream == expected
    calls(f"cuMemsetD8Async{version}", DEVICE, 0, 8, stream)
    assert read(calls).default_stream == 2 * expected


def test_a_copy_without_a_stream_is_on_the_legacy_default_stream(calls: Callbacks) -> None:
    calls("cuMemcpyHtoD_v2", DEVICE, PAGEABLE, 12)
    assert read(calls).default_stream == 1


def test_a_call_that_fails_counts_nothing(calls: Callbacks) -> None:
    calls("cuStreamSynchronize", 5, result=1)
    calls("cuMemcpyHtoD_v2", DEVICE, PAGEABLE, 12, result=1)
    assert not read(calls).any


def test_what_is_captured_and_loaded_is_known_where_it_began_before_anybody_counted(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_nodes", lambda graph: iter([KERNEL, KERNEL]))
    calls.window.close()
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    calls("cuStreamBeginCapture_v2", 5, 0)
    calls.begin("cuModuleLoadData", 0)
    calls.window = calls.calls.log.open()
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    assert not read(calls).any
    calls("cuStreamEndCaptureToCig", 5, 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    assert (read(calls).kernels, read(calls).first_use) == (0, {"kernels": 1})
    calls.end("cuModuleLoadData", 0)
    calls("cuGraphLaunch", 0xE1, 5)
    assert (read(calls).kernels, read(calls).not_counted) == (2, None)


def test_begins_ends_and_misses_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of launches the ends alone; what a receiver misses makes the counts unknown."""
    added = list[tuple[set[str], Any, Any, Any]]()

    def add(domain: str, names: list[str], receive: Any, lost: Any, *, begins: Any) -> Any:
        added.append((set(names), receive, lost, begins))
        return lambda: None

    monkeypatch.setattr(cuda.CALLBACKS, "add", add)
    source = Callbacks(cuda.CudaCalls()).calls
    assert source.start() is None
    launches, others = (
        {"cuLaunchKernel", "cuLaunchKernel_ptsz", "cuLaunchKernelEx"},
        set(NAMES) - {"cuEventQuery"},
    )
    assert added == [
        (launches, source._launched, source._missed, False),
        (others - launches, source._followed, source._missed, source._begun),
    ]


def test_what_a_stop_or_a_profiler_hides_does_not_stay(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture or a load whose end nobody saw would make all later work that of a graph or of a first use."""
    monkeypatch.setattr(cuda.CALLBACKS, "add", lambda *of, **more: lambda: None)
    launch = ("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    calls("cuStreamBeginCapture_v2", 5, 0)
    calls.begin("cuModuleLoadData", 0)
    calls(*launch)
    assert read(calls).kernels == 0
    assert calls.calls.start() is None
    calls(*launch)
    assert (read(calls).kernels, read(calls).not_counted) == (1, None)
    calls("cuStreamBeginCapture_v2", 5, 0)
    calls.begin("cuModuleLoadData", 0)
    calls.calls._missed("a profiler had CUPTI")
    calls(*launch)
    assert (read(calls).kernels, read(calls).not_counted) == (2, "a profiler had CUPTI")


def test_a_graph_from_before_a_stop_is_not_known(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it may have changed, or been destroyed, so that another one has its handle."""
    monkeypatch.setattr(cuda.CALLBACKS, "add", lambda *of, **more: lambda: None)
    monkeypatch.setattr(cuda, "_nodes", lambda graph: iter([KERNEL]))
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    calls.calls.stop()
    assert calls.calls.start() is None
    calls("cuGraphLaunch", 0xE1, 5)
    assert (read(calls).kernels, read(calls).not_counted) == (
        0,
        "a graph was launched whose nodes are not known",
    )
    calls("cuGraphExecUpdate_v2", 0xE1, 0x51, 0)  # now it is known again
    calls("cuGraphLaunch", 0xE1, 5)
    assert read(calls).kernels == 1


def test_first_use_is_counted_apart(calls: Callbacks, monkeypatch: pytest.MonkeyPatch) -> None:
    calls.begin("cuModuleLoadData", 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    calls("cuCtxSynchronize")
    calls.end("cuModuleLoadData", 0)
    monkeypatch.setattr(cuda, "native_frames", lambda: (1,))
    monkeypatch.setattr(
        cuda, "_of_address", lambda _: cuda.meaning(b"/lib/libcublas.so.13", b"cublasCreate_v2")
    )
    calls("cuStreamSynchronize", 0)
    monkeypatch.setattr(cuda, "native_frames", lambda: (2, 3))
    monkeypatch.setattr(
        cuda, "_of_address", lambda _: cuda.meaning(b"/site-packages/cupy/cuda/memory.so", b"")
    )
    calls("cuMemAlloc_v2", 0, 64)
    calls("cuStreamSynchronize", 0)  # a pool that waits for another reason
    found = read(calls)
    assert found.kernels == 0
    assert found.first_use == {"modules": 1, "kernels": 1, "waits": 3}
    assert found.waits == 1


def test_the_native_stack_is_read_once_a_place_and_after_what_a_first_use_begins_with(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read it takes longer than the wait. A handle that is made later, where a wait was plain before, is found all the same."""
    looks, stack = list[str](), ["plain"]

    def native_frames() -> tuple[int, ...]:
        looks.append(stack[0])
        return (1,) if stack == ["creating"] else (2,)

    monkeypatch.setattr(cuda, "native_frames", native_frames)
    monkeypatch.setattr(
        cuda,
        "_of_address",
        lambda at: cuda.meaning(b"/lib/libcublas.so.13", b"cublasCreate_v2" if at == 1 else b""),
    )
    # One array, so that the parameters lie at one address as those of one native stack do.
    parameters = (ctypes.c_uint64 * 6)(5)
    status = ctypes.c_int(0)
    address = ctypes.addressof(parameters)

    def library(*names: str) -> None:
        for name in names:
            for site in (0, 1):
                data = ApiCall(site=site, parameters=address, result=ctypes.addressof(status))
                receive = (calls.calls._begun, calls.calls._followed)[site]
                receive(NAMES.index(name), ctypes.addressof(data))

    for _ in range(4):
        library("cuStreamSynchronize")
    assert (looks, read(calls).waits) == (["plain"], 4)
    library(
        "cuMemAlloc_v2", "cuStreamSynchronize"
    )  # a handle asks for memory too; the allocation is looked at itself
    assert (looks, read(calls).waits) == (3 * ["plain"], 5)
    for stack[0] in ("plain", "creating", "plain", "plain"):
        library("cuModuleLoadData", "cuStreamSynchronize", "cuStreamSynchronize")
    assert looks[3:] == ["plain"] + 2 * ["creating"] + 4 * ["plain"]
    assert (read(calls).waits, read(calls).first_use["waits"]) == (5 + 6, 2)


def test_a_call_whose_end_was_missed_does_not_stay_open(calls: Callbacks) -> None:
    calls.begin("cuModuleLoadData", 0)
    calls.begin("cuStreamSynchronize", 5)
    calls.end("cuModuleLoadData", 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    assert (read(calls).kernels, read(calls).first_use) == (1, {"modules": 1})


def test_a_capture_runs_nothing_and_a_graph_its_nodes(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls("cuStreamBeginCapture_v2", 5, 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    calls("cuMemsetD8Async", DEVICE, 0, 8, 5)
    calls("cuStreamEndCapture", 5, 0, result=901)  # it fails, and has ended
    assert not read(calls).any
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    assert read(calls).kernels == 1
    copy = Step(StepKind.COPY, "D2D", source="device", memory="device", nbytes=64)
    monkeypatch.setattr(
        cuda, "_nodes", lambda graph: iter([KERNEL, KERNEL, copy] if graph == 0x51 else [])
    )
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    for _ in range(3):
        calls("cuGraphLaunch", 0xE1, 5)
    assert (read(calls).kernels, read(calls).copied, read(calls).copied_bytes) == (7, 3, 192)
    calls("cuGraphLaunch", 0xE2, 5)
    assert "a graph was launched whose nodes are not known" in str(read(calls).not_counted)


@pytest.mark.parametrize(
    ("change", "kernels"),
    [
        (("cuGraphExecUpdate_v2", 0xE1, 0x52, 0), 1),  # read again
        (("cuGraphNodeSetEnabled", 0xE1, 0x61, 0), None),
        (("cuGraphExecMemcpyNodeSetParams", 0xE1, 0x61, 0, 0), None),
        (("cuGraphExecDestroy", 0xE1), None),  # another graph may have its handle
    ],
)
def test_a_graph_that_changes_is_read_again_or_not_known(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch, change: tuple[Any, ...], kernels: int | None
) -> None:
    monkeypatch.setattr(
        cuda, "_nodes", lambda graph: iter({0x51: [KERNEL, KERNEL], 0x52: [KERNEL]}[graph])
    )
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    calls(*change)
    calls("cuGraphLaunch", 0xE1, 5)
    found = read(calls)
    assert (found.kernels if found.not_counted is None else None) == kernels


KINDS_OF_NODES = {kind.name.removeprefix("CU_GRAPH_NODE_TYPE_"): kind for kind in D.CUgraphNodeType}
NO_WORK = {
    *(
        "EMPTY",
        "HOST",
        "WAIT_EVENT",
        "EVENT_RECORD",
        "EXT_SEMAS_SIGNAL",
        "EXT_SEMAS_WAIT",
        "MEM_ALLOC",
        "MEM_FREE",
        "BATCH_MEM_OP",
    ),
}


@pytest.mark.parametrize(
    "name", sorted(KINDS_OF_NODES.keys() - {"KERNEL", "MEMSET", "MEMCPY", "GRAPH"})
)
def test_a_graph_with_nodes_that_are_not_read_is_not_known(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such as a batch of copies, or a graph that the device steers: its counts would be too low in silence."""
    kinds = [KINDS_OF_NODES[one] for one in ("KERNEL", "MEMSET", name)]
    monkeypatch.setattr(cuda, "nodes", lambda graph: [(0, kind) for kind in kinds])
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    calls("cuGraphLaunch", 0xE1, 5)
    expected = (
        (1, 1, None)
        if name in NO_WORK
        else (0, 0, "a graph was launched whose nodes are not known")
    )
    assert (read(calls).kernels, read(calls).memsets, read(calls).not_counted) == expected


def test_the_copies_of_a_graph(calls: Callbacks, monkeypatch: pytest.MonkeyPatch) -> None:
    box = D.CUDA_MEMCPY3D()
    box.srcMemoryType, box.dstMemoryType, box.dstHost = (
        D.CUmemorytype.CU_MEMORYTYPE_DEVICE,
        D.CUmemorytype.CU_MEMORYTYPE_HOST,
        PINNED,
    )
    box.WidthInBytes, box.Height, box.Depth = 8, 2, 5
    monkeypatch.setattr(cuda, "nodes", lambda graph: [(0x61, KINDS_OF_NODES["MEMCPY"])])
    monkeypatch.setattr(D, "cuGraphMemcpyNodeGetParams", lambda node: (D.CUresult(0), box))
    executable = ctypes.c_uint64(0xE1)
    calls("cuGraphInstantiateWithFlags", ctypes.addressof(executable), 0x51, 0)
    calls("cuGraphLaunch", 0xE1, 5)
    assert [(one.kind, one.source, one.destination, one.nbytes) for one in read(calls).copies] == [
        ("D2H", "device", "pinned", 80)
    ]


@pytest.mark.parametrize(
    ("status", "captured", "kernels"),
    [
        (0, 0, 1),  # it runs: only other streams are captured
        (0, 1, 0),  # it waits for an event of a captured stream, and so is captured with it
        (906, 0, 0),  # the driver does not tell of this handle
    ],
)
def test_work_on_another_stream_is_captured_if_the_driver_says_so(
    calls: Callbacks, monkeypatch: pytest.MonkeyPatch, status: int, captured: int, kernels: int
) -> None:
    asked = list[int]()

    def capturing(stream: int) -> tuple[Any, int]:
        asked.append(stream)
        return D.CUresult(status), captured

    monkeypatch.setattr(D, "cuStreamIsCapturing", capturing)
    calls("cuStreamBeginCapture_v2", 5, 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 5)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 6)
    assert (read(calls).kernels, asked) == (kernels, [6])
    calls("cuStreamEndCapture", 5, 0)
    calls("cuLaunchKernel", 1, 0, 0, 0, 0, 6)
    assert (read(calls).kernels, asked) == (
        kernels + 1,
        [6],
    )  # the driver is asked only while something is captured


def test_only_the_threads_and_streams_of_a_capture_are_captured(calls: Callbacks) -> None:
    calls("cuStreamBeginCapture_v2", 5, 0)
    for stream in (5, 6):
        other = threading.Thread(target=calls, args=("cuLaunchKernel", 1, 0, 0, 0, 0, stream))
        other.start()
        other.join()
    assert read(calls).kernels == 1  # the one on another stream
    copying = threading.Thread(target=calls, args=("cuMemcpyDtoHAsync_v2", PAGEABLE, DEVICE, 8, 6))
    copying.start()
    copying.join()
    assert [(one.source, one.destination) for one in read(calls).copies] == [
        ("device", "unknown")
    ]  # the driver is asked nothing meanwhile


def test_memsets(calls: Callbacks) -> None:
    calls("cuMemsetD32_v2", PINNED, 0, 8)
    calls("cuMemsetD32_v2", DEVICE, 0, 8)
    assert read(calls).memsets == 2
    assert waits(calls) == [("cuMemsetD32", "memset", True)]


def test_the_parameters_of_rare_copies_and_memsets(calls: Callbacks) -> None:
    calls("cuMemcpyAtoA_v2", 0xA, 0, 0xB, 0, 64)
    calls("cuMemcpyPeerAsync", DEVICE, 1, DEVICE, 2, 32, 0x77)
    assert {(one.kind, one.source, one.nbytes) for one in read(calls).copies} == {
        ("A2A", "array", 64),
        ("P2P", "device", 32),
    }
    before = read(calls).default_stream
    calls(
        "cuMemsetD2D8Async", DEVICE, 8, 0, 8, 8, 0x77
    )  # the pitch and two sizes come before the stream
    assert (read(calls).memsets, read(calls).default_stream) == (1, before)
    calls("cuMemsetD2D8Async", DEVICE, 8, 0, 8, 8, 0)
    assert read(calls).default_stream == before + 1


# Windows


def test_a_window_adds_up_times_and_bytes() -> None:
    log = CallLog()
    window = log.open()
    for nbytes in (8, 16):
        log.ran(
            Step(StepKind.COPY, "D2D", source="device", memory="device", nbytes=nbytes), count=3
        )
    for seconds in (0.5, 0.25):
        log.waited("cuCtxSynchronize", "device", seconds)
    found = window.read(Path("/"))
    assert [(one.count, one.nbytes) for one in found.copies] == [(6, 72)]
    assert [(one.count, one.seconds) for one in found.waiting] == [(2, 0.75)]


def test_windows_have_what_came_while_they_were_open() -> None:
    log = CallLog()
    log.ran(KERNEL)
    outer = log.open()
    log.ran(KERNEL)
    inner = log.open()
    log.waited("cuCtxSynchronize", "device", 0.5)
    inner.close()
    log.ran(KERNEL, count=2)
    assert outer.read(Path("/")).kernels == 3
    assert (inner.read(Path("/")).kernels, inner.read(Path("/")).waits) == (0, 1)


def test_calls_that_were_missed_concern_the_windows_that_were_open() -> None:
    log = CallLog()
    before = log.open()
    log.missed("a profiler had CUPTI")
    after = log.open()
    log.ran(KERNEL)
    assert before.read(Path("/")).not_counted == "a profiler had CUPTI"
    assert (after.read(Path("/")).not_counted, after.read(Path("/")).kernels) == (None, 1)


class Source(PlainCalls):
    """Calls of a process, whose tool somebody else may have."""

    def __init__(self) -> None:
        super().__init__(lambda log: None)
        self.held: str | None = None

    def start(self) -> str | None:
        if self.held is not None:
            self.running = False
        return self.held or super().start()


def test_calls_are_counted_only_while_their_source_reports() -> None:
    """A limit on calls would hold of a window that nothing is reported to."""
    source = Source()
    footprints = SourceFootprints(None, (), lambda: None, source)
    footprints.start(driver=False, calls=True)
    assert isinstance(footprints.counting(), CallWindow)
    source.held = "a profiler has it"
    assert footprints.counting() == "a profiler has it"
    source.held = None
    with footprints.paused():
        assert footprints.counting() == "calls are not counted while a launch is measured"
    assert isinstance(footprints.counting(), CallWindow)
    source.held = "a profiler has it"
    with footprints.paused():
        pass
    source.held = None
    assert isinstance(footprints.counting(), CallWindow)
    assert source.running
    footprints.start(driver=False)
    assert "--gpumem-existing=watch" in str(footprints.counting())


def test_a_block_that_stops_the_source_leaves_outer_windows_uncounted() -> None:
    source = Source()
    source.start()
    outer = source.log.open()
    with calls_counted(source) as read:
        source.log.ran(KERNEL)
        source.stop()
        assert (read().kernels, read().not_counted) == (1, None)
    assert source.running
    assert outer.read(Path("/")).not_counted is not None


def test_allowed_lines_and_strict_waits() -> None:
    log = CallLog()
    window = log.open()
    log.waited("cuMemAlloc", "allocation", 0.0, sure=False)
    log.waited("cuCtxSynchronize", "device", 0.0)
    root = Path(__file__).parent
    assert window.read(root).waits == 1
    assert window.read(root, strict=True).waits == 2
    assert window.read(root.parent, ("test_calls.py:*",), strict=True).waits == 0
    assert window.read(root, ("other.py:*",)).waits == 1


def test_a_thread_of_c_code_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = CallLog()
    window = log.open()
    callback = SimpleNamespace(
        f_code=SimpleNamespace(co_filename=f"{PACKAGE}/devices/cuda/cupti.py"), f_back=None
    )
    monkeypatch.setattr(sys, "_getframe", lambda depth: callback)
    log.waited("cuStreamSynchronize", "stream", 0.0)
    (wait,) = window.read(Path("/")).waiting
    assert wait.file == ""
    assert wait.place.startswith("line unknown (")


def test_native_frames_are_of_this_process() -> None:
    assert len(cuda.native_frames()) > 3
    assert {cuda._of_address(address) for address in cuda.native_frames()} == {0}


@pytest.mark.parametrize(
    ("file", "name", "creates", "pool"),
    [
        (b"libcublas.so.13", b"cublasCreate_v2", True, False),
        (b"libcufft.so.12", b"cufftMakePlanMany64", True, False),
        (b"libcudnn.so.9", b"cudnnCreate", True, False),
        (b"libcublas.so.13", b"cublasSgemm_v2", False, False),
        (b"libcusolver.so.12", b"cusolverDnSpotrf", False, False),
        (b"/x/torch/lib/libc10_cuda.so", b"", False, True),
        (b"/x/cupy/cuda/memory.cpython-311.so", b"", False, True),
        (b"/x/cupy_backends/cuda/api/runtime.cpython-311.so", b"", False, False),
    ],
)
def test_handles_and_pools_are_known_by_their_functions_and_files(
    file: bytes, name: bytes, creates: bool, pool: bool
) -> None:
    found = cuda.meaning(file, name)
    assert (bool(found & cuda._CREATING), bool(found & cuda._POOL)) == (creates, pool)
