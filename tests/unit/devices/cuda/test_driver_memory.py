"""The driver's calls as events, the handles of cuBLAS among them, and the Python stacks of the calls that made them."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import driver_memory
from pytest_gpumem.devices.cuda.cupti import ApiCall, Receive
from pytest_gpumem.devices.cuda.driver_memory import DriverMemory
from pytest_gpumem.devices.footprints import SourceFootprints
from pytest_gpumem.devices.memory_events import AllocationEvent, Figures, MemoryLog
from pytest_gpumem.devices.protocol import NotCounted

KEPT = (AllocationEvent(0.0, ("CUDA", "device"), "driver", 1, 100),)
NAMES = (
    *(
        "cuMemAlloc_v2",
        "cuMemAllocPitch_v2",
        "cuMemAllocManaged",
        "cuMemHostAlloc",
        "cuMemAllocHost_v2",
        "cuMemHostRegister_v2",
    ),
    *(
        "cuMemAllocAsync",
        "cuMemAllocFromPoolAsync_ptsz",
        "cuMemFree_v2",
        "cuMemFreeHost",
        "cuMemHostUnregister",
        "cuMemFreeAsync",
    ),
    *(
        "cuMemcpyHtoD_v2",
        "cuGraphLaunch",
        *driver_memory._VIRTUAL,
        *driver_memory._ARRAYS,
        *driver_memory._OWN_POOLS,
    ),
)
Number = IntEnum("Number", NAMES)  # type: ignore[misc]
CUPTI = SimpleNamespace(driver_api_trace_cbid=Number)
OTHERS = 0xB000
"""Device memory from here on is another GPU's."""
CAPTURED = 9
"""A stream that is captured."""


class Calls:
    """The callbacks of CUPTI."""

    def __init__(self) -> None:
        self.receivers: list[tuple[Any, Receive]] = []
        self.number = 0
        self.lost: Any = None
        self.serves = True

    def add(
        self,
        domain: str,
        names: Any,
        receive: Receive,
        lost: Callable[[str], None] | None = None,
        *,
        begins: bool,
    ) -> Callable[[], None]:
        assert domain == "DRIVER_API"
        assert not begins
        self.lost = lost
        self.receivers.append((names, receive))
        return lambda: self.receivers.remove((names, receive))

    def __call__(self, name: str, *parameters: int, result: int = 0, repeats: int = 1) -> None:
        """The end of a call as CUPTI shows it, with its parameters in memory. `repeats`: the call and those within it."""
        self.number += 1
        values, returned = (ctypes.c_uint64 * len(parameters))(*parameters), ctypes.c_int(result)
        data = ApiCall(
            1,
            parameters=ctypes.addressof(values),
            result=ctypes.addressof(returned),
            correlation=self.number,
        )
        for _ in range(repeats):
            for names, receive in self.receivers:
                if name in names:
                    receive(int(Number[name]), ctypes.addressof(data))

    def allocates(self, name: str, address: int, *others: int, **options: int) -> None:
        """A call that returns an address."""
        pointer = ctypes.c_uint64(address)
        self(name, ctypes.addressof(pointer), *others, **options)


class Runtime:
    """The counts of the driver's pool and of graphs. `living`: bytes of graphs that exist."""

    cudaMemPoolAttr = SimpleNamespace(
        cudaMemPoolAttrUsedMemCurrent=1,
        cudaMemPoolAttrReservedMemCurrent=2,
        cudaMemPoolAttrUsedMemHigh=3,
    )
    cudaGraphMemAttributeType = SimpleNamespace(
        cudaGraphMemAttrUsedMemCurrent=4, cudaGraphMemAttrReservedMemCurrent=5
    )

    def __init__(self) -> None:
        self.asked = self.pool = self.graphs = self.living = 0

    def cudaDeviceGetDefaultMemPool(self, index: int) -> tuple[int, int]:  # noqa: N802
        return 0, 1

    cudaDeviceGetMemPool = cudaDeviceGetDefaultMemPool  # noqa: N815

    def cudaMemPoolGetAttribute(self, pool: int, attribute: int) -> tuple[int, int]:  # noqa: N802
        self.asked += 1
        return 0, {1: self.pool, 0xF0: 700}.get(int(pool), 0) if attribute == 2 else 0

    def cudaDeviceGetGraphMemAttribute(self, index: int, attribute: int) -> tuple[int, int]:  # noqa: N802
        return 0, self.graphs

    def cudaDeviceGraphMemTrim(self, index: int) -> None:  # noqa: N802
        self.graphs = self.living


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(driver_memory, "R", made)
    return made


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls()
    monkeypatch.setattr(driver_memory, "CALLBACKS", made)
    monkeypatch.setitem(sys.modules, "cupti", SimpleNamespace(cupti=CUPTI))
    driver = SimpleNamespace(
        cuPointerGetAttribute=lambda _attribute, address: (0, int(address >= OTHERS)),
        cuCtxGetDevice=lambda: (0, 0),
    )
    monkeypatch.setattr(driver_memory, "D", driver)
    monkeypatch.setattr(driver_memory, "is_captured", lambda stream: stream == CAPTURED)
    return made


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_memory, "has_pools", lambda index: True)


@pytest.fixture
def source() -> DriverMemory:
    return DriverMemory(0)


def test_a_device_without_pools_has_nothing_in_them(
    source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_memory, "has_pools", lambda index: False)
    monkeypatch.setattr(
        driver_memory.R,
        "cudaDeviceGetDefaultMemPool",
        lambda index: (SimpleNamespace(name="cudaErrorNotSupported"), None),
    )
    assert set(source.figures().values()) == {Figures(0, 0)}
    assert not source.settle(KEPT)


def test_calls_become_events_by_kind(calls: Calls, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None
    pitch = ctypes.c_uint64(512)
    calls.allocates("cuMemAlloc_v2", 0xA000, 100)
    calls.allocates("cuMemAllocPitch_v2", 0xA100, ctypes.addressof(pitch), 500, 4, 16)
    calls.allocates("cuMemAllocManaged", 0xB100, 300, 1)
    calls.allocates("cuMemHostAlloc", 0xB200, 64, 0)
    calls.allocates("cuMemAllocHost_v2", 0xB300, 32, repeats=2)
    calls("cuMemHostRegister_v2", 0xB400, 16, 0)
    calls.allocates("cuMemAllocAsync", 0xA200, 40, 5)
    calls.allocates("cuMemAllocFromPoolAsync_ptsz", 0xA300, 50, 77, 5)
    calls.allocates("cuMemAlloc_v2", OTHERS, 500)  # another GPU's
    calls.allocates("cuMemAlloc_v2", 0xA400, 1 << 40, result=2)  # out of memory
    calls.allocates("cuMemAllocAsync", 0xA500, 60, CAPTURED)
    source.drain()
    log.settle()
    living = {(one.address, one.kind): one.nbytes for one in log.of_driver()}
    assert living == {
        (0xA000, "device"): 100,
        (0xA100, "device"): 512 * 4,
        (0xB100, "managed"): 300,
        (0xB200, "pinned"): 64,
        (0xB300, "pinned"): 32,
        (0xB400, "pinned"): 16,
        (0xA200, "device"): 40,
        (0xA300, "device"): 50,
    }
    assert len(log.since()[0]) == len(living)
    for name, address in (
        ("cuMemFree_v2", 0xA000),
        ("cuMemFree_v2", 0xA100),
        ("cuMemFree_v2", 0xB100),
        ("cuMemFreeHost", 0xB200),
    ):
        calls(name, address)
    for name, address in (("cuMemFreeHost", 0xB300), ("cuMemHostUnregister", 0xB400)):
        calls(name, address)
    calls("cuMemFreeAsync", 0xA200, 5)
    calls("cuMemFreeAsync", 0xA300, 5)
    calls("cuMemFree_v2", 0)
    calls("cuMemFree_v2", OTHERS)
    log.settle()
    assert log.of_driver() == []
    assert len(log.since()[0]) == 2 * len(living)


def creates(calls: Calls, handle: int, nbytes: int, device: int = 0, kind: int = 1) -> None:
    """Virtual memory of a device, or with the kinds from 2 on of the host."""
    where = ctypes.create_string_buffer(struct.pack("<IIii", 1, 0, kind, device))
    calls.allocates("cuMemCreate", handle, nbytes, ctypes.addressof(where))


def test_virtual_memory_lives_until_nothing_holds_it(calls: Calls, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None

    def living() -> dict[int, int]:
        log.settle()
        return {one.address: one.nbytes for one in log.of_driver()}

    creates(calls, 0xE0, 100)
    calls("cuMemMap", 0xA000, 100, 0, 0xE0)
    calls("cuMemRelease", 0xE0)
    assert living() == {0xE0: 100}  # by its mapping
    calls.allocates("cuMemRetainAllocationHandle", 0xE0, 0xA000)
    calls("cuMemUnmap", 0xA000, 100)
    assert living() == {0xE0: 100}  # by its second handle
    assert all(source.alive(one) for one in log.of_driver())
    calls("cuMemRelease", 0xE0)
    assert living() == {}
    creates(calls, 0xE0, 40)
    creates(calls, 0xE1, 60)
    calls("cuMemMap", 0xA000, 40, 0, 0xE0)
    calls("cuMemMap", 0xA028, 60, 0, 0xE1)
    for handle in (0xE0, 0xE1):
        calls("cuMemRelease", handle)
    calls("cuMemUnmap", 0xA000, 100)  # both mappings at once
    assert (living(), source.gaps) == ({}, ())
    creates(calls, 0xE3, 100, device=3, kind=3)  # of a NUMA node of the host
    log.settle()
    assert [(one.kind, one.nbytes) for one in log.of_driver()] == [("pinned", 100)]
    calls("cuMemRelease", 0xE3)
    assert living() == {}


def test_virtual_memory_of_others_counts_nothing(calls: Calls, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None
    creates(calls, 0xE0, 100, device=1)
    calls.allocates("cuMemImportFromShareableHandle", 0xE1, 5, 1)  # another process's
    calls.allocates("cuMulticastCreate", 0xE3)
    for handle in (0xE0, 0xE1, 0xE3):
        calls("cuMemMap", 0xA000, 100, 0, handle)
        calls("cuMemRelease", handle)
        calls("cuMemUnmap", 0xA000, 100)
    log.settle()
    assert (log.since()[0], source.gaps) == ([], ())
    creates(calls, 0xE2, 100)
    calls.allocates(
        "cuMemImportFromShareableHandle", 0xE2, 6, 1
    )  # what the process exported itself
    calls("cuMemRelease", 0xE2)
    log.settle()
    assert [one.nbytes for one in log.of_driver()] == [100]


def test_virtual_memory_from_before_the_watch_is_not_watched(
    calls: Calls, source: DriverMemory
) -> None:
    assert source.start(MemoryLog(), stacks=False) is None
    calls("cuMemRelease", 0xE0)  # to free it takes nothing
    assert not source.gaps
    calls("cuMemMap", 0xA000, 100, 0, 0xE0)
    assert source.gaps == ("virtual memory was mapped that was created before the watch",)


@pytest.mark.parametrize("paused", [False, True])
def test_a_number_of_a_handle_that_is_given_out_again_is_another_handle(
    calls: Calls, source: DriverMemory, paused: bool
) -> None:
    """Of another process at first, then of this one, which created it unseen."""
    source.start(MemoryLog(), stacks=False)
    calls.allocates("cuMemImportFromShareableHandle", 0xE1, 5, 1)
    if not paused:
        calls("cuMemRelease", 0xE1)
    source.stop()
    source.start(MemoryLog(), stacks=False)
    calls("cuMemMap", 0xA000, 100, 0, 0xE1)
    assert source.gaps == ("virtual memory was mapped that was created before the watch",)


def test_virtual_memory_in_a_sparse_array_is_not_watched(
    calls: Calls, source: DriverMemory
) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None
    described = ctypes.create_string_buffer(struct.pack("<QQQIII", 64, 64, 0, 0x20, 1, 0x40))
    calls.allocates("cuArray3DCreate_v2", 0xC0, ctypes.addressof(described))
    calls("cuArrayDestroy", 0xC0)
    log.settle()
    assert (log.since()[0], source.gaps) == ([], ())
    calls("cuMemMapArrayAsync", 1, 1, 0)
    assert source.gaps == ("virtual memory was mapped into a CUDA array",)


def test_arrays_count_by_their_elements(calls: Calls, source: DriverMemory) -> None:
    log = MemoryLog()
    assert source.start(log, stacks=False) is None
    kept = []

    def described(layout: str, *values: int) -> int:
        kept.append(ctypes.create_string_buffer(struct.pack(layout, *values)))
        return ctypes.addressof(kept[-1])

    calls.allocates(
        "cuArrayCreate_v2", 0xC0, described("<QQII", 64, 0, 0x20, 4)
    )  # one-dimensional, float4
    calls.allocates("cuArray3DCreate_v2", 0xC1, described("<QQQIII", 8, 8, 8, 0x10, 1, 0))  # half
    calls.allocates(
        "cuMipmappedArrayCreate", 0xC2, described("<QQQIII", 8, 8, 3, 0x08, 2, 0x01), 4
    )  # three layers of char2
    log.settle()
    living = {one.address: one.nbytes for one in log.of_driver()}
    assert living == {0xC0: 64 * 16, 0xC1: 512 * 2, 0xC2: (64 + 16 + 4 + 1) * 3 * 2}
    assert all(source.alive(one) for one in log.of_driver())
    calls("cuArrayDestroy", 0xC0)
    calls("cuArrayDestroy", 0xC1)
    calls("cuMipmappedArrayDestroy", 0xC2)
    log.settle()
    assert log.of_driver() == []
    calls.allocates("cuArrayCreate_v2", 0xC0, described("<QQII", 64, 64, 0x91, 1))
    source.drain()
    assert source.gaps == (
        "a call of the driver could not be read: a CUDA array of the format 0x91, whose bytes are not known",
    )


def test_what_own_pools_keep_is_reserved(calls: Calls, source: DriverMemory) -> None:
    assert source.start(MemoryLog(), stacks=False) is None
    here, elsewhere = (
        ctypes.create_string_buffer(struct.pack("<IIii", 1, 0, 1, device)) for device in (0, 1)
    )
    calls.allocates("cuMemPoolCreate", 0xF0, ctypes.addressof(here))
    calls.allocates("cuMemPoolCreate", 0xF1, ctypes.addressof(elsewhere))
    assert source.figures()["CUDA", "device"].unused == 700
    calls("cuMemPoolDestroy", 0xF0)
    assert source.figures()["CUDA", "device"].unused == 0
    assert not source.gaps
    calls.allocates("cuMemPoolCreate", 0xF0, ctypes.addressof(here))
    source.stop()  # it may be destroyed before the watch goes on
    assert source.figures()["CUDA", "device"].unused == 0
    assert "a stream-ordered pool of the test's own" in " ".join(source.gaps)


def test_memory_that_is_allocated_again_at_once_counts_again(
    calls: Calls, source: DriverMemory
) -> None:
    log = MemoryLog()
    source.start(log, stacks=False)
    for _ in range(2):
        calls.allocates("cuMemAlloc_v2", 0xA000, 100)
        calls("cuMemFree_v2", 0xA000)
    log.settle()
    assert [change for _, change, _ in log.since()[0]] == [100, -100, 100, -100]


def test_a_handle_of_cublas_is_looked_at_once_and_counts_for_nothing(
    calls: Calls, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def create() -> int:
        made.append("handle")
        calls.allocates("cuMemAlloc_v2", 0xA010, 1024)
        calls.allocates("cuMemAlloc_v2", 0xA011, 4096)
        return 5

    def destroy(handle: int) -> None:
        calls("cuMemFree_v2", 0xA010)
        calls("cuMemFree_v2", 0xA011)

    libraries = SimpleNamespace(cublas=SimpleNamespace(create=create, destroy=destroy))
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", libraries)
    log = MemoryLog()
    source.start(log, stacks=False)
    monkeypatch.setattr(driver_memory, "is_loaded", lambda library: False)
    source.settle(KEPT)
    assert (made, source.handles()) == ([], {})
    monkeypatch.setattr(driver_memory, "is_loaded", lambda library: True)
    calls.allocates("cuMemAlloc_v2", 1, 100)
    source.settle(())  # nothing that could be a handle's
    assert made == []
    source.settle(KEPT)
    source.settle(KEPT)
    log.settle()
    assert (made, source.handles()) == (["handle"], {"cuBLAS": (1024, 4096)})
    assert [change for _, change, _ in log.since()[0]] == [100]


def test_without_callbacks_the_reason_is_given(
    calls: Calls, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise NotCounted("another tool holds CUPTI")

    monkeypatch.setattr(calls, "add", refuses)
    assert source.start(MemoryLog(), stacks=False) == "another tool holds CUPTI"
    source.drain()
    source.settle(KEPT)
    source.stop()
    monkeypatch.setitem(sys.modules, "cupti", None)
    assert "cupti-python cannot be imported" in (
        DriverMemory(0).start(MemoryLog(), stacks=False) or ""
    )


def test_a_call_that_cannot_be_read_is_told_to_every_watch(
    calls: Calls, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to that of the test, where a part of it is read first."""
    monkeypatch.setattr(DriverMemory, "figures", lambda _: {})
    footprints = SourceFootprints(source, [], lambda: None)
    footprints.start(driver=True)
    test, part = footprints.watch(), footprints.watch()
    monkeypatch.setattr(driver_memory.D, "cuPointerGetAttribute", lambda *_: 1 / 0)
    calls.allocates("cuMemAlloc_v2", 0xA000, 100)
    for watch in (part, test):
        with pytest.raises(
            NotCounted, match="a call of the driver could not be read: division by zero"
        ):
            watch.read()
    footprints.watch().read()


def test_an_allocation_has_the_stack_of_its_call(calls: Calls, source: DriverMemory) -> None:
    log = MemoryLog()
    source.start(log, stacks=True)

    def takes_memory() -> None:
        calls.allocates("cuMemAlloc_v2", 0xA000, 100)

    takes_memory()
    log.settle()
    assert [name for _, _, name in log.of_driver()[-1].stack if name == "takes_memory"] == [
        "takes_memory"
    ]
    source.stop()
    assert not calls.receivers


def test_pools_and_graphs_are_asked_only_while_they_may_hold_something(
    calls: Calls, source: DriverMemory, runtime: Runtime
) -> None:
    def is_asked() -> bool:
        runtime.asked = 0
        source.figures()
        return runtime.asked > 0

    source.start(MemoryLog(), stacks=False)
    assert [is_asked(), is_asked()] == [True, False]
    calls.allocates("cuMemAlloc_v2", 0xA000, 100)
    assert not is_asked()
    calls("cuGraphLaunch", 1, 2)
    runtime.pool = 7
    assert [is_asked(), is_asked()] == [True, True]
    runtime.pool = 0
    assert [is_asked(), is_asked()] == [True, False]
    source.stop()
    assert [is_asked(), is_asked()] == [True, True]


def test_memory_that_no_graph_uses_any_more_is_not_kept(
    calls: Calls, source: DriverMemory, runtime: Runtime
) -> None:
    source.start(MemoryLog(), stacks=False)
    assert not source.settle(())
    calls("cuGraphLaunch", 1, 2)
    runtime.graphs, runtime.living = 96, 32
    assert source.figures()["CUDA graphs", "device"] == Figures(96, 0)
    assert [source.settle(()), source.settle(())] == [True, False]
    assert source.figures()["CUDA graphs", "device"] == Figures(32, 0)


def test_calls_that_a_profiler_has_kept_from_it_are_a_gap(
    calls: Calls, source: DriverMemory
) -> None:
    source.start(MemoryLog(), stacks=False)
    calls.lost("the profiler of PyTorch had CUPTI")
    assert source.gaps == ("the profiler of PyTorch had CUPTI",)


def test_each_look_while_another_tool_has_cupti_is_a_gap(
    calls: Calls, source: DriverMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.drain()
    source.start(MemoryLog(), stacks=False)
    source.drain()
    assert not source.gaps
    monkeypatch.setattr(calls, "serves", False)
    source.drain()
    assert len(source.gaps) == 1
    source.stop()
    source.drain()
    assert len(source.gaps) == 1
