"""Kernels that crash or never end: their test fails, others keep their verdicts, and the GPU is free again. Runs sessions of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cupy")
pytestmark = pytest.mark.usefixtures("free_gpu")
MODULE = r"""
import os
import time

import cupy
import numpy as np
import pytest

BAD = cupy.RawKernel('extern "C" __global__ void bad(unsigned long long at) { *(volatile int*)at = 1; }', "bad")
ENDLESS = cupy.RawKernel('extern "C" __global__ void endless(volatile int* go) { while (!*go) {} }', "endless")


def crash(): BAD((1,), (1,), (np.uint64(0x10),))


def about_to_hang(): os.write(2, b"about to hang\n")


def hang():
    global go
    about_to_hang()
    go = cupy.zeros(1, "i4")
    ENDLESS((1,), (1,), (go,))


def test_1(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("4 MiB"), device_buffer("4 MiB"))


@pytest.mark.parametrize("number", range(TIMES))
@pytest.mark.gpumem(timeout="3 s")
def test_2(gpu_benchmark, gpu_device, device_buffer, number):
    device_buffer("4 MiB", "f4")
    CULPRIT


def test_3(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("4 MiB"), device_buffer("4 MiB"))


def test_4(): pass
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def run(culprit: str, *arguments: str, times: int = 1) -> subprocess.Popen[str]:
        (tmp_path / "test_it.py").write_text(
            MODULE.replace("CULPRIT", culprit).replace("TIMES", str(times))
        )
        own = (
            "--gpumem",
            "--gpumem-device",
            "cuda",
            "--gpumem-budget",
            "100 ms",
            "-rA",
            "-p",
            "no:cacheprovider",
            "--rootdir=.",
        )
        command = [sys.executable, "-m", "pytest", *own, *arguments, "test_it.py"]
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return run


def verdicts(output: str) -> dict[str, str]:
    """The outcome of each test in pytest's short summary."""
    lines = [
        line.split()
        for line in output.splitlines()
        if line.startswith(("PASSED test_it", "FAILED test_it", "ERROR test_it"))
    ]
    return {words[1].partition("::")[2]: words[0] for words in lines}


def test_a_crash_after_the_last_wait_is_its_tests(start: Start) -> None:
    session = start("crash()")
    output, _ = session.communicate(timeout=120)
    assert session.returncode == pytest.ExitCode.TESTS_FAILED
    assert verdicts(output) == {
        "test_1": "PASSED",
        "test_2[0]": "FAILED",
        "test_3": "ERROR",
        "test_4": "PASSED",
    }
    assert re.search(
        r"did not run: test_it\.py::test_2\[0\] lost the context \(\w[\w ]+, test_it\.py:\d+\)",
        output,
    )
    last = output.rstrip().splitlines()[-1]
    assert " in " in last
    assert last.endswith(
        "="
    )  # nothing follows the summary: no traceback of a library that frees its memory


def test_a_worker_that_lost_the_context_is_replaced(start: Start) -> None:
    session = start("crash()", "--gpumem-isolate")
    output, _ = session.communicate(timeout=120)
    assert session.returncode == pytest.ExitCode.TESTS_FAILED
    assert verdicts(output) == {
        "test_1": "PASSED",
        "test_2[0]": "FAILED",
        "test_3": "PASSED",
        "test_4": "PASSED",
    }


def test_an_endless_kernel_ends_the_session(start: Start) -> None:
    session = start("gpu_benchmark(hang)")
    output, _ = session.communicate(timeout=120)
    assert session.returncode == pytest.ExitCode.TESTS_FAILED
    assert re.search(
        r"gpumem: test_it\.py::test_2\[0\]: a measurement did not end .*--gpumem-timeout.*--gpumem-isolate",
        output,
    )
    assert "in test_2" in output  # the stack
    assert_the_gpu_is_free(start)


def test_six_endless_kernels_cost_their_tests_alone(start: Start) -> None:
    session = start("gpu_benchmark(hang)", "--gpumem-isolate", times=6)
    output, _ = session.communicate(timeout=400)
    assert session.returncode == pytest.ExitCode.TESTS_FAILED
    failed = {f"test_2[{number}]": "FAILED" for number in range(6)}
    assert verdicts(output) == {
        "test_1": "PASSED",
        **failed,
        "test_3": "PASSED",
        "test_4": "PASSED",
    }
    assert output.count(" in test_2\n") == 6  # the stacks
    assert_the_gpu_is_free(start)


@pytest.mark.parametrize(
    ("culprit", "arguments"),
    [("about_to_hang(); time.sleep(600)", ()), ("gpu_benchmark(hang)", ("--gpumem-isolate",))],
    ids=["host code", "an endless kernel in a worker"],
)
def test_an_interrupt_keeps_what_was_measured(
    start: Start, culprit: str, arguments: tuple[str, ...]
) -> None:
    session = start(culprit, "-s", *arguments)
    assert session.stdout is not None
    before = next(line for line in session.stdout if "about to hang" in line)
    session.send_signal(signal.SIGINT)
    after, _ = session.communicate(timeout=60)
    assert session.returncode == pytest.ExitCode.INTERRUPTED, before + after
    assert verdicts(after) == {"test_1": "PASSED"}
    assert_the_gpu_is_free(start)


def assert_the_gpu_is_free(start: Start) -> None:
    session = start("pass")
    output, _ = session.communicate(timeout=120)
    assert session.returncode == pytest.ExitCode.OK, output
