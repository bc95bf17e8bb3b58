"""Page-locked memory: the cap, where it lies, its flags, and that nothing stays locked."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from counted_device import CountedDevice, failing
from msgspec.structs import replace

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.protocol import DeviceError, OutOfMemory, Unsupported
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.memory.pinned import TooMuchPinned, touch
from pytest_gpumem.memory.shapes import BadBuffer
from pytest_gpumem.memory.spaces import Memory

MIB = 2**20


@pytest.fixture
def capped() -> Memory:
    """A host of 32 MiB of which half may be locked."""
    return Memory(Arena(CountedDevice(host_memory_bytes=32 * MIB), seed=1))


def test_the_cap_counts_all_buffers_together_pinned_and_registered(capped: Memory) -> None:
    capped.pinned(8 * MIB)
    array = np.zeros(8 * MIB + 4, "u1")
    with pytest.raises(TooMuchPinned) as refused:
        capped.registered(array)
    assert str(refused.value) == (
        "8388612 B of page-locked memory beside 8 MiB that are locked already pass the cap of 16 MiB, half of the host's 32 MiB: "
        "ask for less"
    )
    capped.registered(np.zeros(8 * MIB, "u1"))
    with pytest.raises(TooMuchPinned, match="4 B of page-locked memory beside 16 MiB"):
        capped.pinned(4)
    capped.arena.close()
    capped.pinned(16 * MIB)


def test_what_the_cap_refuses_is_not_allocated_and_is_no_other_error(capped: Memory) -> None:
    with pytest.raises(OutOfMemory):
        capped.pinned(17 * MIB)
    assert capped.arena.device.live == []  # type: ignore[attr-defined]
    assert capped.pageable(17 * MIB).nbytes == 17 * MIB  # pageable memory is not locked


def test_flags_and_node_reach_the_device(
    device: CountedDevice, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    nodes: list[Any] = []

    @contextmanager
    def near_host(node: int | None) -> Iterator[int | None]:
        nodes.append(node)
        yield node
        nodes.append("left")

    def noted(*_: Any, **flags: bool) -> None:
        assert nodes[-1:] != ["left"]
        seen.append(flags)

    monkeypatch.setattr(device.memory, "near_host", near_host)
    device.before("memory.allocate", noted)
    memory.pinned(4096, mapped=False, write_combined=True, portable=False, numa=3)
    assert seen == [{"mapped": False, "write_combined": True, "portable": False}]
    assert nodes == [3, "left"]


def test_device_memory_is_allocated_anywhere(
    device: CountedDevice, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.memory, "near_host", failing())
    memory.device(4096)
    memory.managed(4096)
    with pytest.raises(DeviceError, match="made to fail"):
        memory.pinned(4096)
    with pytest.raises(DeviceError, match="made to fail"):
        memory.registered(np.zeros(8))


@pytest.mark.parametrize("numa", [-1, True, "0", 1.0])
def test_a_node_is_a_number(memory: Memory, numa: Any) -> None:
    with pytest.raises(BadBuffer, match=rf"numa={numa!r}; it is the number of a NUMA node"):
        memory.pinned(4096, numa=numa)


def test_a_node_that_is_not_there_skips(device: CountedDevice, memory: Memory) -> None:
    with pytest.raises(Unsupported, match="numa=7"):
        memory.pinned(4096, numa=7)
    assert device.live == []


def test_a_device_that_cannot_map_host_memory_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CountedDevice()
    monkeypatch.setattr(device.roofline, "facts", replace(device.facts, can_map_host=False))
    memory = Memory(Arena(device, seed=1))
    with pytest.raises(Unsupported, match="canMapHostMemory is 0"):
        memory.pinned(4096)
    unmapped = memory.pinned(4096, mapped=False)
    assert (unmapped.kind, unmapped.address) == (MemoryKind.PINNED, 0)


def test_there_is_no_peer_where_there_is_one_gpu(memory: Memory) -> None:
    with pytest.raises(Unsupported, match="one GPU"):
        memory.peer(4096)


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * mmap.PAGESIZE + 17])
def test_touching_changes_nothing(nbytes: int) -> None:
    array = np.random.default_rng(0).integers(0, 255, nbytes, dtype="u1")
    before = array.copy()
    touch(array)
    assert (array == before).all()


def test_every_page_of_an_adopted_array_is_touched(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[Any] = []
    monkeypatch.setattr("pytest_gpumem.memory.buffers.touch", touched.append)
    array, fixed = np.zeros(64), np.zeros(64)
    memory.pageable(array)
    assert len(touched) == 1
    assert touched[0] is array
    fixed.flags.writeable = False
    with pytest.raises(DeviceError, match="writable"):
        memory.pageable(fixed)
    assert len(touched) == 1


def test_touching_writes_the_last_byte_and_one_of_each_page() -> None:
    class Noted(np.ndarray):
        written: set[int] = set()  # noqa: RUF012

        def __setitem__(self, key: Any, value: Any) -> None:
            self.written.update(range(self.size)[key])
            super().__setitem__(key, value)

    touch(np.zeros(2 * mmap.PAGESIZE + 5, "u1").view(Noted))
    assert Noted.written == {0, mmap.PAGESIZE, 2 * mmap.PAGESIZE, 2 * mmap.PAGESIZE + 4}


@pytest.mark.parametrize("method", ["pinned", "registered"])
def test_a_thousand_buffers_leave_nothing_locked(device: CountedDevice, method: str) -> None:
    free = device.memory.free_bytes(MemoryKind.PINNED)
    for i in range(1000):
        arena = Arena(device, seed=i)
        getattr(Memory(arena), method)(4096)
        arena.close()
    assert device.memory.host().locked == 0
    assert (device.live, device.memory.free_bytes(MemoryKind.PINNED)) == ([], free)
