"""A buffer that moves keeps its kind and content; who follows it is told; nothing breaks where memory is short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counted_device import CountedDevice, failing

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import DeviceError, OutOfMemory
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
    buffer.follow(lambda: followed.append(buffer.address))
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


def test_who_stops_following_is_not_told(arena: Arena) -> None:
    buffer = arena.buffer(4096)
    followed: list[str] = []
    stop = buffer.follow(lambda: followed.append("first"))
    buffer.follow(lambda: followed.append("second"))
    stop()
    stop()
    buffer.move()
    assert followed == ["second"]


def test_where_memory_is_short_all_stays_as_it_was() -> None:
    device = CountedDevice(memory_bytes=3 * GiB + DATASHEETS["h100"].context_bytes)
    arena = Arena(device, seed=0)
    buffer = arena.buffer(2 * GiB)
    content, address = buffer.read(), buffer.address
    followed: list[int] = []
    buffer.follow(lambda: followed.append(1))
    with pytest.raises(OutOfMemory):
        buffer.move()
    assert (buffer.address, followed, device.live) == (address, [], [buffer.allocation])
    np.testing.assert_array_equal(buffer.read(), content)


def test_a_move_that_fails_in_the_copy_gives_the_new_memory_back(
    device: CountedDevice, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = arena.buffer(4096)
    old = buffer.allocation
    with monkeypatch.context() as patch:
        patch.setattr(device.content, "copy", failing())
        with pytest.raises(DeviceError, match="made to fail"):
            buffer.move()
    assert buffer.allocation is old
    assert device.live == [old]
    buffer.move()


def prefetches(device: CountedDevice) -> list[tuple[int, str]]:
    """Where pages are sent from now on: address and place."""
    sent: list[tuple[int, str]] = []
    device.before(
        "managed.prefetch",
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


def test_device_memory_has_no_pages_to_put_home(device: CountedDevice, memory: Memory) -> None:
    sent = prefetches(device)
    buffer = memory.device(4096)
    buffer.put_home(memory.arena.stream)
    buffer.move()
    assert sent == []


def test_pages_are_where_they_were_asked_to_be() -> None:
    for home in ["host", "device", "prefetched"]:
        device = CountedDevice()
        memory = Memory(Arena(device, seed=7))
        buffer = managed(memory, home)
        pages = device.roofline.pages[id(buffer.allocation)]
        assert pages.place == ("host" if home == "host" else "device"), home


def test_no_page_exists_before_its_first_touch(device: CountedDevice, memory: Memory) -> None:
    pages = device.roofline.pages[id(memory.managed(4 * MiB, first_touch="none").allocation)]
    assert pages.place is None
