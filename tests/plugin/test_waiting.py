"""A session that waits for a GPU names the holder, ends the wait at its limit, and can be interrupted."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock
from sessions import SIMULATED

GPU_OF_ANOTHER = """
    from dataclasses import replace
    from msgspec import structs
    from pytest_gpumem.devices import locks, opening
    from pytest_gpumem.plugin import isolation, start
    from pathlib import Path

    chosen = opening.choose("sim")
    facts = structs.replace(chosen.facts, uuid="GPU-1")
    start.choose = lambda choice: replace(chosen, facts=facts, gpus=("GPU-1",))
    locks.user_runtime_path = lambda name, appauthor: Path("runtime").absolute() / name
    locks.PATIENCE, isolation.LIMIT = 0.01, {limit}
"""
"""A conftest: the simulated device as a GPU that has a lock."""


@pytest.fixture
def held(pytester: pytest.Pytester) -> FileLock:
    """The lock of the GPU, in the hands of process 4242."""
    folder = pytester.path / "runtime" / "gpumem"
    folder.mkdir(parents=True, mode=0o700)
    lock = FileLock(folder / "GPU-1.lock")
    lock.acquire()
    Path(folder, "GPU-1.txt").write_text("process 4242 (test_hangs)")
    pytester.makepyfile(
        "def test_a(gpu_device): pass\ndef test_b(gpu_device): pass\ndef test_cpu(): pass"
    )
    return lock


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_a_wait_that_reaches_its_limit_fails_the_tests_of_the_gpu(
    pytester: pytest.Pytester, held: FileLock, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(GPU_OF_ANOTHER.format(limit=0.2))
    result = pytester.runpytest_subprocess(
        *SIMULATED, *workers, "-p", "xdist" if workers else "no:xdist"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, errors=2)
    named = (
        "DeviceError: NVIDIA H100* (GPU-1) is in use {}: process 4242 (test_hangs) measures on it*"
    )
    result.stdout.fnmatch_lines(
        [
            "*" + named.format("for 0 s of waiting"),
            "*" + named.format("and was not waited for again"),
        ]
    )
    assert "Traceback" not in result.stdout.str()
    waiting = [
        line for line in (*result.errlines, *result.outlines) if "gpumem: waiting for" in line
    ]
    assert len(waiting) == 1  # of two tests


@pytest.mark.usefixtures("new_interpreters")
def test_an_interrupt_ends_the_wait(pytester: pytest.Pytester, held: FileLock) -> None:
    pytester.makeconftest(GPU_OF_ANOTHER.format(limit=600.0))
    session = pytester.popen(
        [sys.executable, "-m", "pytest", *SIMULATED],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert session.stderr is not None
    line = next(line for line in session.stderr if b"waiting" in line)
    assert b"process 4242 (test_hangs)" in line
    session.send_signal(signal.SIGINT)
    out, _ = session.communicate(timeout=60)
    assert session.returncode == pytest.ExitCode.INTERRUPTED
    assert b"KeyboardInterrupt" in out
