"""What one launch ran, as CUPTI reports it: machine code, launches, copies and waits."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_gpumem import GpuBenchmark, Result
from pytest_gpumem.records.what_ran import WhatRan

SOURCE = 'extern "C" __global__ void work(const float* x, float* y) { int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = FACTOR * x[i]; }'
N = 2**20


@pytest.fixture
def cupy() -> Any:
    pytest.importorskip("cupti")
    return pytest.importorskip("cupy")


def ran(result: Result) -> WhatRan:
    found = result.measurement.what_ran
    assert found is not None
    assert found.not_watched is None
    return found


def test_the_steps_of_a_launch(gpu_benchmark: GpuBenchmark, cupy: Any) -> None:
    import numpy as np

    work = cupy.RawModule(code=SOURCE, options=("-DFACTOR=2.0f",)).get_function("work")
    x, y, host = cupy.ones(N, "f4"), cupy.empty(N, "f4"), np.empty(N, "f4")

    def launch() -> None:
        work((N // 256,), (256,), (x, y))
        cupy.asnumpy(y, out=host)
        cupy.cuda.get_current_stream().synchronize()

    found = ran(
        gpu_benchmark(launch, max_kernels=1, max_copies=1, max_copied_bytes=4 * N, max_spill=0)
    )
    (kernel,), (copy,) = (list(found.of(kind)) for kind in ("kernel", "copy"))
    assert (kernel.name, kernel.grid, kernel.block, kernel.window) == (
        "work",
        (N // 256, 1, 1),
        (256, 1, 1),
        None,
    )
    assert kernel.code is not None
    assert (kernel.registers or 0) > 0
    assert (copy.name, copy.source, copy.memory, copy.nbytes) == (
        "D2H",
        "device",
        "pageable",
        4 * N,
    )
    assert any(step.name == "stream" for step in found.of("synchronisation"))


def test_two_modules_with_a_kernel_of_one_name(gpu_benchmark: GpuBenchmark, cupy: Any) -> None:
    x, y = cupy.ones(N, "f4"), cupy.empty(N, "f4")
    functions = [
        cupy.RawModule(code=SOURCE, options=(f"-DFACTOR={factor}.0f",)).get_function("work")
        for factor in (5, 7)
    ]
    for work in functions:
        work((N // 256,), (256,), (x, y))
    records = [
        ran(gpu_benchmark(lambda work=work: work((N // 256,), (256,), (x, y)), label=str(number)))
        for number, work in enumerate((*functions, functions[0]))
    ]
    assert records[0] == records[2] != records[1]


def test_the_arguments_of_a_launch_and_of_a_graphs_node(
    gpu_benchmark: GpuBenchmark, cupy: Any
) -> None:
    source = """
    struct pair { char tag; const float* at; };
    extern "C" __global__ void told(float* x, pair p, long long n, float factor, int shift) {
        if (n < 0) x[shift] = factor + p.at[p.tag];
    }
    """
    import numpy as np

    told = cupy.RawModule(code=source).get_function("told")
    x = cupy.ones(64, "f4")
    pair = np.zeros(
        (),
        np.dtype(
            {"names": ["tag", "at"], "formats": ["i1", "u8"], "offsets": [0, 8], "itemsize": 16}
        ),
    )
    pair["tag"], pair["at"] = 7, x.data.ptr + 4

    def launch() -> None:
        told((1,), (32,), (x, pair, np.int64(N), np.float32(1.5), np.int32(-1)))

    launch()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    expected = ("device -", "7 0 device -", f"{N:x} 0", "3fc00000", "ffffffff")
    by_call = ran(gpu_benchmark(launch, label="call"))
    by_graph = ran(
        gpu_benchmark(lambda: graph.launch(cupy.cuda.get_current_stream()), label="graph")
    )
    assert [step.arguments for one in (by_call, by_graph) for step in one.of("kernel")] == [
        expected,
        expected,
    ]
