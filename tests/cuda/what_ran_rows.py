"""Rows for `test_what_ran_in_processes.py`: each is measured twice in one test, as `base` and with a change, or several times without one.

Run by pytest in processes of their own. A test's name says what it changes; its measurements are labelled. Where the record of what ran
must not change, the labels end in "same".
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pytest_gpumem import GpuBenchmark
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.spaces import Memory

N = 2**20
BLOCK = 256
SOURCE = r"""
#ifdef LDG
#define LOAD(p, i) __ldg(p + i)
#else
#define LOAD(p, i) p[i]
#endif
extern "C" __global__ void work(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = FACTOR * expf(LOAD(x, i)) / (LOAD(x, i) + 1.0f);
}
"""
PLAIN = ("-DFACTOR=2.0f",)


def launcher(
    cupy: Any,
    source: str = SOURCE,
    options: tuple[str, ...] = PLAIN,
    block: int = BLOCK,
    name: str = "work",
) -> Any:
    """A function that launches the kernel, compiled with these options, on the current stream."""
    kernel = cupy.RawModule(code=source.replace("work(", f"{name}("), options=options).get_function(
        name
    )
    x, y = cupy.ones(N, "f4"), cupy.empty(N, "f4")

    def launch() -> None:
        kernel((N // block,), (block,), (x, y, np.int32(N)))

    launch()
    return launch


COMPILED = {
    "-O1": (SOURCE, (*PLAIN, "--ptxas-options=-O1"), BLOCK),
    "block": (SOURCE, PLAIN, 128),
    "__ldg": (SOURCE, (*PLAIN, "-DLDG"), BLOCK),
    "a constant": (SOURCE, ("-DFACTOR=3.0f",), BLOCK),
    "--use_fast_math": (SOURCE, (*PLAIN, "--use_fast_math"), BLOCK),
    "a comment, same": (f"// another comment\n\n\n{SOURCE}", PLAIN, BLOCK),
    "line information, same": (SOURCE, (*PLAIN, "-lineinfo"), BLOCK),
    "another line, same": (f'#line 77 "/elsewhere/kernel.cu"\n{SOURCE}', PLAIN, BLOCK),
    "a rebuild, same": (SOURCE, (*PLAIN, "-DNOTHING=1"), BLOCK),
}


@pytest.mark.parametrize("change", COMPILED)
def test_compiled(gpu_benchmark: GpuBenchmark, change: str) -> None:
    cupy = pytest.importorskip("cupy")
    gpu_benchmark(launcher(cupy), label="base")
    gpu_benchmark(launcher(cupy, *COMPILED[change]), label=change)


def test_another_stream(gpu_benchmark: GpuBenchmark) -> None:
    cupy = pytest.importorskip("cupy")
    first, second = launcher(cupy), launcher(cupy)
    beside = cupy.cuda.Stream(non_blocking=True)

    def one_stream() -> None:
        first()
        second()

    def two_streams() -> None:
        current = cupy.cuda.get_current_stream()
        first()
        beside.wait_event(current.record())
        with beside:
            second()
        current.wait_event(beside.record())

    gpu_benchmark(one_stream, label="base")
    gpu_benchmark(two_streams, label="another stream")


def test_an_extra_synchronisation(gpu_benchmark: GpuBenchmark) -> None:
    cupy = pytest.importorskip("cupy")
    launch = launcher(cupy)

    def waits() -> None:
        launch()
        cupy.cuda.get_current_stream().synchronize()

    gpu_benchmark(launch, label="base")
    gpu_benchmark(waits, label="an extra synchronisation")


def test_a_pageable_copy(
    gpu_benchmark: GpuBenchmark,
    gpu_kernels: Kernels,
    device_buffer: Any,
    pinned_buffer: Any,
    pageable_buffer: Any,
) -> None:
    gpu_benchmark(gpu_kernels.memcpy, device_buffer(4 * N), pinned_buffer(4 * N), label="base")
    gpu_benchmark(
        gpu_kernels.memcpy, device_buffer(4 * N), pageable_buffer(4 * N), label="a pageable copy"
    )


def test_a_removed_window(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any, persisting_stream: Any
) -> None:
    x, y = device_buffer(4 * N, "f4"), device_buffer(4 * N, "f4")
    with persisting_stream(x) as stream:
        gpu_benchmark(gpu_kernels.copy, y, x, stream=stream, label="base")
    gpu_benchmark(gpu_kernels.copy, y, x, label="a removed window")


def test_removed_advice(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, prefetched_buffer: Any
) -> None:
    x, y = prefetched_buffer(4 * N, "f4"), prefetched_buffer(4 * N, "f4")
    x.advise(read_mostly=True)
    gpu_benchmark(gpu_kernels.add, x, y, label="base")
    x.advise(read_mostly=False)
    gpu_benchmark(gpu_kernels.add, x, y, label="removed advice")


def test_cupy(gpu_benchmark: GpuBenchmark) -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.ones(N, "f4")
    y = cupy.empty(N, "f4")
    gpu_benchmark(lambda: cupy.multiply(x, np.float32(2), out=y), label="multiply")
    gpu_benchmark(lambda: cupy.add(x, y, out=y), label="add")
    gpu_benchmark(lambda: cupy.sum(x), label="sum")
    gpu_benchmark(lambda: cupy.sum(x.reshape(1024, -1), axis=0), label="sum of columns")
    gpu_benchmark(lambda: cupy.sort(x), label="sort")
    gpu_benchmark(lambda: cupy.matmul(x.reshape(1024, -1), y.reshape(-1, 1024)), label="matmul")
    gpu_benchmark(
        lambda: x.reshape(1024, -1)[:, ::2] + y.reshape(1024, -1)[:1, ::2], label="broadcast"
    )
    gpu_benchmark(launcher(cupy), label="raw kernel")


def test_torch(gpu_benchmark: GpuBenchmark) -> None:
    torch = pytest.importorskip("torch")
    x = torch.ones(1024, 1024, device="cuda")
    y = torch.empty_like(x)
    gpu_benchmark(lambda: torch.mul(x, 2, out=y), label="mul")
    gpu_benchmark(lambda: torch.softmax(x, 1), label="softmax")
    gpu_benchmark(lambda: torch.matmul(x, x, out=y), label="matmul")
    gpu_benchmark(x.sum, label="sum")
    gpu_benchmark(lambda: x.sum(0), label="sum of columns")
    gpu_benchmark(lambda: torch.sort(x), label="sort")
    gpu_benchmark(lambda: x[:, ::2] + x[:1, ::2], label="broadcast")
    gpu_benchmark(lambda: torch.nn.functional.layer_norm(x, (1024,)), label="layer_norm")
    layer = torch.nn.Linear(1024, 1024, device="cuda")

    def step() -> None:
        layer(x).relu().sum().backward()
        layer.zero_grad(set_to_none=False)

    gpu_benchmark(step, label="training step")


def test_triton(gpu_benchmark: GpuBenchmark) -> None:
    torch, triton = pytest.importorskip("torch"), pytest.importorskip("triton")
    from what_ran_triton import scale

    x = torch.ones(N, device="cuda")
    y = torch.empty_like(x)

    def launch(warps: int) -> None:
        scale[(triton.cdiv(N, 1024),)](x, y, N, BLOCK=1024, num_warps=warps)

    launch(4)
    launch(8)
    gpu_benchmark(lambda: launch(4), label="base")
    gpu_benchmark(lambda: launch(8), label="num_warps")


SCALED = r"""
extern "C" __global__ void scaled(const float* x, float* y, long long n, float factor) {
    for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) y[i] = factor * x[i];
}
"""
MORE = N + N // 32  # elements of a launch that takes 3 % longer


def scalar_raw_kernel(elements: int) -> Any:
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(SCALED.replace("scaled(", "scaled_raw("), "scaled_raw")
    x, y = cupy.ones(MORE, "f4"), cupy.empty(MORE, "f4")
    return lambda: kernel((132,), (BLOCK,), (x, y, np.int64(elements), np.float32(2)))


def scalar_raw_module(elements: int, name: str = "scaled_module") -> Any:
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawModule(code=SCALED.replace("scaled(", f"{name}(")).get_function(name)
    x, y = cupy.ones(MORE, "f4"), cupy.empty(MORE, "f4")
    return lambda: kernel((132,), (BLOCK,), (x, y, np.int64(N), np.float32(elements)))


def scalar_triton(elements: int) -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from what_ran_triton import scale

    x, y = torch.ones(MORE, device="cuda"), torch.empty(MORE, device="cuda")
    return lambda: scale[(MORE // 1024,)](x, y, elements, BLOCK=1024)


def scalar_torch(elements: int) -> Any:
    torch = pytest.importorskip("torch")
    x, y = torch.ones(N, device="cuda"), torch.empty(N, device="cuda")
    return lambda: torch.mul(x, float(elements), out=y)


def scalar_graph(elements: int) -> Any:
    cupy = pytest.importorskip("cupy")
    launch = scalar_raw_module(elements, "scaled_graph")
    launch()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        launch()
        graph = stream.end_capture()
    return lambda: graph.launch(cupy.cuda.get_current_stream())


def scalar_torch_graph(elements: int) -> Any:
    torch = pytest.importorskip("torch")
    work, graph = scalar_torch(elements), torch.cuda.CUDAGraph()
    work()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


SCALARS = {
    "raw kernel": scalar_raw_kernel,
    "raw module": scalar_raw_module,
    "triton": scalar_triton,
    "torch": scalar_torch,
    "graph": scalar_graph,
    "torch graph": scalar_torch_graph,
}


@pytest.mark.parametrize("kind", SCALARS)
def test_scalar(gpu_benchmark: GpuBenchmark, kind: str) -> None:
    gpu_benchmark(SCALARS[kind](N), label="base")
    gpu_benchmark(SCALARS[kind](N), label="the arguments of base, same")
    gpu_benchmark(SCALARS[kind](MORE), label="a scalar argument")


def test_numba(gpu_benchmark: GpuBenchmark) -> None:
    try:
        from numba import cuda

        @cuda.jit
        def add(x: Any, y: Any) -> None:
            i = cuda.grid(1)
            if i < x.size:
                y[i] = x[i] + 1

        x = cuda.to_device(np.ones(N, "f4"))
        add[N // 256, 256](x, x)
    except Exception as broken:  # a Numba that does not fit this NumPy
        pytest.skip(f"Numba does not run: {broken}")
    gpu_benchmark(lambda: add[N // 256, 256](x, x), label="numba")


def test_cuda_core(gpu_benchmark: GpuBenchmark) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    from pytest_gpumem import Case

    source = 'extern "C" __global__ void work(float const* x, float* y) { auto i = blockIdx.x * 256 + threadIdx.x; y[i] = FACTOR * x[i]; }'
    config = core.LaunchConfig(grid=N // 256, block=256)

    def kernel(factor: str) -> Any:
        options = core.ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
        return (
            core.Program(source.replace("FACTOR", factor), "c++", options=options)
            .compile("cubin")
            .get_kernel("work")
        )

    def build(kernel: Any) -> Any:
        def case(memory: Memory) -> Case:
            x, y = memory.device(4 * N, "f4"), memory.device(4 * N, "f4")
            stream = device.create_stream(memory.stream)
            return Case(
                lambda: core.launch(stream, config, kernel, x.address, y.address),
                reads=[x],
                writes=[y],
            )

        return case

    # Two kernels of one name in two libraries, both loaded before either is measured.
    two, three = kernel("2"), kernel("3")
    gpu_benchmark.case(build(two), label="base")
    gpu_benchmark.case(build(three), label="another kernel of that name")


def test_catalogue(gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any) -> None:
    a, b, c = (device_buffer(4 * N, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0, label="triad")
    gpu_benchmark(gpu_kernels.copy, a, b, label="copy")
    gpu_benchmark(gpu_kernels.mul, a, b, 3.0, label="mul")
    gpu_benchmark(gpu_kernels.copy, a, b, mode="hot", label="copy, hot")


def test_graph(gpu_benchmark: GpuBenchmark) -> None:
    cupy = pytest.importorskip("cupy")
    launch = launcher(cupy, name="in_graph")  # kernels of a graph are found by their names
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        launch()
        launch()
        graph = stream.end_capture()
    gpu_benchmark(
        lambda: graph.launch(cupy.cuda.get_current_stream()), label="graph of two kernels"
    )
