"""A test for each kernel of the catalogue, on arrays that no cache holds: what `catalogue_traffic.py` counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from pytest_gpumem import GpuBenchmark, KiB, MiB
from pytest_gpumem.kernels.catalogue import CATALOGUE
from pytest_gpumem.kernels.l2_bandwidth import TILE_BYTES
from pytest_gpumem.kernels.stream import tile_bytes
from pytest_gpumem.measuring.bound import Kernels

SIZE = 256 * MiB
"""Bytes of each large array."""
TABLE, SHARED_TABLE = 8 * MiB, 32 * KiB
STEPS = 20_000
"""Of a pointer chase: one after the other, so a launch of as many as there are nodes would take seconds."""
SIDE = math.isqrt(SIZE // 4) // 32 * 32
"""Of a square matrix that is as large, or nearly, and of whole tiles."""

Make = Callable[..., Any]
"""Allocates device memory: bytes and element type."""
Call = tuple[tuple[Any, ...], dict[str, Any]]


def _arrays(count: int, *scalars: Any, **options: Any) -> Callable[[Make], Call]:
    return lambda make: ((*(make(SIZE, "f4") for _ in range(count)), *scalars), options)


def _square(make: Make) -> Call:
    return (make(4 * SIDE**2, "f4"), make(4 * SIDE**2, "f4"), SIDE, SIDE), {}


def _summed(name: str, sources: int) -> Callable[[Make], Call]:
    return lambda make: (
        (*(make(SIZE, "f4") for _ in range(sources)), make(SIZE // tile_bytes(name) * 4, "f4")),
        {},
    )


CALLS: dict[str, Callable[[Make], Call]] = {
    "copy": _arrays(2),
    "mul": _arrays(2, 3.0),
    "stream_add": _arrays(3),
    "triad": _arrays(3, 3.0),
    "write": _arrays(1, 3.0),
    "read": _summed("read", 1),
    "dot": _summed("dot", 2),
    "reset_data": lambda make: ((make(SIZE, "i4"), make(TABLE, "i4")), {}),
    "reset_data_shared": lambda make: ((make(SIZE, "i4"), make(SHARED_TABLE, "i4")), {}),
    "sliding_window": lambda make: ((make(TABLE, "i4"), make(SIZE, "i4")), {}),
    "l2_read": lambda make: ((make(SIZE, "i4"), make(SIZE // TILE_BYTES * 4, "i4"), 1), {}),
    "add": _arrays(2),
    "init": _arrays(1),
    "init_warp_per_page": _arrays(1),
    "offset_copy": _arrays(2, 1),
    "stride_copy": _arrays(2, 2),
    "permuted_copy": _arrays(2),
    "transpose": _square,
    "transpose_tiled": _square,
    "transpose_padded": _square,
    "chase": lambda make: ((make(SIZE // 4, "i4"), make(4, "i4"), STEPS), {}),
    "chase_l1": lambda make: ((make(SIZE // 4, "i4"), make(4, "i4"), STEPS), {}),
    "chase_onward": lambda make: ((make(SIZE // 4, "i4"), make(4, "i4"), STEPS), {}),
    "memcpy": _arrays(2),
    "elementwise": _arrays(1),
    "reread": _arrays(2),
}
"""Arguments of each kernel."""


@pytest.mark.parametrize("name", CATALOGUE)
def test_kernel(
    name: str, gpu_benchmark: GpuBenchmark, gpu_kernels: Kernels, device_buffer: Any
) -> None:
    arguments, options = CALLS[name](device_buffer)
    gpu_benchmark(getattr(gpu_kernels, name), *arguments, **options)
