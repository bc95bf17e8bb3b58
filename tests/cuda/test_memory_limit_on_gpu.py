"""`--gpumem-memory-limit` on a GPU: a training step of PyTorch passes or fails as on a smaller card, and the card is free afterwards."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from pytest_gpumem import GiB, MiB

pytestmark = pytest.mark.usefixtures("free_gpu")

STEP = """
import gc

import pytest

torch = pytest.importorskip("torch")

GIB = 2**30


@pytest.mark.parametrize("gib", [1, 11])
def test_step(gib):
    '''Weights, their gradient, and two states of Adam, each a quarter of the memory, without the context.'''
    size = (gib * GIB - 700 * 2**20) // 4 // 4
    weights = torch.nn.Parameter(torch.zeros(size, device="cuda"))
    optimizer = torch.optim.Adam([weights], fused=True)
    weights.sum().backward()
    optimizer.step()
    torch.cuda.synchronize()


def test_the_next_one_has_the_memory():
    gc.collect()
    torch.cuda.empty_cache()
    torch.zeros(2 * GIB, dtype=torch.uint8, device="cuda")


def test_of_the_catalogue(gpu_benchmark, gpu_kernels, device_buffer):
    gc.collect()
    torch.cuda.empty_cache()
    gpu_benchmark(gpu_kernels.triad, *(device_buffer("64 MiB") for _ in range(3)), 3.0)
"""


def free_bytes() -> int:
    """Without a context of this process."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free)
    finally:
        pynvml.nvmlShutdown()


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess(
        "--gpumem", "--gpumem-device=cuda:0", "-p", "no:cacheprovider", *arguments, timeout=240
    )


@pytest.mark.skipif(
    find_spec("torch") is None, reason="needs PyTorch"
)  # imported here, pytester would forget it
def test_a_training_step_of_11_gib_passes_at_12_and_fails_at_10(pytester: pytest.Pytester) -> None:
    before = free_bytes()
    if before < 14 * GiB:
        pytest.skip("needs 14 GiB of free memory")
    pytester.makepyfile(STEP)
    run(pytester, "--gpumem-memory-limit=12GiB").assert_outcomes(passed=4)
    result = run(pytester, "--gpumem-memory-limit=10GiB")
    result.assert_outcomes(passed=3, failed=1)
    (line,) = [
        line
        for line in result.outlines
        if "out of memory at a limit of 10 GiB" in line and "::" in line
    ]
    assert "test_step[11]" in line
    found = re.search(r"a peak of ([0-9.]+) GiB", line)
    assert found is not None, line
    assert 10 < float(found[1]) < 13
    assert abs(free_bytes() - before) < 256 * MiB


@pytest.mark.parametrize("library", ["cupy", "driver"])
def test_any_library_is_refused_what_a_smaller_card_lacks(
    pytester: pytest.Pytester, library: str
) -> None:
    allocate = {
        "cupy": "import cupy; kept = [cupy.zeros(2**30, dtype='u1') for _ in range({})]",
        "driver": "from cupy.cuda import runtime; kept = [runtime.malloc(2**30) for _ in range({})]",
    }[library]
    pytester.makepyfile(
        f"def test_fits():\n    {allocate.format(2)}\ndef test_does_not():\n    {allocate.format(6)}\n"
    )
    result = run(pytester, "--gpumem-memory-limit=6GiB")
    result.assert_outcomes(passed=1, failed=1)
    assert any("out of memory at a limit of 6 GiB" in line for line in result.outlines)


def test_a_limit_below_the_context_is_one_line(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(): pass")
    result = run(pytester, "--gpumem-memory-limit=64MiB")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.errlines if line.strip()]
    assert "context" in line
