"""Anybody's kernels: the same scaling of 64 MiB by five libraries takes about what the catalogue's kernel takes, on the right stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pytest_gpumem import Case, MiB

NBYTES = 64 * MiB
SIZE = NBYTES // 4


def agrees(theirs: Any, ours: Any, at_most: float) -> bool:
    """Whether the time is a kernel's: a wrong stream reads an empty interval of a microsecond, a launch gap adds several times the work.

    `at_most` is how many times the catalogue's kernel it may take, which moves 16 bytes a thread at once: one word a thread takes half as
    long again on an H200, and CuPy's element-wise kernel two and a half times as long.
    """
    return bool(0.9 < theirs.latency / ours.latency < at_most)


def test_cupy(gpu_benchmark: Any, scaled: Callable[[], Any]) -> None:
    cupy = pytest.importorskip("cupy")

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cupy), memory.device(NBYTES, "f4", like=cupy)
        check = lambda: cupy.testing.assert_array_equal(y, 2 * x)  # noqa: E731
        return Case(lambda: cupy.multiply(x, np.float32(2), out=y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="cupy")
    assert agrees(result, scaled(), 3.0)
    assert result.sampler == "blocked"
    assert len(result.placements) >= 8


def test_torch(gpu_benchmark: Any, scaled: Callable[[], Any]) -> None:
    torch = pytest.importorskip("torch")

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(lambda: torch.mul(x, 2, out=y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="torch")
    assert agrees(result, scaled(), 1.3)
    assert result.sampler == "blocked"


def test_triton(gpu_benchmark: Any, scaled: Callable[[], Any]) -> None:
    torch = pytest.importorskip("torch")
    triton = pytest.importorskip("triton")
    from triton_kernels import scale

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4", like=torch), memory.device(NBYTES, "f4", like=torch)
        check = lambda: torch.testing.assert_close(y, 2 * x)  # noqa: E731
        return Case(lambda: scale[(triton.cdiv(SIZE, 1024),)](x, y, SIZE, BLOCK=1024), check=check, reads=[x], writes=[y])

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
    except (AttributeError, ImportError) as broken:  # numba-cuda 0.30 needs what NumPy 2.5 no longer has
        numba = pytest.importorskip("numba")
        pytest.skip(f"Numba {numba.__version__} fails with NumPy {np.__version__}: {broken}")
    return scale


def test_numba_on_the_default_stream(gpu_benchmark: Any, numba_scale: Any, scaled: Callable[[], Any]) -> None:
    """A launch without a stream goes to the default one: it is found and timed there."""
    cuda = pytest.importorskip("numba.cuda")

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cuda), memory.device(NBYTES, "f4", like=cuda)
        check = lambda: bool((y.copy_to_host() == 2 * x.copy_to_host()).all())  # noqa: E731
        return Case(lambda: numba_scale[SIZE // 256, 256](x, y), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="numba")
    assert agrees(result, scaled(), 1.8)
    assert (result.sampler, [n for n in result.notes if "stream" in n]) == (
        "blocked",
        ["timed on the legacy default stream, where it launches"],
    )


def test_numba_on_our_stream(gpu_benchmark: Any, numba_scale: Any, scaled: Callable[[], Any]) -> None:
    cuda = pytest.importorskip("numba.cuda")

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4", like=cuda), memory.device(NBYTES, "f4", like=cuda)
        stream = cuda.external_stream(memory.stream.handle)
        return Case(lambda: numba_scale[SIZE // 256, 256, stream](x, y), reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="numba")
    assert agrees(result, scaled(), 1.8)
    assert not [n for n in result.notes if "stream" in n]


def test_cuda_core(gpu_benchmark: Any, scaled: Callable[[], Any]) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device()
    device.set_current()
    source = 'extern "C" __global__ void scale(float const* x, float* y) { auto i = blockIdx.x * 256 + threadIdx.x; y[i] = 2 * x[i]; }'
    options = core.ProgramOptions(std="c++17", arch=f"sm_{device.arch}")
    kernel = core.Program(source, "c++", options=options).compile("cubin").get_kernel("scale")
    config = core.LaunchConfig(grid=SIZE // 256, block=256)

    def case(memory: Any) -> Case:
        x, y = memory.device(NBYTES, "f4"), memory.device(NBYTES, "f4")
        stream = device.create_stream(memory.stream)
        check = lambda: bool((y.read() == 2 * x.read()).all())  # noqa: E731
        return Case(lambda: core.launch(stream, config, kernel, x.address, y.address), check=check, reads=[x], writes=[y])

    result = gpu_benchmark.case(case, label="cuda.core")
    assert agrees(result, scaled(), 1.8)
    assert result.sampler == "blocked"
