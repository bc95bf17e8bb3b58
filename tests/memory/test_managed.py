"""Managed memory: who touches it first decides where its pages are, and faults cost more than the kernel.

`add` is y = x + y on two arrays of floats, as in "Unified memory" (seed: 2.7). Before every sample the pages are put back to where
the test says, so no sample sees the pages that the one before has moved. Page faults and migrations are counted in an untimed pass;
where they cannot be (no cupti-python), only times are asserted. At most 512 MiB are managed at once, the copies of a move included.
"""

from __future__ import annotations

import numpy as np
import pytest

from pytest_gpumem import KiB, MiB

# Rows that differ by tens of per cents, or by factors.
pytestmark = pytest.mark.gpumem(budget="0.2 s")

SIZE = 64 * MiB
SMALL = 16 * MiB
"""For what takes a tenth of a second a launch at `SIZE`."""
TEXTS = 4 * MiB
"""The text's N = 1 << 20 floats; also for what takes 60 ms a launch at `SMALL`."""


@pytest.fixture
def add(gpu_benchmark, gpu_kernels):
    """Measures y = x + y and counts."""
    return lambda label, x, y, **options: gpu_benchmark(
        gpu_kernels.add, x, y, label=label, count_pages=True, **options
    )


@pytest.fixture
def plain(gpu_benchmark, gpu_kernels, device_buffer):
    """The same kernel on device memory: the best that managed memory can reach."""
    return lambda: gpu_benchmark(
        gpu_kernels.add, device_buffer(SIZE, "f4"), device_buffer(SIZE, "f4"), label="device memory"
    )


@pytest.fixture
def _pages_fault(gpu_device) -> None:
    """For tests that are about page faults."""
    if gpu_device.facts.host_page_tables:
        pytest.skip(
            f"{gpu_device.facts.name} reads pages of the host through the host's page tables, without a fault"
        )


faults = pytest.mark.usefixtures("_pages_fault")


def counted(result):
    """What one launch did to pages, or None where that was not counted."""
    return result.counts.launch


@faults
@pytest.mark.gpumem(budget="0.3 s")  # its launches vary by a quarter
def test_prefetch_beats_faulting(add, managed_buffer, prefetched_buffer):
    faulting = add("faulting", managed_buffer(SIZE, "f4"), managed_buffer(SIZE, "f4"))
    prefetched = add(
        "prefetched",
        prefetched_buffer(SIZE, "f4"),
        prefetched_buffer(SIZE, "f4"),
        max_gpu_page_faults=0,
        max_migrated=0,
    )
    assert faulting.latency > 30 * prefetched.latency
    if counts := counted(faulting):
        assert counts.gpu_faults > 0
        assert counts.to_device >= 2 * SIZE


@faults
def test_the_texts_own_size(add, gpu_kernels, managed_buffer, prefetched_buffer):
    """0.34 GB/s where pages fault, on a GeForce GT 1030 (seed: 2.7.1). The text's figure beside it, 39.7 GB/s, is of pages that a kernel of
    the GPU initialised (2.7.2)."""
    x, y = (managed_buffer(TEXTS, "f4", first_touch="none") for _ in range(2))
    for array in (x, y):
        gpu_kernels.init(array)
    initialised = add("4 MiB, GPU first", x, y, max_gpu_page_faults=0)
    faulting = add("4 MiB, faulting", managed_buffer(TEXTS, "f4"), managed_buffer(TEXTS, "f4"))
    prefetched = add(
        "4 MiB, prefetched",
        prefetched_buffer(TEXTS, "f4"),
        prefetched_buffer(TEXTS, "f4"),
        max_gpu_page_faults=0,
    )
    assert prefetched.bandwidth > 20 * faulting.bandwidth
    assert initialised.bandwidth > 20 * faulting.bandwidth


@pytest.mark.parametrize("init", ["init", "init_warp_per_page"])
def test_first_touch_by_the_gpu_avoids_faults(add, gpu_kernels, managed_buffer, plain, init):
    x, y = (managed_buffer(SIZE, "f4", first_touch="none") for _ in range(2))
    for array in (x, y):
        getattr(gpu_kernels, init)(array)
    initialised = add("GPU first", x, y, max_gpu_page_faults=0, max_migrated=0)
    assert initialised.latency < 3 * plain().latency


def test_prefetched_is_nearly_device_memory(add, prefetched_buffer, plain):
    prefetched = add("prefetched", prefetched_buffer(SIZE, "f4"), prefetched_buffer(SIZE, "f4"))
    assert prefetched.latency < 3 * plain().latency


def test_the_link_bounds_migration_and_not_the_kernel(add, gpu_device, prefetched_buffer):
    """Prefetches both ways take as long as the link needs: an H100 and an H200 reach 81 % of it there and 83 % back."""
    result = add("prefetched", prefetched_buffer(SIZE, "f4"), prefetched_buffer(SIZE, "f4"))
    assert result.bandwidth > 0.1 * result.device.dram_peak
    if before := result.counts.before:
        assert min(before.to_device, before.to_host) >= 2 * SIZE
        if link := gpu_device.facts.link_bandwidth:
            assert min(before.to_device_bandwidth, before.to_host_bandwidth) > 0.5 * link
        assert max(before.to_device_bandwidth, before.to_host_bandwidth) < result.bandwidth / 2


@faults
@pytest.mark.parametrize("page", [4 * KiB, 64 * KiB, 2 * MiB])
def test_a_warp_for_each_page_faults_less_than_all_warps_on_all_pages(
    gpu_benchmark, gpu_kernels, managed_buffer, page
):
    """The initialising kernels of the text (2.7.2) on pages that are on the host. Nothing is asserted of their times.

    Under a grid-stride loop many warps fault on a page at once. A warp that goes through a page of its own faults once for it.
    """
    strided = gpu_benchmark(
        gpu_kernels.init, managed_buffer(SIZE, "f4"), label="grid stride", count_pages=True
    )
    paged = gpu_benchmark(
        gpu_kernels.init_warp_per_page,
        managed_buffer(SIZE, "f4"),
        page=page,
        label="a warp a page",
        count_pages=True,
    )
    if (of_all := counted(strided)) and (of_one := counted(paged)):
        assert min(of_all.to_device, of_one.to_device) >= SIZE
        assert 0 < of_one.gpu_faults < of_all.gpu_faults / 3


@faults
def test_read_mostly_gives_a_reader_a_copy(add, managed_buffer, prefetched_buffer, plain):
    """The first reader still faults; a prefetch makes the copy beforehand."""
    faulting = add(
        "read mostly", managed_buffer(SIZE, "f4", read_mostly=True), prefetched_buffer(SIZE, "f4")
    )
    ahead = add(
        "prefetched",
        prefetched_buffer(SIZE, "f4", read_mostly=True),
        prefetched_buffer(SIZE, "f4"),
        max_gpu_page_faults=0,
    )
    assert ahead.latency < 3 * plain().latency
    assert faulting.latency > 10 * ahead.latency
    if counts := counted(faulting):
        assert counts.gpu_faults > 0
        assert counts.to_device >= SIZE


@faults
def test_writing_read_mostly_memory_drops_the_other_copies(add, prefetched_buffer):
    """Both arrays were prefetched; the one that is written faults all the same, because the host has a copy of it."""
    read = add(
        "read", prefetched_buffer(TEXTS, "f4", read_mostly=True), prefetched_buffer(TEXTS, "f4")
    )
    written = add(
        "written", prefetched_buffer(TEXTS, "f4"), prefetched_buffer(TEXTS, "f4", read_mostly=True)
    )
    assert written.latency > 2 * read.latency
    if counts := counted(written):
        assert counts.gpu_faults > 0


def test_pages_that_prefer_the_host_stay_there(add, managed_buffer, plain):
    """The first launch of all faults and maps them; from then on there is nothing to put back, and none faults."""
    buffers = (managed_buffer(SIZE, "f4", preferred_location="host") for _ in range(2))
    stays = add("host", *buffers, max_gpu_page_faults=0, max_migrated=0)
    assert stays.latency > 2 * plain().latency


@faults
def test_pages_that_prefer_the_device_migrate_like_others(add, managed_buffer, prefetched_buffer):
    faulting = add(
        "device", *(managed_buffer(SMALL, "f4", preferred_location="device") for _ in range(2))
    )
    prefetched = add(
        "prefetched",
        *(prefetched_buffer(SMALL, "f4", preferred_location="device") for _ in range(2)),
        max_gpu_page_faults=0,
    )
    assert faulting.latency > 10 * prefetched.latency
    if counts := counted(faulting):
        assert counts.to_device >= 2 * SMALL


def test_pages_accessed_by_the_device_are_mapped_without_a_fault(add, managed_buffer, plain):
    mapped = add(
        "mapped",
        *(managed_buffer(SIZE, "f4", accessed_by="device") for _ in range(2)),
        max_gpu_page_faults=0,
        max_migrated=0,
    )
    assert mapped.latency > 2 * plain().latency


def test_a_host_that_reads_results_in_place_gets_them(gpu_benchmark, gpu_kernels, managed_buffer):
    """The pages come back to the host, a fault at a time: a profiler shows them as page faults of the CPU.

    `like=np` is a view of the memory itself, where `np.asarray` of a buffer is a copy that the driver makes. Pages go back home when a
    measurement is done, as before every sample; with "none" they stay where the last launch has left them.
    """
    x = managed_buffer(SMALL, "f4", first_touch="none", like=np)
    gpu_benchmark(gpu_kernels.init, x, 2.0)
    assert (x.min(), x.max()) == (2.0, 2.0)


@faults
@pytest.mark.gpumem(placements=1)  # fresh memory would never have heard of the advice
def test_advice_that_is_taken_back_leaves_no_trace(add, managed_buffer):
    """All three at once, and none of them: pages fault and migrate as if nobody had said a word."""
    x, y = (
        managed_buffer(
            SIZE, "f4", read_mostly=True, preferred_location="host", accessed_by="device"
        )
        for _ in range(2)
    )
    for buffer in (x, y):
        buffer.advise(read_mostly=False, preferred_location=None, accessed_by=None)
    result = add("taken back", x, y)
    if counts := counted(result):
        assert counts.gpu_faults > 0
        assert counts.to_device >= 2 * SIZE


@faults
def test_discarded_content_is_not_copied(gpu_benchmark, gpu_kernels, managed_buffer):
    kept, dropped = managed_buffer(SMALL, "f4"), managed_buffer(SMALL, "f4", discard=True)
    copied = gpu_benchmark(gpu_kernels.init, kept, label="kept", count_pages=True)
    discarded = gpu_benchmark(gpu_kernels.init, dropped, label="discarded", count_pages=True)
    if counts := counted(discarded):
        assert counts.to_device < counted(copied).to_device
