"""Managed pages on the simulated device: where they are, what advice does, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, DeviceError, OutOfMemory, Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.devices.simulated.pages import Pages
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.records.migrations import PageCounts
from pytest_gpumem.units import GiB, MiB

N = 64 * MiB


def on_host(**advice: Any) -> Pages:
    pages = Pages(N, **advice)
    pages.to_host()
    return pages


def test_untouched_pages_come_into_being_where_they_are_touched() -> None:
    touched = Pages(N).touched_by_device(1.0, writes=True)
    assert (touched.moved, touched.fresh) == (0, N)
    pages = Pages(N)
    assert pages.to_host(writes=True) == 0
    assert pages.on_host == N


def test_discarded_pages_come_without_their_content() -> None:
    pages = on_host()
    pages.discard()
    touched = pages.touched_by_device(1.0, writes=True)
    assert (touched.moved, touched.fresh, touched.dropped) == (0, 0, N)
    pages.to_host()
    pages.discard()
    assert pages.to_device().moved == N  # a prefetch undoes it


def test_more_pages_than_there_is_room_for_are_evicted_at_every_touch() -> None:
    pages = Pages(N, room=N / 2)
    pages.to_host()
    first = pages.touched_by_device(1.0, writes=False)
    assert (first.moved, first.evicted) == (N, N / 2)
    again = pages.touched_by_device(1.0, writes=False)
    assert (again.moved, again.evicted, pages.on_device) == (N, N, N / 2)


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


def test_a_profile_of_16_mib_is_what_a_gpu_showed(device: SimulatedDevice) -> None:
    back, faulting, read = counted(device)
    assert (back.to_host, back.causes, back.gpu_faults, back.cpu_faults) == (
        16 * MiB,
        {"prefetch": 16 * MiB},
        0,
        0,
    )
    assert 150 <= faulting.gpu_faults <= 165
    assert 26 <= faulting.gpu_groups <= 27
    assert faulting.to_device == 16 * MiB == sum(faulting.causes.values())
    assert set(faulting.causes) == {"fault", "speculation"}
    assert len(faulting.groups) == faulting.gpu_groups
    assert {group.access for group in faulting.groups} == {"write"}
    assert (read.cpu_faults, read.to_host, read.gpu_faults) == (48, 16 * MiB, 0)


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
    device.machine.facts = replace(device.facts, concurrent_managed_access=False)
    with pytest.raises(
        Unsupported, match=f"no concurrentManagedAccess here: managed memory cannot be {done}"
    ):
        steer(managed)
