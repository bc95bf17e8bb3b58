"""A user's test of a table that is to stay in L2: what `l2_proof.py` counts with `gpumem traffic`."""

from __future__ import annotations

from typing import Any

from pytest_gpumem import MiB


def test_lookup(gpu_benchmark: Any, device_buffer: Any, persisting_stream: Any, gpu_kernels: Any) -> None:
    out, table = device_buffer(1024 * MiB, "i4"), device_buffer(24 * MiB, "i4")
    with persisting_stream(table, set_aside="off") as stream:
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="off")
    with persisting_stream(table) as stream:
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream, label="fitted")
