"""Latency of dependent accesses: a pointer chase whose nodes are in L2 against one that always goes to DRAM."""

from __future__ import annotations

STEPS = 2000
"""Far fewer than there are nodes, so that a cold walk meets no line twice."""


def test_l2_answers_sooner_than_dram(gpu_benchmark, gpu_kernels, device_buffer, of_l2):
    """Hot, the walk's few nodes are in L2 since the walk before; cold, over four times L2, none of them is."""
    nodes, out = device_buffer(of_l2(4), "i4"), device_buffer((1,), "i4")
    in_l2 = gpu_benchmark(gpu_kernels.chase, nodes, out, STEPS, mode="hot", label="L2")
    in_dram = gpu_benchmark(gpu_kernels.chase, nodes, out, STEPS, mode="clean-cold", label="DRAM")
    assert in_dram.latency_per_access > 1.3 * in_l2.latency_per_access
