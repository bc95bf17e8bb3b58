"""What the tests of the plugin run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.cli import main

QUICKLY = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")
"""Leave out what takes no part: each session would import most of Hypothesis again."""

SIMULATED = ("--gpumem", "--gpumem-device", "sim", "--gpumem-budget", "5 ms", *QUICKLY)
"""Measure on the simulated device, quickly."""

TRIAD = """
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert result.latency > 0
"""
"""A test that measures once."""


def command_in(folder: Path, temporary: Path, environment: Mapping[str, str], arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command `gpumem` inside this process, with a folder for temporary files; the processes of pytest that it starts are real."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr("tempfile.tempdir", str(temporary))
        for name, value in environment.items():
            patched.setenv(name, value)
        result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)
