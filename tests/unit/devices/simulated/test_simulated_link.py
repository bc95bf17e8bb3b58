"""The simulated host link: two copy engines, streams that wait for each other, what lies where, allocators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from workbench import Workbench, overwrite

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import ALLOCATORS, CannotCapture, DeviceError, HoldExpired, OutOfMemory, Unsupported
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.units import MiB

SIZE = 64 * MiB
KINDS = tuple(kind for kind in MemoryKind if kind is not MemoryKind.PEER)


def both_ways(bench: Workbench, streams: int) -> float:
    """Seconds from the fork to the join of a copy each way, on one stream or two."""
    device = bench.device
    up = bench.memory(SIZE, MemoryKind.PINNED), bench.memory(SIZE)
    down = bench.memory(SIZE), bench.memory(SIZE, MemoryKind.PINNED)
    lanes = [device.streams.create() for _ in range(streams)]
    start, end = device.streams.event(), device.streams.event()
    device.streams.record(start, bench.stream)
    for lane in lanes:
        device.streams.join(lane, bench.stream)
    device.content.copy(up[1], up[0], SIZE, lanes[0])
    device.content.copy(down[1], down[0], SIZE, lanes[-1])
    for lane in lanes:
        device.streams.join(bench.stream, lane)
    device.streams.record(end, bench.stream)
    device.streams.synchronize(bench.stream)
    return device.streams.elapsed(start, end)


def test_one_copy_engine_serves_one_way_at_a_time() -> None:
    bench = Workbench(sheet=replace(DATASHEETS["h100"], async_engines=1))
    assert both_ways(bench, 2) == pytest.approx(both_ways(bench, 1), rel=0.03)


def test_a_hold_that_another_stream_waits_for_runs_out(bench: Workbench) -> None:
    device, other = bench.device, bench.device.streams.create()
    device.streams.hold(bench.stream, 0.01)
    device.streams.join(other, bench.stream)
    began = device.now()
    device.streams.synchronize(other)
    assert device.now() - began >= 0.01
    with pytest.raises(HoldExpired):
        device.streams.synchronize(bench.stream)


def test_one_stream_is_captured(bench: Workbench) -> None:
    device = bench.device
    with pytest.raises(CannotCapture, match="another stream"):
        device.graphs.capture(bench.stream, lambda: device.streams.join(device.streams.create(), bench.stream))


def test_parts_share_the_content_of_the_whole(bench: Workbench) -> None:
    device = bench.device
    whole = bench.memory(4096, MemoryKind.PINNED)
    device.content.from_host(whole, np.arange(1024, dtype="i4"))
    part = device.memory.part(whole, 1024, 2048)
    assert device.content.to_host(part, "i4", 512)[0] == 256
    device.content.from_host(part, np.full(512, -1, dtype="i4"))
    seen = device.content.to_host(whole, "i4", 1024)
    assert [seen[255], seen[256], seen[767], seen[768]] == [255, -1, -1, 768]
    assert (part.address, part.host_address) == (whole.address + 1024, whole.host_address + 1024)


def test_a_launch_works_on_a_part(bench: Workbench) -> None:
    whole = bench.memory(4096)
    launch = bench.bind(overwrite(), x=bench.device.memory.part(whole, 1024, 1024))
    bench.run(launch)
    assert [bool(one) for one in bench.device.content.to_host(whole, "f4", 1024)[[255, 256, 511, 512]]] == [False, True, True, False]


def test_a_part_beyond_what_is_backed_is_copied_in_time_alone(bench: Workbench) -> None:
    device = bench.device
    here, there = bench.memory(SIZE), bench.memory(SIZE, MemoryKind.PINNED)
    device.content.copy(device.memory.part(here, 32 * MiB, MiB), device.memory.part(there, 32 * MiB, MiB), MiB, bench.stream)
    device.streams.synchronize(bench.stream)


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_an_allocation_is_of_its_kind_and_the_next_is_not(bench: Workbench, kind: MemoryKind) -> None:
    device = bench.device
    made = bench.memory(1000, kind)
    for start in {made.address, made.host_address} - {0}:
        assert {device.memory.kind_at(start + at) for at in (0, 1, 500, 999)} == {kind}
        assert device.memory.kind_at(start + 1000) is None
    device.memory.free(made)
    assert device.memory.kind_at(made.address or made.host_address) is None


def test_registered_memory_has_another_address_on_the_device_and_pinned_memory_the_same(bench: Workbench) -> None:
    array = np.zeros(1000)
    assert bench.device.memory.kind_at(array.ctypes.data) is MemoryKind.PAGEABLE
    registered = bench.device.memory.adopt(array, register=True)
    assert registered.address not in (0, registered.host_address)
    assert {bench.device.memory.kind_at(a) for a in (registered.address, array.ctypes.data)} == {MemoryKind.REGISTERED}
    bench.device.memory.free(registered)
    assert bench.device.memory.kind_at(array.ctypes.data) is MemoryKind.PAGEABLE
    pinned = bench.memory(4096, MemoryKind.PINNED)
    assert pinned.address == pinned.host_address


def test_locked_bytes_are_counted_until_they_are_freed(bench: Workbench) -> None:
    device = bench.device
    pinned, registered = bench.memory(MiB, MemoryKind.PINNED), device.memory.adopt(np.zeros(MiB, "u1"), register=True)
    memory = device.memory.host()
    assert (memory.locked, memory.total - memory.available) == (2 * MiB, 2 * MiB)
    device.memory.free(pinned)
    device.memory.free(registered)
    assert device.memory.host().locked == 0


def test_there_is_one_gpu_and_one_numa_node(bench: Workbench) -> None:
    with pytest.raises(Unsupported, match="one GPU is simulated"):
        bench.device.memory.allocate(MiB, MemoryKind.PEER)
    with pytest.raises(Unsupported, match="one GPU is simulated"):
        bench.device.peer_access(True)
    with bench.device.memory.near_host(None) as node:
        assert node == 0
    with pytest.raises(Unsupported, match="numa=1"), bench.device.memory.near_host(1):
        pass


def cycle(bench: Workbench, name: str, nbytes: int = SIZE) -> float:
    """Seconds of one allocation, after a first one and a synchronisation."""
    allocator = bench.device.memory.allocator(name)
    try:
        allocator.cycle(nbytes, bench.stream)
        bench.device.streams.synchronize()
        began = bench.device.now()
        allocator.cycle(nbytes, bench.stream)
        return bench.device.now() - began
    finally:
        allocator.close()


def test_pools_that_keep_are_cheap_and_locking_is_dear(bench: Workbench) -> None:
    took = {name: cycle(bench, name) for name in ALLOCATORS}
    assert took["CuPy pool"] < took["cudaMallocAsync, kept"] < took["cudaMalloc"] / 10
    assert took["cudaMallocAsync"] > 10 * took["cudaMallocAsync, kept"]
    assert took["cudaHostAlloc"] > 10 * took["cudaMalloc"]
    assert took["cudaHostRegister"] > 10 * took["cudaMalloc"]


@pytest.mark.parametrize("name", ALLOCATORS)
def test_an_allocator_leaves_nothing_and_knows_its_limits(bench: Workbench, name: str) -> None:
    before = [bench.device.memory.free_bytes(kind) for kind in (MemoryKind.DEVICE, MemoryKind.PINNED)]
    cycle(bench, name)
    assert [bench.device.memory.free_bytes(kind) for kind in (MemoryKind.DEVICE, MemoryKind.PINNED)] == before
    with pytest.raises(OutOfMemory):
        cycle(bench, name, 2**50)


def test_an_allocator_that_nobody_knows(bench: Workbench) -> None:
    with pytest.raises(DeviceError, match="no allocator 'malloc'; there are: cudaMalloc, "):
        bench.device.memory.allocator("malloc")
