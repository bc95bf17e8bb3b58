"""Persisting L2: what a window gains, what thrashing costs, and that both are measured against a set-aside of zero.

The look-up table experiment follows "CUDA L2 Persistent Cache" (Lei Mao); the sliding window the CUDA C++ Best Practices Guide,
9.2.2. Tables are 8 and 24 MiB where L2 has 50 MiB or more, and shares of a smaller L2; what must not fit is 0.8 of L2.
"""

from __future__ import annotations

import pytest

from pytest_gpumem import MiB

LEAN_GRID = 32
"""Blocks of the seed's launch: too few to saturate memory, so the table's latency shows."""


@pytest.mark.parametrize(
    ("share", "most", "grid"),
    [
        pytest.param(0.16, 8 * MiB, None, id="small_table-full_grid"),
        pytest.param(0.48, 24 * MiB, LEAN_GRID, id="large_table-lean_grid"),
    ],
)
def test_lookup_table_stays_in_l2(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes, share, most, grid):
    """A table that is read over and over beside a stream gains from persistence."""
    out, table = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(share, most), "i4")
    kernel = gpu_kernels.reset_data if grid is None else gpu_kernels.reset_data.with_grid(grid)
    with persisting_stream(table, set_aside="off") as stream:
        off = gpu_benchmark(kernel, out, table, stream=stream, label="off")
    with persisting_stream(table) as stream:
        persisting = gpu_benchmark(kernel, out, table, stream=stream, label="persisting")
    assert off.latency > 1.25 * persisting.latency


def test_a_fitted_hit_ratio_avoids_thrashing(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes):
    """A window beyond the set-aside evicts itself at hit ratio 1; the ratio that fits keeps a part."""
    out, table = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.8), "i4")
    kernel = gpu_kernels.reset_data.with_grid(LEAN_GRID)
    with persisting_stream(table, set_aside="max", hit_ratio=1.0) as stream:
        thrashing = gpu_benchmark(kernel, out, table, stream=stream, label="thrashing")
    with persisting_stream(table, set_aside="max", hit_ratio="fit") as stream:
        fitted = gpu_benchmark(kernel, out, table, stream=stream, label="fitted")
    assert thrashing.latency > 1.05 * fitted.latency


def test_sliding_window(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream, of_l2, swept_bytes):
    """The guide's experiment: a region that is updated over and over beside a stream that is updated once."""
    streaming, region = device_buffer(swept_bytes, "i4"), device_buffer(of_l2(0.4, 20 * MiB), "i4")
    with persisting_stream(region, set_aside="off") as stream:
        off = gpu_benchmark(gpu_kernels.sliding_window, region, streaming, stream=stream, label="off")
    with persisting_stream(region) as stream:
        persisting = gpu_benchmark(gpu_kernels.sliding_window, region, streaming, stream=stream, label="persisting")
    assert off.latency > 1.02 * persisting.latency
