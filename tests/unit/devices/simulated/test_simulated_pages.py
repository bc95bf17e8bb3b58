"""Managed pages on the simulated device: where they are, what advice does, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest
from workbench import OVERWRITE, Workbench

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.devices.simulated.device import SimulatedDevice
from pytest_gpumem.devices.simulated.roofline import PAGE_BYTES, SHARED_FAULTS
from pytest_gpumem.units import MiB

N = 16 * MiB
PAGES = N // PAGE_BYTES


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(DATASHEETS["h100"])


class Managed:
    """Managed memory, and the counts of what touches it."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.stream = device, device.streams.create()
        self.memory = device.memory.allocate(N, MemoryKind.MANAGED)

    def counted(self, work: Any) -> tuple[int, int, int, int]:
        """Faults of the GPU and of the host, and bytes that moved to each."""
        counts = self.device.counters.pages(work)
        return counts.gpu_faults, counts.cpu_faults, counts.to_device, counts.to_host

    def fill(self) -> None:
        self.device.content.poison(self.memory, self.stream)

    def read(self) -> None:
        self.device.content.to_host(self.memory, "u1", 1)

    def prefetch(self, *, to_host: bool = False) -> None:
        self.device.content.prefetch(self.memory, to_host, self.stream)

    def advise(self, advice: Advice, *, to_host: bool, on: bool = True) -> None:
        self.device.content.advise(self.memory, advice, to_host, on=on)


@pytest.fixture
def managed(device: SimulatedDevice) -> Managed:
    return Managed(device)


def test_pages_come_into_being_where_they_are_touched_first(managed: Managed) -> None:
    assert managed.counted(managed.fill) == (0, 0, 0, 0)
    assert managed.counted(managed.read) == (0, 49, 0, N)
    assert managed.counted(managed.read) == (0, 0, 0, 0)


def test_pages_on_the_host_fault_and_migrate_once(managed: Managed) -> None:
    managed.read()
    assert managed.counted(managed.fill) == (SHARED_FAULTS * PAGES, 0, N, 0)
    assert managed.counted(managed.fill) == (0, 0, 0, 0)


def test_a_prefetch_moves_pages_without_a_fault(managed: Managed) -> None:
    managed.read()
    assert managed.counted(managed.prefetch) == (0, 0, N, 0)
    assert managed.counted(managed.fill) == (0, 0, 0, 0)
    counts = managed.device.counters.pages(lambda: managed.prefetch(to_host=True))
    assert counts.causes == {"prefetch": counts.to_host} == {"prefetch": N}


def test_pages_that_stay_on_the_host_are_mapped(managed: Managed) -> None:
    for advice, to_host, faults in [
        (Advice.PREFERRED_LOCATION, True, SHARED_FAULTS * PAGES),
        (Advice.ACCESSED_BY, False, 0),
    ]:
        managed.read()
        managed.advise(advice, to_host=to_host)
        assert managed.counted(managed.fill) == (faults, 0, 0, 0), advice
        assert managed.counted(managed.fill) == (0, 0, 0, 0), advice
        managed.advise(advice, to_host=to_host, on=False)
        assert managed.counted(managed.fill) == (SHARED_FAULTS * PAGES, 0, N, 0), advice


def test_a_kernel_loses_the_time_of_its_faults_and_migrations(bench: Workbench) -> None:
    sheet, memory = DATASHEETS["h100"], bench.memory(N, MemoryKind.MANAGED)
    launch = bench.bind(OVERWRITE, x=memory)
    bench.run(launch)
    resident = bench.time(launch)
    bench.device.content.prefetch(memory, True, bench.stream)
    lost = PAGES * sheet.fault + N / (sheet.migration_share * sheet.link_bandwidth)
    assert bench.time(launch) - resident == pytest.approx(lost, rel=0.1)
