"""What an arena gives, what it refuses, and that it frees everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import naming
from counted_device import CountedDevice

from pytest_gpumem.devices.memory_kinds import MemoryKind
from pytest_gpumem.devices.protocol import Allocation, OutOfMemory
from pytest_gpumem.memory.buffers import Arena, BadBuffer, parse_shape
from pytest_gpumem.units import MiB


def test_equal_seeds_give_equal_content_buffer_by_buffer() -> None:
    def contents(seed: int) -> list[bytes]:
        device = CountedDevice()
        arena = Arena(device, seed)
        return [arena.buffer((1000,), dtype).read().tobytes() for dtype in ("f4", "f4", "i8")]

    one, again, other = contents(3), contents(3), contents(4)
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))
    assert one[0] != one[1]


def test_read_is_a_copy_and_write_replaces(arena: Arena) -> None:
    buffer = arena.buffer((2, 3), "f4")
    buffer.read()[:] = -1
    assert (buffer.read() >= 0).all()
    before = buffer.written
    buffer.write([[1, 2, 3], [4, 5, 6]])
    assert (before, buffer.written) == (False, True)
    np.testing.assert_array_equal(buffer.read(), [[1, 2, 3], [4, 5, 6]])
    np.testing.assert_array_equal(np.asarray(buffer), buffer.read())
    buffer.view()[1, 2] = 7
    assert buffer.read()[1, 2] == 7
    with pytest.raises(
        BadBuffer,
        match=r"write\(\) got 5 elements for <device buffer, 24 B of f4 at .*>, which holds 6",
    ):
        buffer.write(range(5))


def test_a_size_is_bytes_a_text_or_a_shape() -> None:
    cases: list[tuple[Any, tuple[int, ...]]] = [
        (64 * MiB, (16 * MiB,)),
        ("64 MiB", (16 * MiB,)),
        ((3, 5), (3, 5)),
        ([7], (7,)),
        (np.int64(8), (2,)),
    ]
    for written, elements in cases:
        assert parse_shape(written, "f4") == (elements, np.dtype("f4")), written


def test_what_cannot_be_is_refused_in_one_line() -> None:
    cases: list[tuple[Any, Any, str]] = [
        (0, "f4", "a buffer needs at least one element; 0 bytes requested"),
        (6, "f4", "6 bytes do not hold a whole number of 4-byte elements (float32)"),
        ((), "f4", "a shape is a tuple of positive integers, not ()"),
        (True, "f4", "or a tuple of elements, not True"),
        ("64 floats", "f4", "'64 floats'"),
        (64, "float33", "'float33' is no element type such"),
        (64, object, "dtype object cannot live in a buffer"),
        (
            64,
            ">f4",
            "dtype >f4 cannot live in a buffer: it takes numbers in the machine's byte order",
        ),
        (64, [("x", "f4"), ("y", "f4")], "cannot live in a buffer"),
    ]
    for shape, dtype, message in cases:
        device = CountedDevice()
        arena = Arena(device, seed=7)
        with naming(shape, dtype, message):
            with pytest.raises(BadBuffer) as caught:
                arena.buffer(shape, dtype)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)
            assert device.live == []


def test_close_frees_everything_and_twice_is_harmless(device: CountedDevice, arena: Arena) -> None:
    for kind in (MemoryKind.DEVICE, MemoryKind.MANAGED, MemoryKind.PINNED):
        arena.buffer(4096, kind=kind)
    arena.adopt(np.zeros(16), register=True)
    arena.adopt(np.zeros(16), register=False)
    arena.allocate(4096)
    for nbytes in (2 * MiB, 4 * MiB):
        arena.pad(nbytes)  # the second ends the first
    arena.buffer(4096).move()
    assert len(device.live) == 8
    arena.close()
    assert device.live == []
    arena.close()


def test_what_an_argument_stands_for(arena: Arena) -> None:
    """A buffer for itself, an array of another library for the buffer that it lies in, the user's own array for pageable memory."""
    buffer = arena.buffer(64, "f4", MemoryKind.PINNED)
    guest, own = arena.guest(buffer, np), np.zeros(16, "f4")
    assert arena.taken(buffer) is buffer
    assert arena.taken(guest) is arena.find(guest) is buffer
    assert arena.find(own) is None
    adopted = arena.taken(own)
    assert (adopted.kind, adopted.host_address) == (MemoryKind.PAGEABLE, own.ctypes.data)
    assert [arena.taken(other) for other in (3.0, "text", None)] == [3.0, "text", None]


def test_kept_arenas_are_closed_the_last_first_once_their_memory_is_needed(
    device: CountedDevice, arena: Arena
) -> None:
    size = device.memory.free_bytes(MemoryKind.DEVICE) // 4
    others = [Arena(device, seed=seed) for seed in range(3)]
    for other in others:
        other.allocate(size)
        for _ in range(2):  # again: no second one
            arena.keep(other)
    arena.allocate(size)
    assert (arena.kept, len(device.live)) == (others, 4)
    freed: list[Allocation] = []
    kept = device.live[:3]
    device.before("memory.free", freed.append)
    arena.allocate(size)
    assert [kept.index(one) for one in freed] == [2, 1, 0]
    assert not arena.kept
    with pytest.raises(OutOfMemory):
        arena.allocate(3 * size)
    arena.keep(others[0])
    others[0].allocate(4096)
    arena.close()
    assert device.live == []
