"""What allocating and page-locking cost, apart from using the memory (Best Practices Guide, 9.1.1; Programming Guide, memory pools)."""

from __future__ import annotations

import pytest

from pytest_gpumem import MiB

pytestmark = pytest.mark.gpumem(budget="0.2 s")  # rows that differ by factors

SIZE = 16 * MiB


@pytest.fixture
def allocating(gpu_benchmark, gpu_work):
    """Measures one allocation and its free, synchronisation included."""
    return lambda name, size=SIZE: gpu_benchmark(
        gpu_work.allocating(name, size), mode="hot", label=f"{name}, {size // MiB} MiB"
    )


def test_a_pool_that_keeps_its_memory_beats_cudamalloc(allocating):
    assert allocating("cudaMallocAsync, kept").latency * 3 < allocating("cudaMalloc").latency


def test_without_a_release_threshold_every_synchronisation_empties_the_pool(allocating):
    """The default threshold is 0: memory goes back to the driver at each synchronisation, which every sample here ends with."""
    assert allocating("cudaMallocAsync, kept").latency * 2 < allocating("cudaMallocAsync").latency


def test_cupys_pool_beats_cudamalloc(allocating):
    assert allocating("CuPy pool").latency * 3 < allocating("cudaMalloc").latency


@pytest.mark.parametrize("name", ["cudaHostAlloc", "cudaHostRegister"])
def test_page_locking_is_a_heavyweight_operation_and_grows_with_the_size(allocating, name):
    small, large = allocating(name, 4 * MiB), allocating(name, 64 * MiB)
    assert large.latency > 3 * small.latency


def test_locking_pages_costs_more_than_a_copy_saves(
    link_benchmark, gpu_kernels, allocating, device_buffer, pinned_buffer
):
    """For one use of the memory, registering it takes longer than the copy itself: pin what is used again."""
    copy = link_benchmark(
        gpu_kernels.memcpy, device_buffer(64 * MiB), pinned_buffer(64 * MiB), label="pinned copy"
    )
    assert allocating("cudaHostRegister", 64 * MiB).latency > copy.latency
