"""The kinds of memory that a user asks for."""

from __future__ import annotations

import numpy as np
from counted_device import CountedDevice

from pytest_gpumem.memory.buffers import Arena, Buffer
from pytest_gpumem.memory.spaces import Memory


def test_each_method_gives_its_kind_with_content() -> None:
    for method in ["device", "managed", "prefetched", "pinned", "registered", "pageable"]:
        device = CountedDevice()
        memory = Memory(Arena(device, seed=7))
        buffer: Buffer = getattr(memory, method)((256,), "i4")
        assert buffer.kind.value == ("managed" if method == "prefetched" else method), method
        assert (buffer.shape, buffer.dtype_name) == ((256,), "i4"), method
        assert len(np.unique(buffer.read())) > 250, method
        memory.arena.close()
        assert device.live == [], method


def test_a_guest_shares_memory_and_keeps_its_buffer_in_place(memory: Memory) -> None:
    array = memory.managed((16, 4), "f4", like=np)
    assert isinstance(array, np.ndarray)
    assert array.shape == (16, 4)
    buffer = memory.arena.find(array)
    assert buffer is not None
    array[3] = 5
    assert (buffer.read()[3] == 5).all()
    assert len(buffer) == 16
    assert not memory.arena.can_move(buffer)
    assert memory.arena.can_move(memory.managed((16, 4), "f4"))


def test_a_library_shares_the_memory_of_a_buffer_by_dlpack(memory: Memory) -> None:
    buffer = memory.pinned((16,), "f4")
    np.from_dlpack(buffer)[3] = 5
    assert buffer.read()[3] == 5
