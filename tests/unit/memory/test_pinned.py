"""Page-locked memory: the cap, where it lies, its flags, and that nothing stays locked."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from counted_device import CountedDevice

from pytest_gpumem.devices.protocol import OutOfMemory
from pytest_gpumem.memory.buffers import Arena, touch
from pytest_gpumem.memory.spaces import Memory

MIB = 2**20


@pytest.fixture
def capped() -> Memory:
    """A host of 32 MiB of which half may be locked."""
    return Memory(Arena(CountedDevice(host_memory_bytes=32 * MIB), seed=1))


def test_the_cap_counts_all_buffers_together_pinned_and_registered(capped: Memory) -> None:
    capped.pinned(8 * MIB)
    array = np.zeros(8 * MIB + 4, "u1")
    with pytest.raises(OutOfMemory) as refused:
        capped.registered(array)
    assert str(refused.value) == (
        "8388612 B of page-locked memory beside 8 MiB that are locked already pass the cap of 16 MiB, half of the host's 32 MiB: "
        "ask for less"
    )
    capped.registered(np.zeros(8 * MIB, "u1"))
    with pytest.raises(OutOfMemory, match="4 B of page-locked memory beside 16 MiB"):
        capped.pinned(4)
    capped.arena.close()
    capped.pinned(16 * MIB)


def test_touching_changes_nothing() -> None:
    for nbytes in [1, 4096, 3 * mmap.PAGESIZE + 17]:
        array = np.random.default_rng(0).integers(0, 255, nbytes, dtype="u1")
        before = array.copy()
        touch(array)
        assert (array == before).all(), nbytes
