"""The simulated host link: two copy engines, streams that wait for each other, what lies where, allocators."""

from __future__ import annotations

import numpy as np
import pytest
from cases import naming
from workbench import OVERWRITE, Workbench

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import (
    ALLOCATORS,
    CannotCapture,
    HoldExpired,
    OutOfMemory,
    Unsupported,
)
from pytest_gpumem.units import MiB

SIZE = 64 * MiB
KINDS = tuple(kind for kind in MemoryKind if kind is not MemoryKind.PEER)


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
        device.graphs.capture(
            bench.stream, lambda: device.streams.join(device.streams.create(), bench.stream)
        )


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
    launch = bench.bind(OVERWRITE, x=bench.device.memory.part(whole, 1024, 1024))
    bench.run(launch)
    assert [
        bool(one) for one in bench.device.content.to_host(whole, "f4", 1024)[[255, 256, 511, 512]]
    ] == [False, True, True, False]


def test_a_part_beyond_what_is_backed_is_copied_in_time_alone(bench: Workbench) -> None:
    device = bench.device
    here, there = bench.memory(SIZE), bench.memory(SIZE, MemoryKind.PINNED)
    device.content.copy(
        device.memory.part(here, 32 * MiB, MiB),
        device.memory.part(there, 32 * MiB, MiB),
        MiB,
        bench.stream,
    )
    device.streams.synchronize(bench.stream)


def test_locked_bytes_are_counted_until_they_are_freed(bench: Workbench) -> None:
    device = bench.device
    pinned, registered = (
        bench.memory(MiB, MemoryKind.PINNED),
        device.memory.adopt(np.zeros(MiB, "u1"), register=True),
    )
    memory = device.memory.host()
    assert (memory.locked, memory.total - memory.available) == (2 * MiB, 2 * MiB)
    device.memory.free(pinned)
    device.memory.free(registered)
    assert device.memory.host().locked == 0


def test_there_is_one_numa_node(bench: Workbench) -> None:
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


def test_an_allocator_leaves_nothing_and_knows_its_limits() -> None:
    for name in ALLOCATORS:
        bench = Workbench()
        with naming(name):
            before = [
                bench.device.memory.free_bytes(kind)
                for kind in (MemoryKind.DEVICE, MemoryKind.PINNED)
            ]
            cycle(bench, name)
            assert [
                bench.device.memory.free_bytes(kind)
                for kind in (MemoryKind.DEVICE, MemoryKind.PINNED)
            ] == before
            with pytest.raises(OutOfMemory):
                cycle(bench, name, 2**50)
