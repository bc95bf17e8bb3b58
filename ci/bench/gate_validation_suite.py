"""The suite that every process of the gate's validation runs: one test for each row, in an order drawn for the process.

Not for pytest's own collection: `gate_validation_worker.py` names it, and says by environment variables what there is to measure.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gate_validation_rows import ARRAYS, BY_NAME, CHASE_NODES, launches, rounded, work_of

JOB: dict[str, Any] = json.loads(os.environ["GATE_VALIDATION_JOB"])


@cache
def slopes() -> dict[str, float]:
    """What the pilot found; it is read when the first test runs, since processes get ready before the pilot has ended."""
    found: dict[str, float] = json.loads(Path(JOB["slopes"]).read_text())
    return found


@pytest.fixture
def launch(gpu_benchmark, gpu_kernels, device_buffer):
    """Measure a kernel on arrays of a size, or a chase of so many steps."""

    def measure(kernel: str, work: int) -> None:
        if kernel == "chase":
            gpu_benchmark(gpu_kernels.chase, device_buffer(CHASE_NODES, "i4"), device_buffer((1,), "i4"), work)
            return
        kernel, _, dtype = kernel.partition(":")
        arrays = [device_buffer(work, dtype or "f4") for _ in range(ARRAYS.get(kernel, 2))]
        if kernel == "dot":
            arrays.append(device_buffer(max(work // (32 * 1024) * 4, 4096), "f4"))
        offset = (1,) if kernel == "offset_copy" else ()
        gpu_benchmark(getattr(gpu_kernels, kernel), *arrays, *offset)

    return measure


@pytest.mark.parametrize("name", JOB["rows"])
def test_row(launch, device_buffer, name):
    row = BY_NAME[name]
    unrelated = device_buffer(row.unrelated, "u1") if row.unrelated else None
    launch(row.kernel, work_of(row, slopes(), slow=name in JOB["slow"]))
    del unrelated


@pytest.mark.parametrize("more", [1, JOB["more"]])
@pytest.mark.parametrize("name", JOB["pilot"])
def test_pilot(launch, name, more):
    row = launches()[name]
    launch(row.kernel, rounded(row.kernel, row.work * more))
