"""Managed buffers: advice, pages put home, moves, discards, and where there can be none."""

from __future__ import annotations

from typing import Any

import pytest
from cases import naming
from counted_device import CountedDevice
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Advice, Allocation, OutOfMemory
from pytest_gpumem.devices.simulated.roofline import Pages
from pytest_gpumem.memory.buffers import Arena, BadBuffer
from pytest_gpumem.memory.managed import ManagedBuffer, no_migration, notes
from pytest_gpumem.memory.spaces import Memory
from pytest_gpumem.units import GiB, MiB

N = 16 * MiB


class Advising(CountedDevice):
    """Keeps the calls that advise pages."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

        def advised(_: Allocation, advice: Advice, to_host: bool, *, on: bool) -> None:
            self.calls.append(
                f"{'set' if on else 'unset'} {advice.value} {'host' if to_host else 'device'}"
            )

        self.before("content.advise", advised)

    def pages(self, buffer: ManagedBuffer) -> Pages:
        self.streams.synchronize()
        return self.roofline.pages[id(buffer.allocation)]


@pytest.fixture
def device() -> Advising:
    return Advising()


@pytest.fixture
def memory(device: Advising) -> Memory:
    return Memory(Arena(device, seed=3))


def test_nothing_is_advised_unasked(device: Advising, memory: Memory) -> None:
    memory.managed(N)
    assert device.calls == []


def test_every_advice_holds_from_the_start_and_can_be_taken_back(
    device: Advising, memory: Memory
) -> None:
    buffer = memory.managed(
        N, read_mostly=True, preferred_location="host", accessed_by=("device", "host")
    )
    sets = [call for call in device.calls if call.startswith("set")]
    assert sorted(sets) == [
        "set accessed_by device",
        "set accessed_by host",
        "set preferred_location host",
        "set read_mostly device",
    ]
    device.calls.clear()
    buffer.advise(read_mostly=False, preferred_location=None, accessed_by=None)
    assert sorted(device.calls) == [
        "unset accessed_by device",
        "unset accessed_by host",
        "unset preferred_location host",
        "unset read_mostly device",
    ]
    device.calls.clear()
    buffer.advise(read_mostly=False)
    assert device.calls == []


def test_pages_move_and_content_goes_when_the_user_says_and_before_a_sample(
    device: Advising, memory: Memory
) -> None:
    done: list[str] = []
    device.before("content.prefetch", lambda _, host, __: done.append("host" if host else "device"))
    device.before("content.discard", lambda *_: done.append("discard"))
    buffer = memory.managed(N, discard=True)
    done.clear()
    buffer.prefetch("device")
    buffer.prefetch("host")
    buffer.discard()
    assert done == ["device", "host", "discard"]
    wrong: Any = "gpu"
    with pytest.raises(BadBuffer, match=r"prefetch\('gpu'\); accepted are"):
        buffer.prefetch(wrong)
    buffer.put_home(memory.arena.stream)
    assert done[3:] == ["host", "discard"]


def test_a_wrong_advice_is_refused_before_anything_is_allocated(
    device: Advising, memory: Memory
) -> None:
    cases: list[tuple[Any, str]] = [
        ({"read_mostly": 1}, "read_mostly=1; accepted are True and False"),
        (
            {"preferred_location": "gpu"},
            'preferred_location=\'gpu\'; accepted are "device", "host" and None',
        ),
    ]
    for advice, message in cases:
        with naming(advice):
            for make in (memory.managed, memory.prefetched):
                with pytest.raises(BadBuffer, match=message):
                    make(N, **advice)
            assert device.live == []


@pytest.mark.parametrize("place", ["gpu", ["host"], None])
def test_a_wrong_first_touch_is_refused(memory: Memory, place: Any) -> None:
    with pytest.raises(BadBuffer, match="accepted are 'host', 'device', 'none'"):
        memory.managed(N, first_touch=place)


def test_more_than_the_device_has_free_is_refused_with_the_marker_that_allows_it(
    device: Advising,
) -> None:
    device.memory.allocate(device.memory.free_bytes(MemoryKind.DEVICE) - 4 * GiB, MemoryKind.DEVICE)
    with pytest.raises(
        OutOfMemory,
        match=r"8 GiB of managed memory asked for, 4 GiB are free: .*@pytest\.mark\.gpumem\(oversubscribe=True\)",
    ):
        Memory(Arena(device, seed=1)).managed(8 * GiB)
    arena = Arena(device, seed=1, oversubscribes=True)
    buffer = Memory(arena).managed(8 * GiB)
    assert buffer.oversubscribed
    with pytest.raises(OutOfMemory, match="the host has 64 GiB for evicted pages"):
        Memory(arena).managed(65 * GiB)
    assert list(notes(device.facts, [buffer])) == [
        "8 GiB of managed memory are more than the device had free: pages are evicted to the host meanwhile"
    ]
    arena.close()
    assert not Memory(arena).managed(1 * GiB).oversubscribed


def test_devices_without_migration_say_why() -> None:
    without = replace(H100, concurrent_managed_access=False)
    assert no_migration(H100) is None
    assert "concurrentManagedAccess is 0" in str(no_migration(without))
