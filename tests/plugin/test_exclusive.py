"""One measuring test at a time on each GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from filelock import FileLock

from pytest_gpumem.devices import locks
from pytest_gpumem.devices.errors import DeviceError
from pytest_gpumem.devices.locks import exclusive, lock_file


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own folder, as a login makes it."""
    folder = tmp_path / "runtime"
    folder.mkdir(mode=0o700)
    # As older versions give it: newer ones refuse by themselves what others can write to.
    monkeypatch.setattr(locks, "user_runtime_path", lambda name, appauthor: folder / name)
    return folder


def hold(test: str = "test_it", limit: float = 60.0) -> AbstractContextManager[None]:
    return exclusive("GPU-1234", "NVIDIA H100", pytest.fail, test=test, limit=limit)


def test_a_gpu_is_held_against_another_process(runtime: Path) -> None:
    with hold():
        lock = lock_file("GPU-1234")
        attempt = (
            "from filelock import FileLock, Timeout\n"
            f"try:\n FileLock({str(lock)!r}).acquire(timeout=0)\nexcept Timeout: print('held')"
        )
        other = subprocess.run(
            [sys.executable, "-c", attempt], capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == "held"
        assert lock.parent.stat().st_mode & 0o777 == 0o700
    with FileLock(lock, timeout=0):  # free again
        pass


def test_a_wait_for_one_test_ends_with_an_error(runtime: Path) -> None:
    named = rf"process {os.getpid()} \(test_hangs\)"
    with hold("test_hangs"), pytest.raises(DeviceError, match=named), hold(limit=0.1):
        pass
    with hold(limit=0.0):  # free again
        pass


def test_a_link_in_place_of_the_lock_is_refused_and_what_it_leads_to_is_untouched(
    runtime: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    lock = lock_file("GPU-1234")
    lock.unlink()
    lock.symlink_to(precious)
    with pytest.raises(DeviceError, match=r"GPU-1234\.lock"), hold():
        pass
    assert precious.read_text() == "kept"


def test_a_folder_that_others_can_replace_is_refused(runtime: Path, tmp_path: Path) -> None:
    runtime.chmod(0o777)
    with pytest.raises(DeviceError, match="other users can write to"):
        lock_file("GPU-1234")
    runtime.chmod(0o700)
    (runtime / "gpumem").rmdir()
    (tmp_path / "theirs").mkdir()
    (runtime / "gpumem").symlink_to(tmp_path / "theirs")
    with pytest.raises(DeviceError, match="is no folder"):
        lock_file("GPU-1234")
