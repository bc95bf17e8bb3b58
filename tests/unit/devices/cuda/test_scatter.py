"""Blocks at random places of one region: where they lie, and who frees the region."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

pytest.importorskip("cupy")
pytest.importorskip("cuda.bindings.runtime")

from pytest_gpumem.devices.cuda import allocations
from pytest_gpumem.devices.cuda.allocations import CudaMemory, needed_bytes, scattered
from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import PLENTY, OutOfMemory
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.units import GiB, MiB

PAGE = 2 * MiB


@given(
    sizes=st.lists(st.integers(1, 300 * MiB), min_size=1, max_size=60),
    spare=st.integers(0, 10 * GiB),
    seed=st.integers(0, 2**32 - 1),
)
def test_blocks_are_aligned_and_apart_and_inside_the_region(
    sizes: list[int], spare: int, seed: int
) -> None:
    region = needed_bytes(sizes) + spare
    offsets = scattered(sizes, region, seed)
    assert len(offsets) == len(sizes)
    # As allocations of their own would be: on a page where one of them is large.
    alignment = PAGE if max(sizes) >= MiB else 512
    assert all(offset % alignment == 0 for offset in offsets)
    blocks = sorted(zip(offsets, sizes, strict=True))
    assert blocks[0][0] >= 0
    assert all(first + size <= second for (first, size), (second, _) in pairwise(blocks))
    assert blocks[-1][0] + blocks[-1][1] <= region
    assert offsets == scattered(sizes, region, seed)


def test_order_and_places_are_random() -> None:
    sizes = [32 * MiB] * 6
    region = needed_bytes(sizes)
    drawn = [scattered(sizes, region, seed) for seed in range(500)]
    orders = {tuple(np.argsort(offsets)) for offsets in drawn}
    assert len(orders) > 300  # of 720
    # Not the order alone: the distance between neighbours varies, and any block lies anywhere.
    gaps = {b - a - 32 * MiB for offsets in drawn for a, b in pairwise(sorted(offsets))}
    assert min(gaps) == 0
    assert len(gaps) > 10
    first = [offsets[0] for offsets in drawn]
    assert min(first) < 0.1 * region
    assert max(first) + 32 * MiB > 0.9 * region


def test_there_is_room_for_chance() -> None:
    """A quarter of the blocks, and 64 MiB at least."""
    assert needed_bytes([MiB * 512] * 4) == 2560 * MiB
    assert needed_bytes([PAGE]) == PAGE + 64 * MiB
    assert needed_bytes([PAGE + 1]) == 2 * PAGE + 64 * MiB
    assert needed_bytes([1000]) == 1024 + 64 * MiB


# Who frees the region, on a driver made of a dictionary


class Driver:
    """`cudaMalloc` and `cudaFree`."""

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.held: dict[int, int] = {}
        self._next = 0x7F00_0000_0000

    def malloc(self, nbytes: int) -> int:
        assert nbytes <= self.memory - sum(self.held.values()), "the driver refuses"
        self.held[self._next] = nbytes
        self._next += -(-nbytes // PAGE) * PAGE
        return self._next - -(-nbytes // PAGE) * PAGE

    def free(self, address: int) -> None:
        del self.held[address]

    def memGetInfo(self) -> tuple[int, int]:  # noqa: N802
        return self.memory - sum(self.held.values()), self.memory


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver(64 * GiB)
    monkeypatch.setattr(allocations, "runtime", made)
    pool = SimpleNamespace(free_all_blocks=lambda: None)
    monkeypatch.setattr(allocations.cupy, "get_default_memory_pool", lambda: pool)
    return made


@pytest.fixture
def memory(driver: Driver, h100: Any) -> CudaMemory:
    return CudaMemory(0, h100)


def test_a_region_is_one_allocation_that_each_part_leaves_by_itself(
    memory: CudaMemory, driver: Driver
) -> None:
    parts = memory.scatter([32 * MiB, 1000, 2 * MiB], seed=1)
    assert len(driver.held) == 1
    ((address, nbytes),) = driver.held.items()
    assert [p.nbytes for p in parts] == [32 * MiB, 1000, 2 * MiB]
    assert all(address <= p.address and p.address + p.nbytes <= address + nbytes for p in parts)
    for part in parts:
        memory.free(part)
        memory.free(part)  # a second time does nothing
        assert part.freed
    memory.make_room()
    assert driver.held == {}


def test_a_freed_region_stays_while_memory_is_free(memory: CudaMemory, driver: Driver) -> None:
    for part in memory.scatter([32 * MiB], seed=1):
        memory.free(part)
    held = dict(driver.held)
    assert not memory.make_room(unless_free=0.5)
    assert driver.held == held
    assert memory.make_room(unless_free=0.99)
    assert driver.held == {}
    assert not memory.make_room()


@pytest.mark.parametrize("gib", [24, 40, 79, 140])
def test_a_freed_region_of_small_buffers_stays_beside_code_of_other_libraries(
    gib: int, driver: Driver, h100: DeviceFacts
) -> None:
    driver.memory = gib * GiB
    memory = CudaMemory(0, replace(h100, memory_bytes=driver.memory))
    driver.malloc(GiB)  # the context, and buffers of the test
    for part in memory.scatter([32 * MiB] * 3, seed=1):
        memory.free(part)
    assert not memory.make_room(unless_free=PLENTY)


def test_memory_of_its_own_counts_as_free(memory: CudaMemory, driver: Driver) -> None:
    other = driver.malloc(GiB)
    parts = memory.scatter([32 * MiB] * 3, seed=1)
    single = memory.allocate(MiB, MemoryKind.DEVICE)
    assert memory.free_without_ours() == 63 * GiB
    for one in (*parts, single):
        memory.free(one)
    assert memory.free_without_ours() == 63 * GiB  # the region is kept
    memory.make_room()
    driver.free(other)
    assert memory.free_without_ours() == 64 * GiB


def test_a_freed_region_is_used_again(memory: CudaMemory, driver: Driver) -> None:
    first = memory.scatter([32 * MiB] * 3, seed=1)
    held = dict(driver.held)
    for part in first:
        memory.free(part)
    second = memory.scatter([64 * MiB] * 3, seed=2)
    assert driver.held == held
    assert {p.address for p in first} != {p.address for p in second}


def test_two_sets_at_once_lie_in_two_regions(memory: CudaMemory, driver: Driver) -> None:
    first, second = memory.scatter([32 * MiB] * 3, seed=1), memory.scatter([32 * MiB] * 3, seed=1)
    assert len(driver.held) == 2
    assert {p.address for p in first}.isdisjoint(p.address for p in second)


def test_less_memory_than_needed_is_said_before_the_driver_is_asked(
    memory: CudaMemory, driver: Driver
) -> None:
    with pytest.raises(OutOfMemory, match="GiB are free"):
        memory.scatter([GiB] * 64, seed=1)
    assert driver.held == {}


def test_a_region_that_is_kept_gives_way_to_whoever_needs_its_memory(
    memory: CudaMemory, driver: Driver
) -> None:
    for part in memory.scatter([32 * MiB] * 3, seed=1):
        memory.free(part)
    assert len(driver.held) == 1
    free = memory.free_bytes(MemoryKind.DEVICE)
    all_of_it = memory.allocate(free, MemoryKind.DEVICE, mapped=True, write_combined=False)
    assert all_of_it.nbytes == free
    assert list(driver.held.values()) == [free]


def test_a_region_that_is_kept_stays_where_there_is_other_memory(
    memory: CudaMemory, driver: Driver
) -> None:
    for part in memory.scatter([32 * MiB] * 3, seed=1):
        memory.free(part)
    (kept,) = driver.held
    memory.allocate(GiB, MemoryKind.DEVICE, mapped=True, write_combined=False)
    assert kept in driver.held
    assert len(driver.held) == 2


def test_what_pytorch_keeps_unused_gives_way_and_is_scrubbed(
    memory: CudaMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pool keeps memory for the stream that it was used on, and the stream of a test that has ended is nobody's."""
    slept = list[float]()
    monkeypatch.setattr(
        allocations, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    )
    cached = driver.malloc(60 * GiB)
    torch: Any = ModuleType("torch")
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: False,
        empty_cache=lambda: driver.free(cached),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(OutOfMemory):
        memory.allocate(10 * GiB, MemoryKind.DEVICE, mapped=True, write_combined=False)
    torch.cuda.is_initialized = lambda: True
    memory.allocate(10 * GiB, MemoryKind.DEVICE, mapped=True, write_combined=False)
    assert cached not in driver.held
    memory.settle()
    assert slept == [pytest.approx(60 * GiB / allocations.SCRUB_RATE)]


@pytest.mark.parametrize("times", [1 / 8, 100])
def test_memory_is_scrubbed_at_a_share_of_its_bandwidth_at_most(
    driver: Driver, h100: DeviceFacts, monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    slept = list[float]()
    monkeypatch.setattr(
        allocations, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=slept.append)
    )
    memory = CudaMemory(0, replace(h100, dram_peak=times * h100.dram_peak))
    memory.free(memory.allocate(GiB, MemoryKind.DEVICE))
    memory.settle()
    assert slept == [
        pytest.approx(
            GiB / min(allocations.SCRUB_RATE, allocations.SCRUB_SHARE * times * h100.dram_peak)
        )
    ]


@pytest.mark.parametrize("page", [4096, 65536])
def test_registered_memory_has_pages_of_its_own(
    memory: CudaMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    """Hosts differ in their pages, and two registrations must not share one."""
    monkeypatch.setattr(allocations, "_PAGE", page)
    registered: list[tuple[int, int]] = []
    monkeypatch.setattr(
        driver,
        "hostRegister",
        lambda at, nbytes, flags: registered.append((at % page, nbytes % page)),
        raising=False,
    )
    monkeypatch.setattr(
        driver, "pointerGetAttributes", lambda at: SimpleNamespace(devicePointer=at), raising=False
    )
    held = [memory.allocate(100, MemoryKind.REGISTERED) for _ in range(3)]
    assert registered == [(0, 0)] * len(held)


def test_a_large_region_is_given_back_at_once(memory: CudaMemory, driver: Driver) -> None:
    for part in memory.scatter([8 * GiB] * 4, seed=1):
        memory.free(part)
    assert driver.held == {}


def test_what_was_freed_is_waited_for(
    memory: CudaMemory, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, slept = [100.0], list[float]()
    monkeypatch.setattr(
        allocations, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=slept.append)
    )
    memory.settle()
    assert slept == []
    held = [
        memory.allocate(GiB, MemoryKind.DEVICE, mapped=True, write_combined=False) for _ in range(2)
    ]
    for allocation in held:
        memory.free(allocation)
    clock[0] += 0.001
    memory.settle()
    assert slept == [pytest.approx(2 * GiB / allocations.SCRUB_RATE - 0.001)]
    clock[0] += 1.0
    memory.settle()
    assert len(slept) == 1
