"""Latency of dependent accesses: a pointer chase that stays in L2 against one that always goes to DRAM."""

from __future__ import annotations

import pytest


def chased(gpu_benchmark, gpu_kernels, device_buffer, nbytes, label):
    nodes, out = device_buffer(nbytes, "i4"), device_buffer((1,), "i4")
    return gpu_benchmark(gpu_kernels.chase, nodes, out, 2000, label=label)


@pytest.mark.gpumem(mode="hot", placements=4)
def test_l2_answers_sooner_than_dram(gpu_benchmark, gpu_kernels, device_buffer, of_l2):
    """Hot, a quarter of L2 is all in L2; of four times L2 a short walk finds next to nothing there."""
    in_l2 = chased(gpu_benchmark, gpu_kernels, device_buffer, of_l2(0.02), label="in L2")
    in_dram = chased(gpu_benchmark, gpu_kernels, device_buffer, of_l2(4), label="in DRAM")
    assert in_dram.latency_per_access > 1.3 * in_l2.latency_per_access
