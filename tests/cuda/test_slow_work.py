"""Work of half a second is launched a few times, and a batch of slow hot launches is short."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem import Case

SPIN = """extern "C" __global__ void spin(unsigned long long ns) {
    unsigned long long a, b;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)); } while (b - a < ns);
}"""


@pytest.mark.parametrize("case", [False, True])
@pytest.mark.parametrize("mode", ["clean-cold", "hot"])
def test_slow_work_is_launched_a_few_times(gpu_benchmark: Any, case: bool, mode: str) -> None:
    cupy, np = pytest.importorskip("cupy"), pytest.importorskip("numpy")
    spin, launches = cupy.RawKernel(SPIN, "spin"), list[int]()

    def work() -> None:
        launches.append(1)
        spin((1,), (1,), (np.uint64(500_000_000),))

    def build(memory: Any) -> Case:
        return Case(work, writes=[memory.device("1 MiB", "f4")])

    taken = gpu_benchmark.case(build, mode=mode) if case else gpu_benchmark(work, mode=mode)
    assert taken.latency == pytest.approx(0.5, rel=0.05)
    assert len(launches) <= 7


def test_hot_launches_of_milliseconds_are_one_a_sample(gpu_benchmark: Any, gpu_kernels: Any, device_buffer: Any) -> None:
    to, source = device_buffer("1 MiB", "f4"), device_buffer("1 MiB", "f4")
    captured, capture = list[int](), to.device.graphs.capture
    launch = to.device.kernels.launch

    def counted(*arguments: Any, **keywords: Any) -> None:
        captured[-1:] = [captured[-1] + 1]
        launch(*arguments, **keywords)

    def counting(*arguments: Any) -> Any:
        captured.append(0)
        return capture(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(to.device.graphs, "capture", counting)
        captured.append(0)  # what is launched before the first capture
        patch.setattr(to.device.kernels, "launch", counted)
        taken = gpu_benchmark(gpu_kernels.reread, to, source, times=20_000, mode="hot")
    assert taken.latency > 2e-3
    assert taken.sampler == "batched"
    assert captured[-1] == 2  # the timed one, and one before that brings its placement into L2
