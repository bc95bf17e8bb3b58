"""One measuring test at a time on each GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.plugin.exclusive import exclusive

FACTS = choose("sim:h100").facts


def test_a_gpu_is_held_against_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    gpu = replace(FACTS, uuid="GPU-1234")
    with exclusive(gpu):
        (lock,) = tmp_path.glob("gpumem-*-GPU-1234.lock")
        attempt = (
            f"from filelock import FileLock, Timeout\ntry:\n FileLock({str(lock)!r}).acquire(timeout=0)\nexcept Timeout: print('held')"
        )
        other = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=True)
        assert other.stdout.strip() == "held"
    with FileLock(lock, timeout=0):  # free again
        pass


def test_a_model_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with exclusive(FACTS), exclusive(FACTS):
        assert not list(tmp_path.iterdir())
