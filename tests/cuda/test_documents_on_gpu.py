"""Every Python example of the documentation on a GPU, with the libraries that are installed, all in one session."""

from __future__ import annotations

import numpy as np
import pytest
from document_blocks import blocks

SCALE = 'extern "C" __global__ void scale(const float* x, float* y) { int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = 2 * x[i]; }\n'
"""The file that an example reads."""
pytestmark = pytest.mark.usefixtures("free_gpu")


def test_all_run(pytester: pytest.Pytester) -> None:
    for block in blocks("python"):
        if block.is_test and not block.marker.startswith("file: "):
            (pytester.path / f"{block.module}.py").write_text(
                "\n" * block.line + block.code, encoding="utf-8"
            )
        elif block.code.startswith("# "):
            (pytester.path / block.code.partition("\n")[0].removeprefix("# ")).write_text(
                block.code, encoding="utf-8"
            )
    (pytester.path / "kernels.cu").write_text(SCALE)
    options = (
        "--gpumem",
        "--gpumem-device",
        "cuda",
        "--gpumem-budget",
        "0.1 s",
        "--benchmark-disable",
        "-p",
        "no:cacheprovider",
        "-rs",
    )
    # numba-cuda 0.30 needs what NumPy 2.5 no longer has
    working = () if hasattr(np, "row_stack") else ("-k", "not numba")
    result = pytester.runpytest_subprocess(*options, *working, "-W", "default")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    assert result.parseoutcomes()["passed"] >= 20
