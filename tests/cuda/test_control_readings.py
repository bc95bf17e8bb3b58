"""Control readings of a real device: they agree with themselves, and are of what they are named for."""

from __future__ import annotations

import statistics
from typing import Any

from pytest_gpumem import GpuBenchmark
from pytest_gpumem.judging.drift import LIMITS
from pytest_gpumem.kernels.controls import whole_waves
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.measuring.controls import (
    DRAM_MULTIPLES,
    L2_PART,
    L2_PASSES,
    changed,
    read_controls,
)


def test_two_readings_agree_within_what_is_taken_for_a_drift(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    warm = device_buffer(1 << 20)
    gpu_benchmark(gpu_kernels.copy, warm, device_buffer(1 << 20))  # the clocks are up from here on
    device = warm.device
    pairs = [changed(read_controls(device), read_controls(device)) for _ in range(5)]
    for kind, share in (("dram", 0.5), ("l2", 0.75)):
        assert statistics.median(abs(pair[kind]) for pair in pairs) < share * LIMITS[kind], kind


def test_the_latency_of_dram_is_far_steadier_than_what_sets_cards_apart(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    warm = device_buffer(1 << 20)
    gpu_benchmark(gpu_kernels.copy, warm, device_buffer(1 << 20))
    found = [
        latency for _ in range(5) if (latency := read_controls(warm.device).latency) is not None
    ]
    assert len(found) == 5
    assert all(200e-9 < latency < 1200e-9 for latency in found)
    assert max(found) < (1 + LIMITS["latency"] / 2) * min(found)


def test_each_reading_is_of_its_memory(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    warm = device_buffer(1 << 20)
    gpu_benchmark(gpu_kernels.copy, warm, device_buffer(1 << 20))
    facts, controls = warm.device.facts, read_controls(warm.device)
    assert controls.dram is not None
    assert controls.l2 is not None
    of_dram = DRAM_MULTIPLES * facts.l2_bytes / controls.dram
    # What L2 still holds of the array before may add a quarter.
    assert 0.6 * facts.dram_peak < of_dram < 1.25 * facts.dram_peak
    assert L2_PASSES * whole_waves(facts, facts.l2_bytes // L2_PART) / controls.l2 > of_dram
