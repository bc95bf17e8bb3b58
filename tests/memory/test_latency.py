"""Latency of dependent accesses: a pointer chase through L2, through DRAM, and through host memory that the device sees."""

from __future__ import annotations

import pytest

from pytest_gpumem import KiB
from pytest_gpumem.devices.protocol import Unsupported
from pytest_gpumem.kernels.latency import NODE_BYTES
from pytest_gpumem.units import format_bytes

pytestmark = pytest.mark.gpumem(budget="0.3 s")  # rows that differ by tens of per cents
STEPS = 4000
"""Nodes of one walk: the launch itself is no part of it worth counting, and far fewer than the nodes of any cycle beyond L1."""
L1_STEPS = 10 * STEPS
"""Of a walk through L1, which is empty when a launch begins: many passes over a small cycle."""


@pytest.fixture
def walk(gpu_benchmark, device_buffer):
    """Measures a walk over nodes, in ns per access as `latency_per_access`."""
    out = device_buffer((1,), "i4")
    return lambda kernel, nodes, label, mode=None: gpu_benchmark(
        kernel, nodes, out, STEPS, mode=mode, label=label
    )


@pytest.fixture
def in_dram(walk, gpu_kernels, device_buffer, of_l2):
    """Over 4 x L2, every walk going on where the last one ended: no line was touched before, in whatever mode."""
    nodes = device_buffer(of_l2(4), "i4")
    return lambda label, mode=None: walk(gpu_kernels.chase_onward, nodes, label, mode)


def test_l2_answers_sooner_than_dram(walk, in_dram, gpu_kernels, device_buffer, of_l2):
    """The same walk again and again, within a quarter of L2: its lines are there since the walk before."""
    in_l2 = walk(gpu_kernels.chase, device_buffer(of_l2(0.25), "i4"), "L2", "hot")
    assert in_dram("DRAM").latency_per_access > 1.3 * in_l2.latency_per_access


def test_a_walk_that_goes_on_finds_no_line_of_the_last(in_dram):
    assert (
        in_dram("hot", "hot").latency_per_access
        > 0.75 * in_dram("cold", "clean-cold").latency_per_access
    )


@pytest.mark.parametrize("mode", ["clean-cold", "dirty-cold"])
def test_a_flush_leaves_little_of_a_walk_in_l2(walk, gpu_kernels, device_buffer, of_l2, mode):
    """The same walk within a quarter of L2, with the flush before each sample and without. All rows in a cold mode depend on that flush."""
    nodes = device_buffer(of_l2(0.25), "i4")
    hot, cold = (
        walk(gpu_kernels.chase, nodes, label, label).latency_per_access for label in ("hot", mode)
    )
    assert cold > 1.3 * hot


def test_dram_answers_sooner_than_mapped_host_memory(
    walk, in_dram, gpu_kernels, pinned_buffer, of_l2
):
    """Every access crosses the link; skips where the device cannot map host memory."""
    on_host = walk(gpu_kernels.chase_onward, pinned_buffer(of_l2(1), "i4"), "mapped host memory")
    assert on_host.latency_per_access > 1.3 * in_dram("DRAM").latency_per_access


@pytest.mark.gpumem(budget="0.1 s")  # for each of some fifteen rows
def test_the_ladder_from_l1_to_the_host(
    gpu_benchmark,
    gpu_device,
    gpu_kernels,
    device_buffer,
    pinned_buffer,
    managed_buffer,
    peer_buffer,
    of_l2,
):
    """One row a size and place, all in one plot. Walks within L1 and L2 go through the whole cycle; others go on where the last one ended.

    A row within L2 is the mean over its partitions: half of an H100's lines are in the far one. Memory of a peer where there is one.
    """
    out = device_buffer((1,), "i4")

    def walk(kernel, nodes, steps, place):
        label = f"{place}, {format_bytes(nodes.nbytes)}"
        return gpu_benchmark(kernel, nodes, out, steps, mode="hot", label=label).latency_per_access

    l1 = 0.7 * (gpu_device.facts.shared_bytes_per_sm or 100 * KiB)
    fit = [size for size in (16 * KiB, 64 * KiB, 128 * KiB) if size < l1]
    through_l1 = [
        walk(gpu_kernels.chase_l1, device_buffer(size, "i4"), L1_STEPS, "L1") for size in fit
    ]
    sizes = sorted({256 * KiB, 1024 * KiB, of_l2(0.1), of_l2(0.25)})
    l2 = [
        walk(gpu_kernels.chase, device_buffer(size, "i4"), max(STEPS, size // NODE_BYTES), "L2")
        for size in sizes
    ]
    on_host = {"preferred_location": "host", "accessed_by": "device"}
    dram = [
        walk(gpu_kernels.chase_onward, device_buffer(of_l2(share), "i4"), STEPS, "DRAM")
        for share in (2, 4)
    ]
    host = [
        walk(
            gpu_kernels.chase_onward, pinned_buffer(of_l2(share), "i4"), STEPS, "mapped host memory"
        )
        for share in (0.5, 1)
    ]
    managed = [
        walk(
            gpu_kernels.chase_onward,
            managed_buffer(of_l2(share), "i4", **on_host),
            STEPS,
            "managed on the host",
        )
        for share in (0.5, 1)
    ]
    try:
        with gpu_device.peer_access(True):
            peer = [
                walk(gpu_kernels.chase_onward, peer_buffer(of_l2(share), "i4"), STEPS, "peer")
                for share in (1, 2)
            ]
    except Unsupported:
        peer = []
    assert 3 * max(through_l1) < min(l2)
    assert 1.3 * max(l2) < min(dram)
    assert 1.3 * max(dram) < min(*host, *managed)
    assert all(1.2 * max(dram) < one for one in peer)


def test_a_peers_memory_answers_later_than_the_devices_own(
    walk, in_dram, gpu_device, gpu_kernels, peer_buffer, of_l2
):
    """Every access crosses NVLink or PCIe; skips with one GPU."""
    theirs = peer_buffer(of_l2(1), "i4")
    with gpu_device.peer_access(True):
        peer = walk(gpu_kernels.chase_onward, theirs, "peer")
    assert peer.latency_per_access > 1.2 * in_dram("DRAM").latency_per_access
