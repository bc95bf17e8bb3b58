"""What only a real GPU can show: `pytest --gpumem tests/cuda`. On the simulated device these tests skip."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_gpumem import GpuBenchmark, MiB, Result
from pytest_gpumem.measuring.bound import Kernels

HERE = Path(__file__).parent
NBYTES = 64 * MiB


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Under xdist one worker has the GPU, so that tests do not measure beside each other (`--dist loadgroup`)."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.path.parent == HERE:
                item.add_marker(pytest.mark.xdist_group("gpu"))


@pytest.fixture(autouse=True)
def _real_gpu(request: pytest.FixtureRequest) -> None:
    # Asked for only here, so that without --gpumem the plugin's own skip comes first.
    if (
        "free_gpu" not in request.fixturenames
        and request.getfixturevalue("gpu_device").facts.simulated
    ):
        pytest.skip("needs a real GPU")


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that a worker's test starts are no workers: pytest-benchmark would be off in them."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture(scope="session")
def free_gpu(pytestconfig: pytest.Config) -> int:
    """For tests that start sessions on the GPU, which have it for themselves; the number of GPUs that CUDA may use. Skips without one, and
    under --gpumem: the session around would hold the GPU that those inside wait for."""
    if pytestconfig.pluginmanager.hasplugin("gpumem-session"):
        pytest.skip("starts sessions that have the GPU for themselves: run this without --gpumem")
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
        count = int(pynvml.nvmlDeviceGetCount())
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        pytest.skip(f"needs a GPU: {error}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(visible.split(",")))


@pytest.fixture
def scaled(
    gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> Callable[[], Result]:
    """Measures b = 2 c of the catalogue on 64 MiB arrays: what the same work by another library is compared with."""
    return lambda: gpu_benchmark(
        gpu_kernels.mul, device_buffer(NBYTES), device_buffer(NBYTES), 2.0, label="catalogue"
    )
