"""The host link: kinds of host memory, both ways, sizes, many copies against one, and other GPUs (Best Practices Guide, 9.1, 9.1.1)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from pytest_gpumem import KiB, MiB

pytestmark = pytest.mark.gpumem(precision="0.5%", budget="0.3 s")
"""Placements differ by 0.1 to 0.2 % here, and each costs new page-locked memory: more precision would be bought dearly."""

SIZE = 128 * MiB
SIZES = tuple(4 * KiB * 4**step for step in range(9))
"""4 KiB to 256 MiB."""


@pytest.fixture(scope="module")
def pageable():
    """An ordinary NumPy array, written once so that its pages exist."""
    return np.arange(SIZE // 4, dtype="f4")


def test_pinned_to_device_beats_pageable(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable
):
    target = device_buffer(SIZE, "f4")
    pinned = link_benchmark(gpu_kernels.memcpy, target, pinned_buffer(SIZE, "f4"), label="pinned")
    slow = link_benchmark(gpu_kernels.memcpy, target, pageable, label="pageable")
    assert pinned.bandwidth > 1.5 * slow.bandwidth


def test_device_to_pinned_beats_pageable(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable
):
    source = device_buffer(SIZE, "f4")
    pinned = link_benchmark(gpu_kernels.memcpy, pinned_buffer(SIZE, "f4"), source, label="pinned")
    slow = link_benchmark(gpu_kernels.memcpy, pageable, source, label="pageable")
    assert pinned.bandwidth > 1.5 * slow.bandwidth


def test_pinned_reaches_most_of_the_link(
    link_benchmark, gpu_kernels, gpu_device, device_buffer, pinned_buffer
):
    """A link loses an eighth to a quarter to packet headers and acknowledgements."""
    link = gpu_device.facts.link_bandwidth
    if link is None:
        pytest.skip("the width or the generation of the host link is unknown")
    there, here = device_buffer(SIZE), pinned_buffer(SIZE)
    for label, arguments in {
        "host to device": (there, here),
        "device to host": (here, there),
    }.items():
        assert link_benchmark(gpu_kernels.memcpy, *arguments, label=label).bandwidth > 0.7 * link


def test_registered_memory_is_as_fast_as_pinned(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer, registered_buffer, pageable
):
    target = device_buffer(SIZE, "f4")
    pinned = link_benchmark(gpu_kernels.memcpy, target, pinned_buffer(SIZE, "f4"), label="pinned")
    registered = link_benchmark(
        gpu_kernels.memcpy, target, registered_buffer(pageable), label="registered"
    )
    assert registered.bandwidth > 0.9 * pinned.bandwidth


@pytest.mark.parametrize(
    "flags", [{"mapped": False}, {"portable": False}, {"write_combined": True}], ids=str
)
def test_flags_of_pinned_memory_leave_the_link_as_fast(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer, flags
):
    target = device_buffer(SIZE // 2)
    plain = link_benchmark(gpu_kernels.memcpy, target, pinned_buffer(SIZE // 2), label="plain")
    flagged = link_benchmark(
        gpu_kernels.memcpy, target, pinned_buffer(SIZE // 2, **flags), label="flagged"
    )
    assert flagged.bandwidth > 0.9 * plain.bandwidth


def test_both_ways_at_once(link_benchmark, gpu_work, device_buffer, pinned_buffer):
    """A full-duplex link carries both; the total is what both copies move."""
    up = gpu_work.copy(device_buffer(SIZE // 2), pinned_buffer(SIZE // 2))
    down = gpu_work.copy(pinned_buffer(SIZE // 2), device_buffer(SIZE // 2))
    alone = link_benchmark(up, label="one way")
    both = link_benchmark(gpu_work.together(up, down), label="both ways", min_overlap="40%")
    assert both.bandwidth > 1.4 * alone.bandwidth


@pytest.mark.gpumem(budget="0.1 s")  # nine rows that differ by factors
def test_the_bandwidth_rises_with_the_size(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer
):
    """From where latency decides to where bandwidth does; n_1/2 is the size at which half of the largest bandwidth is reached."""
    there, here = {}, {}
    for size in SIZES:
        there[size], here[size] = device_buffer(size), pinned_buffer(size)
    rates = [
        link_benchmark(
            gpu_kernels.memcpy, there[size], here[size], label=f"{size // KiB} KiB"
        ).bandwidth
        for size in SIZES
    ]
    assert all(larger > 0.95 * smaller for smaller, larger in pairwise(rates))
    half = next(size for size, rate in zip(SIZES, rates, strict=True) if rate >= max(rates) / 2)
    assert 16 * KiB < half < 4 * MiB


@pytest.mark.gpumem(sampler="host")  # a hold would have to queue more copies than a stream does
def test_one_packed_copy_beats_many_small_ones(
    gpu_benchmark, gpu_work, device_buffer, pinned_buffer
):
    """Packing on the host included (9.1: "batching many small transfers into one larger transfer performs significantly better")."""
    there, packed, scattered = (
        device_buffer(4 * MiB),
        pinned_buffer(4 * MiB),
        pinned_buffer(4 * MiB),
    )
    rows = np.random.default_rng(0).random((1024, 1024), dtype="f4")
    many = gpu_benchmark(gpu_work.copy(there, scattered, pieces=1024), label="1024 copies of 4 KiB")
    one = gpu_benchmark(gpu_work.copy(there, packed), label="one of 4 MiB")
    pack = gpu_work.host(lambda: packed.write(rows), "packing")
    both = gpu_benchmark(
        gpu_work.in_turn(pack, gpu_work.copy(there, packed)), label="packed on the host, then one"
    )
    assert one.latency * 3 < many.latency
    assert both.latency < many.latency


def test_intermediates_that_stay_on_the_device_save_a_round_trip(
    link_benchmark, gpu_device, gpu_kernels, gpu_work, device_buffer, pinned_buffer
):
    """Two kernels on data of the host: what lies between them goes to the host and back, or stays ("intermediate data structures should be
    created in device memory, operated on by the device, and destroyed without ever being mapped by the host")."""
    if gpu_device.facts.integrated:
        pytest.skip("an integrated GPU has no link to save")
    size = SIZE // 2
    there, given, between, result = (
        device_buffer(size),
        pinned_buffer(size),
        pinned_buffer(size),
        pinned_buffer(size),
    )

    def halves(*middle):
        kernels = [gpu_work.kernel(gpu_kernels.elementwise, there, 1) for _ in range(2)]
        return gpu_work.in_turn(
            gpu_work.copy(there, given),
            kernels[0],
            *middle,
            kernels[1],
            gpu_work.copy(result, there),
        )

    stays = link_benchmark(halves(), label="stays on the device")
    returns = link_benchmark(
        halves(gpu_work.copy(between, there), gpu_work.copy(there, between)),
        label="to the host and back",
    )
    assert returns.latency > 1.8 * stays.latency


def test_device_to_device_is_no_matter_of_the_link(
    link_benchmark, gpu_kernels, device_buffer, pinned_buffer
):
    there, other = device_buffer(SIZE // 2), device_buffer(SIZE // 2)
    link = link_benchmark(
        gpu_kernels.memcpy, there, pinned_buffer(SIZE // 2), label="over the link"
    )
    inside = link_benchmark(gpu_kernels.memcpy, other, there, label="inside")
    assert inside.latency * 5 < link.latency


def test_peer_access_makes_copies_between_gpus_direct(
    link_benchmark, gpu_kernels, gpu_device, device_buffer, peer_buffer
):
    here, there = device_buffer(SIZE), peer_buffer(SIZE)
    with gpu_device.peer_access(False):
        staged = link_benchmark(gpu_kernels.memcpy, there, here, label="staged through the host")
    with gpu_device.peer_access(True):
        direct = link_benchmark(gpu_kernels.memcpy, there, here, label="direct")
        back = link_benchmark(gpu_kernels.memcpy, here, there, label="direct, the other way")
    assert direct.bandwidth > 1.2 * staged.bandwidth
    assert back.bandwidth > 0.8 * direct.bandwidth
