"""Anybody's kernels: the same scaling of 64 MiB by five libraries takes about what the catalogue's kernel takes, on the right stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_gpumem import Case, GpuBenchmark, MiB, Result
from pytest_gpumem.measuring.bound import Kernels
from pytest_gpumem.memory.spaces import Memory

NBYTES = 64 * MiB
SIZE = NBYTES // 4


def agrees(theirs: Result, ours: Result, at_most: float) -> bool:
    """Whether the time is a kernel's: a wrong stream reads an empty interval of a microsecond, a launch gap adds several times the work.

    `at_most` is how many times the catalogue's kernel it may take, which moves 16 bytes a thread at once: one word a thread takes half as
    long again on an H200, and CuPy's element-wise kernel two and a half times as long.
    """
    return bool(0.9 < theirs.latency / ours.latency < at_most)


def test_cupy(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    cupy = pytest.importorskip("cupy")

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cupy), memory.device(NBYTES, "f4", like=cupy)
        check = lambda: cupy.testing.assert_array_equal(y, 2 * x)  # noqa: E731
        return Case(
            lambda: cupy.multiply(x, np.float32(2), out=y), check=check, reads=[x], writes=[y]
        )

    result = gpu_benchmark.case(case, label="cupy")
    assert agrees(result, scaled(), 3.0)
    assert result.sampler == "blocked"
    assert len(result.measurement.placements) >= 8


def test_torch(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    torch = pytest.importorskip("torch")

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(lambda: torch.mul(x, 2, out=y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="torch")
    assert agrees(result, scaled(), 1.3)
    assert result.sampler == "blocked"


def test_triton(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    from triton_kernels import scale

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(
            lambda: scale[(triton.cdiv(SIZE, 1024),)](x, y, SIZE, BLOCK=1024),
            check=check,
            reads=[x],
            writes=[y],
        )

    result = gpu_benchmark.case(case, label="triton")
    assert agrees(result, scaled(), 1.3)
    assert result.sampler == "blocked"


@pytest.fixture
def numba_scale() -> Any:
    cuda = pytest.importorskip("numba.cuda")

    @cuda.jit
    def scale(x: Any, y: Any) -> None:
        i = cuda.grid(1)
        if i < x.size:
            y[i] = np.float32(2) * x[i]

    one = cuda.to_device(np.zeros(1, "f4"))
    try:
        scale[SIZE // 256, 256](one, one)
    except (
        AttributeError,
        ImportError,
    ) as broken:  # numba-cuda 0.30 needs what NumPy 2.5 no longer has
        numba = pytest.importorskip("numba")
        pytest.skip(f"Numba {numba.__version__} fails with NumPy {np.__version__}: {broken}")
    return scale


def test_numba_on_the_default_stream(
    gpu_benchmark: GpuBenchmark, numba_scale: Any, scaled: Callable[[], Result]
) -> None:
    """A launch without a stream goes to the default one: it is found and timed there."""
    cuda = pytest.importorskip("numba.cuda")

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cuda), memory.device(NBYTES, "f4", like=cuda)
        check = lambda: bool((y.copy_to_host() == 2 * x.copy_to_host()).all())  # noqa: E731
        return Case(lambda: numba_scale[SIZE // 256, 256](x, y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="numba")
    assert agrees(result, scaled(), 1.8)
    assert (result.sampler, [n for n in result.notes if n.startswith("timed on")]) == (
        "blocked",
        ["timed on the legacy default stream, where it launches"],
    )


def test_numba_on_our_stream(
    gpu_benchmark: GpuBenchmark, numba_scale: Any, scaled: Callable[[], Result]
) -> None:
    cuda = pytest.importorskip("numba.cuda")

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cuda), memory.device(NBYTES, "f4", like=cuda)
        stream = cuda.external_stream(memory.stream.handle)
        return Case(lambda: numba_scale[SIZE // 256, 256, stream](x, y), reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="numba")
    assert agrees(result, scaled(), 1.8)
    assert not [n for n in result.notes if n.startswith("timed on")]


def test_cuda_core(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    source = 'extern "C" __global__ void scale(float const* x, float* y) { auto i = blockIdx.x * 256 + threadIdx.x; y[i] = 2 * x[i]; }'
    options = core.ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    kernel = core.Program(source, "c++", options=options).compile("cubin").get_kernel("scale")
    config = core.LaunchConfig(grid=SIZE // 256, block=256)

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4"), memory.device(NBYTES, "f4")
        stream = device.create_stream(memory.stream)
        check = lambda: bool((y.read() == 2 * x.read()).all())  # noqa: E731
        return Case(
            lambda: core.launch(stream, config, kernel, x.address, y.address),
            check=check,
            reads=[x],
            writes=[y],
        )

    result = gpu_benchmark.case(case, label="cuda.core")
    assert agrees(result, scaled(), 1.8)
    assert result.sampler == "blocked"


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # Inductor imports what PyTorch itself calls deprecated
def test_torch_compile(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    """The kernel that Inductor makes; it is compiled before anything is timed."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")

    def scale(x: Any, y: Any) -> None:
        y.copy_(2 * x)

    compiled = torch.compile(scale)

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(lambda: compiled(x, y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="torch.compile")
    assert agrees(result, scaled(), 1.3)


def test_a_cuda_graph_of_torch(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    """A replay goes to the current stream, whatever stream the graph was captured on."""
    torch = pytest.importorskip("torch")

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        torch.mul(x, 2, out=y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.mul(x, 2, out=y)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(graph.replay, check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="CUDA graph")
    assert agrees(result, scaled(), 1.3)
    assert not [n for n in result.notes if n.startswith("timed on")]


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    """JAX where it has a GPU, told not to take most of its memory."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    if jax.default_backend() not in ("gpu", "cuda"):
        pytest.skip(
            f"JAX {jax.__version__} sees no GPU here: its backend is {jax.default_backend()}"
        )
    return jax


def test_jax(gpu_benchmark: GpuBenchmark, jax: Any, scaled: Callable[[], Result]) -> None:
    """JAX queues from a thread of its own, on a stream of its own: the launch waits, and is timed by the host's clock."""
    double = jax.jit(lambda x: 2 * x)

    def case(memory: Memory) -> Case:
        x = memory.device(NBYTES, "f4", like=jax)
        results: list[Any] = [None]

        def launch() -> None:
            results[0] = double(x).block_until_ready()

        return Case(
            launch, check=lambda: bool((results[0] == 2 * x).all()), reads=[x], moved=2 * NBYTES
        )

    result = gpu_benchmark.case(case, label="jax")
    assert (
        result.latency > 0.9 * scaled().latency
    )  # how much longer depends on the host, which dispatches
    assert result.measurement.checked


def test_warp(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    """Warp follows our stream as its current one."""
    warp = pytest.importorskip("warp")
    from warp_kernels import scale

    warp.init()

    def case(memory: Memory) -> Case:
        x, y = memory.device(NBYTES, "f4", like=warp), memory.device(NBYTES, "f4", like=warp)
        check = lambda: bool((y.numpy() == 2 * x.numpy()).all())  # noqa: E731
        return Case(
            lambda: warp.launch(scale, dim=SIZE, inputs=[x, y], device=x.device),
            check=check,
            reads=[x],
            writes=[y],
        )

    result = gpu_benchmark.case(case, label="warp")
    assert agrees(result, scaled(), 1.8)
    assert not [n for n in result.notes if n.startswith("timed on")]


def test_cudf(gpu_benchmark: GpuBenchmark, scaled: Callable[[], Result]) -> None:
    cudf = pytest.importorskip("cudf")

    def case(memory: Memory) -> Case:
        x = memory.device(NBYTES, "f4", like=cudf)
        results: list[Any] = [None]

        def launch() -> None:
            results[0] = x * 2

        return Case(launch, check=lambda: bool((results[0] == 2 * x).all()), moved=2 * NBYTES)

    result = gpu_benchmark.case(case, label="cudf")
    assert result.latency > 0.9 * scaled().latency


def test_memory_of_a_pool(
    gpu_benchmark: GpuBenchmark,
    gpu_kernels: Kernels,
    pooled_buffer: Any,
    memory_kind: Any,
    scaled: Callable[[], Result],
) -> None:
    """The driver's stream-ordered pool: as fast as memory by cudaMalloc, and device memory to the driver."""
    ours = scaled()
    x, y = pooled_buffer(NBYTES), pooled_buffer(NBYTES)
    assert memory_kind(x) == "device"
    assert agrees(gpu_benchmark(gpu_kernels.mul, y, x, 2.0, label="pool"), ours, 1.1)
