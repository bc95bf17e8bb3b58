"""Transfers hidden behind kernels, behind each other and behind work of the host (Best Practices Guide, 9.1.2)."""

from __future__ import annotations

import pytest

from pytest_gpumem import MiB

SIZE = 64 * MiB

pytestmark = pytest.mark.gpumem(budget="20 ms")


ROUNDS = 200
"""Of `elementwise`: on an H200 a quarter of the time of a copy of its data; the copy is the longest part."""


CHUNKS = 16
"""Of a copy there and back: each costs some microseconds, and a share of the copy that nothing hides."""


@pytest.mark.parametrize(
    ("streams", "rounds"), [*((n, ROUNDS) for n in (1, 2, 4, 8, 16)), (4, 8 * ROUNDS)]
)
def test_staging_follows_the_estimate(link_benchmark, staged_copy, streams, rounds):
    """tT + tE/n where the transfer takes longer, tE + tT/n where the kernel does; one stream hides nothing."""

    def follows(staged):
        overlap = staged.overlap
        near = overlap.bound <= staged.latency * 1.02 and staged.latency == pytest.approx(
            overlap.estimate, rel=0.2
        )
        # Each chunk costs some microseconds besides, which the estimate leaves out: on an H200 16 streams hide no more than 4.
        return near and 0.65 * (1 - 1 / streams) - 0.05 < staged.hidden < 1 - 1 / streams + 0.1

    work = staged_copy(streams, SIZE, rounds=rounds, back=False)
    assert follows(link_benchmark(work, label="staged", holds=follows))


def test_copies_both_ways_and_the_kernel_run_at_once(
    link_benchmark, gpu_work, staged_copy, device_buffer, pinned_buffer
):
    """In, kernel and out. A link that carries both ways at once loses a tenth on an H100 and an H200, so the bound is what copies of the
    same chunks take both ways at once; the first chunk's way in and the last one's kernel come on top."""
    up = gpu_work.copy(device_buffer(SIZE), pinned_buffer(SIZE), pieces=CHUNKS)
    down = gpu_work.copy(pinned_buffer(SIZE), device_buffer(SIZE), pieces=CHUNKS)
    together, in_chunks = (
        gpu_work.together(up, down),
        staged_copy(4, SIZE, rounds=ROUNDS, chunks=CHUNKS),
    )
    both = link_benchmark(together, label="both copies")
    staged = link_benchmark(in_chunks, label="staged")
    assert staged.hidden > 0.6
    parts = [part.seconds for part in staged.overlap.parts]
    assert len(parts) == 3
    assert staged.latency < 1.1 * (both.latency + (max(parts) + min(parts)) / CHUNKS)


def test_a_number_of_chunks_that_divides_nothing(link_benchmark, staged_copy):
    """7 chunks over 3 streams; the last chunk is shorter. Every element is checked as always."""
    staged = link_benchmark(
        staged_copy(3, SIZE, rounds=ROUNDS, chunks=7), label="staged", min_overlap="50%"
    )
    assert staged.checked


def test_a_copy_beside_a_kernel_on_other_data(
    link_benchmark, gpu_kernels, gpu_work, device_buffer, pinned_buffer
):
    copy = gpu_work.copy(device_buffer(SIZE), pinned_buffer(SIZE))
    kernel = gpu_work.kernel(gpu_kernels.elementwise, device_buffer(SIZE), ROUNDS)
    beside = link_benchmark(gpu_work.together(copy, kernel), label="beside", min_overlap="80%")
    assert beside.latency < 1.3 * beside.overlap.bound


def test_host_work_beside_a_copy_and_a_kernel(
    link_benchmark, gpu_device, gpu_kernels, gpu_work, device_buffer, pinned_buffer
):
    """As `cpuFunction()` in the guide: copy and kernel are queued on one stream, and the host works while they run."""
    x = device_buffer(SIZE)
    device = gpu_work.in_turn(
        gpu_work.copy(x, pinned_buffer(SIZE)), gpu_work.kernel(gpu_kernels.elementwise, x, ROUNDS)
    )
    alone = link_benchmark(device, label="copy and kernel")

    def cpu_function():
        end = gpu_device.now() + alone.latency
        while gpu_device.now() < end:
            pass

    beside = link_benchmark(
        gpu_work.together(device, gpu_work.host(cpu_function)),
        label="host work beside",
        min_overlap="70%",
    )
    assert beside.sampler == "host"


def test_pinned_copies_return_at_once_and_pageable_ones_do_not(
    gpu_work, device_buffer, pinned_buffer, pageable_buffer
):
    """Enqueue time: a call that returns long before its copy is done is asynchronous."""
    there = device_buffer(SIZE)
    returned, done = min(
        gpu_work.enqueue(gpu_work.copy(there, pinned_buffer(SIZE))) for _ in range(3)
    )
    assert returned < 0.2 * done
    returned, done = gpu_work.enqueue(gpu_work.copy(there, pageable_buffer(SIZE)))
    assert returned > 0.5 * done


def test_pageable_memory_hides_less(
    link_benchmark,
    gpu_benchmark,
    gpu_kernels,
    gpu_work,
    device_buffer,
    pinned_buffer,
    pageable_buffer,
):
    """The host itself moves pageable data: what it copies second waits for what it copies first."""
    kernel = gpu_work.kernel(gpu_kernels.elementwise, device_buffer(SIZE), ROUNDS)
    pinned = link_benchmark(
        gpu_work.together(gpu_work.copy(device_buffer(SIZE), pinned_buffer(SIZE)), kernel),
        label="pinned",
    )
    pageable = gpu_benchmark(
        gpu_work.together(gpu_work.copy(device_buffer(SIZE), pageable_buffer(SIZE)), kernel),
        label="pageable",
    )
    assert pageable.latency > 1.3 * pinned.latency
