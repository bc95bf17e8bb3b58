"""Wall-clock times contain the launch and the wait, and little of the harness."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest


def test_the_hosts_clock_adds_little(gpu_benchmark: Any, gpu_device: Any) -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1024, device="cuda")

    def work() -> None:
        x.add_(1)
        torch.cuda.synchronize()

    def by_hand() -> float:
        gpu_device.streams.synchronize()
        begun = time.perf_counter()
        work()
        gpu_device.streams.synchronize()
        return time.perf_counter() - begun

    for _ in range(100):
        by_hand()
    hand = statistics.median(by_hand() for _ in range(500))
    taken = gpu_benchmark(work, mode="hot").measurement
    assert taken.sampler == "host"
    assert taken.latency - hand < 3e-6
