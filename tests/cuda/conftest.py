"""What only a real GPU can show: `pytest --gpumem tests/cuda`. On the simulated device these tests skip."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem import MiB

NBYTES = 64 * MiB


@pytest.fixture(autouse=True)
def _real_gpu(request: pytest.FixtureRequest) -> None:
    # Asked for only here, so that without --gpumem the plugin's own skip comes first.
    if request.getfixturevalue("gpu_device").facts.simulated:
        pytest.skip("needs a real GPU")


@pytest.fixture
def scaled(gpu_benchmark: Any, gpu_kernels: Any, device_buffer: Any) -> Callable[[], Any]:
    """Measures b = 2 c of the catalogue on 64 MiB arrays: what the same work by another library is compared with."""
    return lambda: gpu_benchmark(gpu_kernels.mul, device_buffer(NBYTES), device_buffer(NBYTES), 2.0, label="catalogue")
