"""One address space for host and devices: what lies where (Best Practices Guide, 9.1.4)."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem import MiB

KINDS = ("device", "managed", "pinned", "registered", "pageable")


@pytest.mark.parametrize("kind", KINDS)
def test_a_pointer_tells_its_kind_also_within_a_slice(request, memory_kind, kind):
    buffer = request.getfixturevalue(f"{kind}_buffer")(MiB)
    for start in {buffer.address, buffer.host_address} - {0}:
        assert {memory_kind(start + at) for at in (0, 1, MiB // 2 + 3, MiB - 1)} == {kind}
    assert memory_kind(buffer) == kind


def test_an_array_and_its_slices_are_of_the_memory_behind_them(memory_kind, registered_buffer):
    array = np.arange(MiB // 4, dtype="f4")
    assert memory_kind(array) == "pageable"
    registered_buffer(array)
    assert [memory_kind(part) for part in (array, array[1:], array[1000:2000:3])] == [
        "registered"
    ] * 3


def test_an_array_over_a_buffer_is_of_the_buffers_kind(real_gpu, memory_kind, pinned_buffer):
    """The simulated device backs a buffer with ordinary memory, whose address an array there has."""
    assert memory_kind(pinned_buffer(MiB, like=np)[7:]) == "pinned"


@pytest.mark.parametrize("kind", ["device", "managed", "pinned"])
def test_past_the_end_is_not_the_buffers(request, memory_kind, kind):
    """Nothing lies there, or something else's memory of the process; never this buffer's last byte once more."""
    buffer = request.getfixturevalue(f"{kind}_buffer")(1000)
    end = (buffer.address or buffer.host_address) + 1000
    assert memory_kind(end) is None
    assert memory_kind(end - 1) == kind


def test_pinned_memory_has_one_address_on_both_sides(pinned_buffer):
    """ "pinned host memory allocated via cudaHostAlloc() will have the same host and device pointers"."""
    buffer = pinned_buffer(MiB)
    assert buffer.address == buffer.host_address != 0


def test_registered_memory_goes_back_to_pageable(memory_kind, gpu_device):
    array = np.zeros(MiB, "u1")
    allocation = gpu_device.memory.adopt(array, register=True)
    assert memory_kind(array) == "registered"
    gpu_device.memory.free(allocation)
    assert memory_kind(array) == "pageable"


def test_null_is_no_memory(memory_kind):
    assert memory_kind(0) is None
