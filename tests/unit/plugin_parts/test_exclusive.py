"""One measuring test at a time on each GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock
from msgspec.structs import replace

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.plugin import exclusive as module
from pytest_gpumem.plugin.exclusive import GpuBusy, LockUnusable, exclusive, lock_file

FACTS = choose("sim:h100").facts
GPU = replace(FACTS, uuid="GPU-1234")


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder, as a login makes it."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(module, "user_runtime_path", lambda name, appauthor: folder / name)
    return folder


def test_a_gpu_is_held_against_another_process(runtime: Path) -> None:
    with exclusive(GPU):
        lock = lock_file("GPU-1234")
        attempt = f"from filelock import FileLock, Timeout\ntry:\n FileLock({str(lock)!r}).acquire(timeout=0)\nexcept Timeout: print('held')"
        other = subprocess.run(
            [sys.executable, "-c", attempt], capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == "held"
        assert lock.parent.stat().st_mode & 0o777 == 0o700
    with FileLock(lock, timeout=0):  # free again
        pass


def test_who_waits_is_told_who_has_the_gpu(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    monkeypatch.setattr(module, "REPEAT", 0.01)
    first = exclusive(GPU, test="test_a.py::test_\x1b")
    first.__enter__()
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 2:
            first.__exit__(None, None, None)

    with exclusive(GPU, tell):
        assert len(told) == 2
        assert f"process {os.getpid()} (test_a.py::test_\\x1b) measures on it" in told[0]
        assert "GPU-1234" in told[0]
        assert "\n" not in told[0]


def test_a_wait_for_one_test_ends_with_an_error(runtime: Path) -> None:
    with (
        exclusive(GPU, test="test_hangs"),
        pytest.raises(GpuBusy, match=rf"process {os.getpid()} \(test_hangs\)"),
        exclusive(GPU, limit=0.1),
    ):
        pass
    with exclusive(GPU, limit=0.0):  # free again
        pass


def test_a_wait_for_tests_in_turn_goes_on(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 60.0 * next(clock))
    monkeypatch.setattr(
        module, "_content", lambda holder: str(next(clock))
    )  # another test at each look
    monkeypatch.setattr(module, "_POLL", 0.01)
    first = exclusive(GPU)
    first.__enter__()
    told: list[str] = []

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 20:
            first.__exit__(None, None, None)

    with exclusive(GPU, tell):
        assert len(told) == 20  # each a minute or more after the last


def test_a_link_in_place_of_the_lock_is_refused_and_what_it_leads_to_is_untouched(
    runtime: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    lock = lock_file("GPU-1234")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(LockUnusable, match=r"GPU-1234\.lock"), exclusive(GPU):
        pass
    assert precious.read_text() == "kept"


def test_a_folder_that_others_can_replace_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.chmod(0o777)
    with pytest.raises(LockUnusable, match="other users can write to"):
        lock_file("GPU-1234")
    runtime.chmod(0o700)
    (runtime / "gpumem").rmdir()
    (tmp_path / "theirs").mkdir()
    (runtime / "gpumem").symlink_to(tmp_path / "theirs")
    with pytest.raises(LockUnusable, match="is no folder"):
        lock_file("GPU-1234")


@pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away"
)
def test_a_folder_of_another_user_is_refused(runtime: Path) -> None:
    (runtime / "gpumem").mkdir()
    os.chown(runtime / "gpumem", 4242, -1)
    with pytest.raises(LockUnusable, match=r"belongs to another user \(4242\)"):
        lock_file("GPU-1234")


def test_a_model_is_nobody_elses(runtime: Path) -> None:
    with exclusive(FACTS), exclusive(FACTS):
        assert not list(runtime.iterdir())
