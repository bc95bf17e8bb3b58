"""The operations themselves, in CuPy: these need a GPU."""

import pytest
from pixelbox import blend, brighten, channel
from pixelbox.layout import CHANNELS, place

from pytest_gpumem import Case

cupy = pytest.importorskip("cupy")

PIXELS = 1 << 25


@pytest.fixture(autouse=True)
def _on_a_gpu(gpu_device):
    if gpu_device.facts.simulated:
        pytest.skip("CuPy needs a GPU; test_patterns.py runs without one")


def test_brighten(gpu_benchmark):
    def case(memory):
        image, out = (memory.device((PIXELS,), "f4", like=cupy) for _ in range(2))
        return Case(
            lambda: brighten(out, image, 1.5),
            check=lambda: cupy.testing.assert_allclose(out, 1.5 * image),
            reads=[image],
            writes=[out],
        )

    gpu_benchmark.case(case)


def test_blend(gpu_benchmark):
    def case(memory):
        a, b, out = (memory.device((PIXELS,), "f4", like=cupy) for _ in range(3))
        return Case(
            lambda: blend(out, a, b, 0.25),
            check=lambda: cupy.testing.assert_allclose(
                out, a + 0.25 * (b - a), rtol=1e-5, atol=1e-6
            ),
            reads=[a, b],
            writes=[out],
        )

    gpu_benchmark.case(case)


def test_channel(gpu_benchmark):
    def case(memory):
        image = memory.device((CHANNELS * PIXELS,), "f4", like=cupy)
        out = memory.device((PIXELS,), "f4", like=cupy)
        first, step = place(2, PIXELS)
        wanted = image[first::step][:PIXELS]
        return Case(
            lambda: channel(out, image, 2),
            check=lambda: cupy.testing.assert_array_equal(out, wanted),
            reads=[wanted],
            writes=[out],
        )

    gpu_benchmark.case(case)
