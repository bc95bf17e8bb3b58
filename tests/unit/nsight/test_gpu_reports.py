"""A report of a GPU (`tests/data/nsight`), beside what the tool itself said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.nsight import ncu

DATA = Path(__file__).resolve().parents[2] / "data" / "nsight"


def test_ncu() -> None:
    [wanted] = json.loads((DATA / "test_kernels.csv.expected.json").read_text())["kernels"]
    (found,) = ncu.read_csv((DATA / "test_kernels.csv").read_text())
    (kernel,) = found.kernels
    for name, value in wanted.items():
        owner = found if name in ("name", "sm_clock_hz", "memory_clock_hz", "set_aside") else kernel
        assert getattr(owner, name) == (
            value if isinstance(value, str) else pytest.approx(value, rel=1e-4)
        ), name
