"""Latency of dependent accesses: a pointer chase through L2, through DRAM, and through host memory that the device sees."""

from __future__ import annotations

import pytest

STEPS = 4000
"""Nodes of one walk: the launch itself is no part of it worth counting, and far fewer than the nodes of any cycle here."""


@pytest.fixture
def walk(gpu_benchmark, device_buffer):
    """Measures a walk over nodes, in ns per access as `latency_per_access`."""
    out = device_buffer((1,), "i4")
    return lambda kernel, nodes, label, mode=None: gpu_benchmark(kernel, nodes, out, STEPS, mode=mode, label=label)


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
    assert in_dram("hot", "hot").latency_per_access > 0.75 * in_dram("cold", "clean-cold").latency_per_access


def test_dram_answers_sooner_than_mapped_host_memory(walk, in_dram, gpu_kernels, pinned_buffer, of_l2):
    """Every access crosses the link; skips where the device cannot map host memory."""
    on_host = walk(gpu_kernels.chase_onward, pinned_buffer(of_l2(1), "i4"), "mapped host memory")
    assert on_host.latency_per_access > 1.3 * in_dram("DRAM").latency_per_access
