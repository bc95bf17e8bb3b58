"""A buffer that moves keeps its kind and content; who follows it is told; nothing breaks where memory is short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counted_device import CountedDevice

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import OutOfMemory
from pytest_gpumem.devices.simulated.datasheets import DATASHEETS
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import GiB, MiB


@pytest.mark.parametrize("kind", [MemoryKind.DEVICE, MemoryKind.MANAGED])
def test_a_move_keeps_everything_but_the_address(
    device: CountedDevice, arena: Arena, kind: MemoryKind
) -> None:
    buffer = arena.buffer((64, 1024), "f4", kind)
    content, address, old = buffer.read(), buffer.address, buffer.allocation
    followed: list[int] = []
    buffer.followers.append(lambda: followed.append(buffer.address))
    buffer.move()
    assert buffer.address != address
    assert followed == [buffer.address]
    assert (buffer.kind, buffer.shape, buffer.dtype_name, buffer.nbytes) == (
        kind,
        (64, 1024),
        "f4",
        4 * 64 * 1024,
    )
    np.testing.assert_array_equal(buffer.read(), content)
    assert old.freed
    assert device.live == [buffer.allocation]


def test_where_memory_is_short_all_stays_as_it_was() -> None:
    device = CountedDevice(memory_bytes=3 * GiB + DATASHEETS["h100"].context_bytes)
    arena = Arena(device, seed=0)
    buffer = arena.buffer(2 * GiB)
    content, address = buffer.read(), buffer.address
    followed: list[int] = []
    buffer.followers.append(lambda: followed.append(1))
    with pytest.raises(OutOfMemory):
        buffer.move()
    assert (buffer.address, followed, device.live) == (address, [], [buffer.allocation])
    np.testing.assert_array_equal(buffer.read(), content)


def prefetches(device: CountedDevice) -> list[tuple[int, str]]:
    """Where pages are sent from now on: address and place."""
    sent: list[tuple[int, str]] = []
    device.before(
        "content.prefetch",
        lambda pages, to_host, stream: sent.append(
            (pages.address, "host" if to_host else "device")
        ),
    )
    return sent


FIRST_TOUCH: dict[str, Any] = {"as left": "none", "host": "host", "device": "device"}


def managed(memory: Memory, home: str) -> Any:
    if home == "prefetched":
        return memory.prefetched(4 * MiB)
    return memory.managed(4 * MiB, first_touch=FIRST_TOUCH[home])


def test_pages_go_home_before_a_sample_and_after_a_move() -> None:
    for home, path in [
        ("host", ["host"]),
        ("device", ["device"]),
        ("prefetched", ["host", "device"]),
        ("as left", []),
    ]:
        device = CountedDevice()
        memory = Memory(Arena(device, seed=7))
        buffer = managed(memory, home)
        assert buffer.home == home, home
        sent = prefetches(device)
        buffer.put_home(memory.arena.stream)
        assert sent == [(buffer.address, place) for place in path], home
        sent.clear()
        buffer.move()
        assert sent == [(buffer.address, place) for place in path], home
