"""Eight operations as a suite of pytest-benchmark has them, each also timed by the timers of the libraries (`adopted_times.py`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import cupy
import pytest
import torch
from cupyx.profiler import benchmark as cupy_benchmark

N = 1 << 24


def _torch(*shape: int) -> Any:
    return torch.rand(*shape, device="cuda")


def _layer_norm() -> Callable[[], object]:
    x = _torch(4096, 8192)
    return lambda: torch.nn.functional.layer_norm(x, (8192,))


def _softmax() -> Callable[[], object]:
    x = _torch(4096, 8192)
    return lambda: torch.softmax(x, -1)


def _matmul() -> Callable[[], object]:
    a = _torch(2048, 2048)
    return lambda: a @ a


def _small() -> Callable[[], object]:
    x = _torch(1024)
    return lambda: x + 1


def _add() -> Callable[[], object]:
    a, b = (cupy.ones(N, dtype="f4") for _ in range(2))
    return lambda: a + b


def _sum() -> Callable[[], object]:
    a = cupy.ones(N, dtype="f4")
    return lambda: cupy.sum(a)


def _sort() -> Callable[[], object]:
    a = cupy.random.random(1 << 20, dtype="f4")
    return lambda: cupy.sort(a)


def _scale() -> Callable[[], object]:
    a, out = cupy.ones(1 << 20, dtype="f4"), cupy.empty(1 << 20, dtype="f4")
    return lambda: cupy.multiply(a, 2, out=out)


OPERATIONS = {"layer_norm": _layer_norm, "softmax": _softmax, "matmul": _matmul, "small": _small}
OPERATIONS |= {"add": _add, "sum": _sum, "sort": _sort, "scale": _scale}


def peers(work: Callable[[], object], *, hot: bool) -> dict[str, float]:
    """Seconds of one call by the timers of the libraries."""
    if not hot:
        from triton.testing import do_bench

        return {"triton.testing.do_bench": do_bench(work, return_mode="median") * 1e-3}
    from torch.utils.benchmark import Timer

    found = {
        "torch.utils.benchmark": float(
            Timer("work()", globals={"work": work}).blocked_autorange(min_run_time=0.2).median
        )
    }
    times = cupy_benchmark(work, n_repeat=100, n_warmup=10).gpu_times[0]
    return found | {"cupyx.profiler.benchmark": statistics.median(map(float, times))}


def adopted(benchmark: Any, operation: str, *, hot: bool) -> None:
    """Let `benchmark` call an operation, and keep what the libraries' timers say of it."""
    work = OPERATIONS[operation]()
    benchmark(work)
    benchmark.extra_info["peers"] = peers(work, hot=hot)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.gpumem(mode="hot")
def test_hot(benchmark: Any, operation: str) -> None:
    adopted(benchmark, operation, hot=True)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.gpumem(mode="dirty-cold")
def test_dirty_cold(benchmark: Any, operation: str) -> None:
    adopted(benchmark, operation, hot=False)
