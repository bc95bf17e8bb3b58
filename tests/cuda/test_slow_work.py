"""Work of half a second is launched a few times, and a batch of slow hot launches is short."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem import Case, GpuBenchmark
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.spaces import Memory

SPIN = """extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long a, b;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)); } while (b - a < ns);
}"""


@pytest.mark.parametrize("case", [False, True])
@pytest.mark.parametrize("mode", ["clean-cold", "hot"])
def test_slow_work_is_launched_a_few_times(
    gpu_benchmark: GpuBenchmark, case: bool, mode: str
) -> None:
    cupy, np = pytest.importorskip("cupy"), pytest.importorskip("numpy")
    spin, launches = cupy.RawKernel(SPIN, "spin"), list[int]()

    def work() -> None:
        launches.append(1)
        spin((1,), (1,), (np.uint64(500_000_000),))

    def build(memory: Memory) -> Case:
        return Case(work, writes=[memory.device("1 MiB", "f4")])

    taken = gpu_benchmark.case(build, mode=mode) if case else gpu_benchmark(work, mode=mode)
    assert taken.latency == pytest.approx(0.5, rel=0.05)
    assert taken.sampler == ("batched" if mode == "hot" else "blocked")
    # The first, the look for its stream, the samples of each placement; one launch is watched.
    assert len(launches) <= (6 if case else 4)


def test_hot_launches_of_milliseconds_are_one_a_sample(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    to, source = device_buffer("1 MiB", "f4"), device_buffer("1 MiB", "f4")
    captured, capture, launch = list[int](), to.device.streams.capture, to.device.kernels.launch
    launched: list[int] = []

    def counted(*arguments: Any, **keywords: Any) -> None:
        launched.append(1)
        launch(*arguments, **keywords)

    def counting(*arguments: Any) -> Any:
        before = len(launched)
        graph = capture(*arguments)
        captured.append(len(launched) - before)
        return graph

    with pytest.MonkeyPatch.context() as patch:
        for part, name, counts in (
            (to.device.streams, "capture", counting),
            (to.device.kernels, "launch", counted),
        ):
            patch.setattr(part, name, counts)  # no result says how many launches a graph has
        taken = gpu_benchmark(gpu_kernels.reread, to, source, times=20_000, mode="hot")
    assert taken.latency > 2e-3
    assert taken.sampler == "graph"
    assert captured[-1] == 2  # the timed one, and one before that brings its placement into L2
