"""The spread of a selection's rows between fresh pytest processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import between_processes
import pytest

TEST = """
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.triad, *(device_buffer("1 MiB", "f4") for _ in range(3)), 3.0, label="small")
"""


def test_spread_and_range_are_shares_of_the_mean() -> None:
    (row,) = between_processes.summary([{"a": 1e-6, "once": 1.0}, {"a": 2e-6}, {"a": 3e-6}])
    assert (row["row"], row["processes"]) == ("a", 3)
    assert row["mean"] == pytest.approx(2e-6)
    assert row["spread"] == pytest.approx(0.5)
    assert row["range"] == pytest.approx(1.0)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["between_processes.py", "--device", "sim", *arguments])
    return between_processes.main()


def test_every_process_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file, selection = tmp_path / "record.json", tmp_path / "test_it.py"
    selection.write_text(TEST)
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "--processes", "2", "--json", str(file), str(selection)) == 0
    record = json.loads(file.read_text())
    assert len(record["runs"]) == 2
    (row,) = record["summary"]
    assert row["row"] == "test_it.py::test_triad[small]"
    assert "test_it.py::test_triad[small]" in capsys.readouterr().out
