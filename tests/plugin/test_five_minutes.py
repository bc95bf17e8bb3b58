"""The README's first five minutes, on the simulated device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "ci" / "bench"


def test_a_slow_down_of_an_own_kernel_is_found_with_the_readme_alone(
    tmp_path: Path, programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUMEM_DEVICE", "sim")
    monkeypatch.setenv("GPUMEM_BUDGET", "50 ms")
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("five_minutes", BENCH / "five_minutes.py")
    assert spec is not None
    assert spec.loader is not None
    five_minutes = sys.modules["five_minutes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(five_minutes)
    record = five_minutes.followed(tmp_path, install=False, python=str(programs / "python"))
    assert five_minutes.missed(record) == []
    assert "FAIL" in record["failed"]
    assert "in all" in five_minutes.table(record)
