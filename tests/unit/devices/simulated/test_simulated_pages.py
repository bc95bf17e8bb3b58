"""Managed pages on the simulated device: where they are, what advice does, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from workbench import OVERWRITE, Workbench

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, DeviceError, OutOfMemory, Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.devices.simulated.pages import PAGE_BYTES, SHARED_FAULTS, Pages, Touched
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.records.migrations import SHOWN_GROUPS, PageCounts
from pytest_gpumem.units import GiB, MiB

N = 64 * MiB


def on_host(**advice: Any) -> Pages:
    return Pages(place="host", **advice)


def test_untouched_pages_come_into_being_where_they_are_touched() -> None:
    pages = Pages()
    assert pages.touched_by_device(N, writes=True) == Touched(fresh=N)
    assert pages.place == "device"
    pages = Pages()
    assert pages.to_host(N, writes=True) == 0
    assert pages.place == "host"


def test_pages_fault_and_migrate_once() -> None:
    pages = on_host()
    assert pages.touched_by_device(N, writes=False) == Touched(moved=N, faulted=N)
    assert pages.touched_by_device(N, writes=True) == Touched()
    assert pages.to_host(N) == N


def test_a_prefetch_moves_pages_without_a_fault() -> None:
    pages = on_host()
    assert pages.to_device(N) == Touched(moved=N)
    assert pages.to_device(N) == pages.touched_by_device(N, writes=True) == Touched()


def test_pages_that_are_mostly_read_have_two_copies_until_they_are_written() -> None:
    pages = on_host(read_mostly=True)
    assert pages.touched_by_device(N, writes=False) == Touched(moved=N, faulted=N)
    assert pages.place == "both"
    assert pages.to_host(N) == 0
    assert pages.touched_by_device(N, writes=False) == Touched()
    assert pages.touched_by_device(N, writes=True) == Touched(faulted=N)
    assert pages.place == "device"


@pytest.mark.parametrize(
    ("advice", "faulted"),
    [({"preferred": "host"}, N), ({"accessed_by_device": True, "mapped": True}, 0)],
)
def test_pages_that_stay_on_the_host_are_mapped_and_read_across_the_link(
    advice: Any, faulted: int
) -> None:
    pages = on_host(**advice)
    assert pages.touched_by_device(N, writes=False) == Touched(
        mapped=faulted, faulted=faulted, remote=N
    )
    assert pages.touched_by_device(N, writes=False) == Touched(remote=N)


def test_discarded_pages_come_without_their_content() -> None:
    pages = on_host()
    pages.discard()
    assert pages.touched_by_device(N, writes=True) == Touched(faulted=N)
    pages.to_host(N)
    pages.discard()
    assert pages.to_device(N).moved == N  # a prefetch undoes it


def test_more_pages_than_there_is_room_for_are_evicted_at_every_touch() -> None:
    pages = on_host(room=N / 2)
    first = pages.touched_by_device(N, writes=False)
    assert (first.moved, first.evicted) == (N, N / 2)
    again = pages.touched_by_device(N, writes=False)
    assert (again.moved, again.evicted) == (N, N)


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(DATASHEETS["h100"])


def counted(device: SimulatedDevice) -> list[PageCounts]:
    """Counts of: a prefetch to the host; a fill by the device; a read by the host."""
    stream, memory = device.streams.create(), device.memory.allocate(16 * MiB, MemoryKind.MANAGED)
    device.content.poison(memory, stream)

    def prefetch() -> None:
        device.managed.prefetch(memory, True, stream)
        device.streams.synchronize()

    def fill() -> None:
        device.content.poison(memory, stream)
        device.streams.synchronize()

    return [
        device.counters.pages(work)
        for work in (prefetch, fill, lambda: device.content.to_host(memory, "u1", 1) and None)
    ]


def test_a_fault_a_page_is_counted_and_timed(device: SimulatedDevice) -> None:
    back, faulting, read = counted(device)
    pages = 16 * MiB // PAGE_BYTES
    assert (back.to_host, back.causes, back.gpu_faults, back.cpu_faults) == (
        16 * MiB,
        {"prefetch": 16 * MiB},
        0,
        0,
    )
    assert (faulting.gpu_pages, faulting.gpu_faults) == (pages, SHARED_FAULTS * pages)
    assert faulting.causes == {"fault": faulting.to_device} == {"fault": 16 * MiB}
    assert len(faulting.groups) == SHOWN_GROUPS < faulting.gpu_groups
    assert {group.access for group in faulting.groups} == {"write"}
    assert (read.cpu_faults, read.to_host, read.gpu_faults) == (49, 16 * MiB, 0)


def test_a_kernel_loses_the_time_of_its_faults_and_migrations(bench: Workbench) -> None:
    sheet, memory = DATASHEETS["h100"], bench.memory(16 * MiB, MemoryKind.MANAGED)
    launch = bench.bind(OVERWRITE, x=memory)
    bench.run(launch)
    resident = bench.time(launch)
    bench.device.managed.prefetch(memory, True, bench.stream)
    lost = 16 * MiB // PAGE_BYTES * sheet.fault + 16 * MiB / (
        sheet.migration_share * sheet.link_bandwidth
    )
    assert bench.time(launch) - resident == pytest.approx(lost, rel=0.1)


def test_what_happens_outside_is_not_counted(device: SimulatedDevice) -> None:
    counted(device)
    assert device.counters.pages(lambda: None) == PageCounts(mapped=0)


def test_managed_memory_beyond_the_device_needs_its_own_verb(device: SimulatedDevice) -> None:
    free = device.memory.free_bytes(MemoryKind.MANAGED)
    with pytest.raises(OutOfMemory):
        device.memory.allocate(free + GiB // 2, MemoryKind.MANAGED)
    with pytest.raises(OutOfMemory, match="evicted"):
        device.managed.oversubscribe(10 * free)
    device.memory.allocate(
        free - 16 * GiB, MemoryKind.DEVICE
    )  # the host holds 64 GiB of evicted pages
    arena = Arena(device, seed=1)
    memory = device.managed.oversubscribe(32 * GiB)
    assert device.memory.free_bytes(MemoryKind.DEVICE) == 0

    def touch() -> None:
        device.content.poison(memory, arena.stream)
        device.streams.synchronize()

    device.managed.prefetch(memory, True, arena.stream)
    device.streams.synchronize()
    counts = device.counters.pages(touch)
    assert (counts.to_device, counts.to_host) == (32 * GiB, 16 * GiB)
    assert counts.causes["eviction"] == 16 * GiB
    device.memory.free(memory)
    assert device.memory.free_bytes(MemoryKind.DEVICE) == 16 * GiB


@pytest.mark.parametrize(
    ("verb", "done"),
    [("advise", "advised about"), ("discard", "discarded"), ("prefetch", "prefetched")],
    ids=["advise", "discard", "prefetch"],
)
def test_pages_are_steered_of_managed_memory_on_devices_that_migrate_it(
    device: SimulatedDevice, verb: str, done: str
) -> None:
    plain, managed = (
        device.memory.allocate(1 * MiB, kind) for kind in (MemoryKind.DEVICE, MemoryKind.MANAGED)
    )

    def steer(memory: Allocation) -> None:
        if verb == "advise":
            device.managed.advise(memory, Advice.READ_MOSTLY, False, on=True)
        elif verb == "discard":
            device.managed.discard(memory, device.streams.create())
        else:
            device.managed.prefetch(memory, False, device.streams.create())

    steer(managed)
    with pytest.raises(DeviceError, match=f"only managed memory can be {done}, not device memory"):
        steer(plain)
    device.roofline.facts = replace(device.facts, concurrent_managed_access=False)
    with pytest.raises(
        Unsupported, match=f"no concurrentManagedAccess here: managed memory cannot be {done}"
    ):
        steer(managed)
