"""What the tests of the plugin run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from click.testing import CliRunner
from committing import commit, git
from forked import COMMAND

from pytest_gpumem.cli import main

Run = Callable[..., pytest.RunResult]
"""A session with further arguments, such as the fixtures `session` and `gpumem`."""

QUICKLY = (
    *("-p", "no:cacheprovider", "-p", "no:hypothesispytest"),
    *("-p", "no:rerunfailures", "-p", "no:pytest-split"),
)
"""Leave out what takes no part: each session would import most of Hypothesis again."""

SIMULATED = ("--gpumem", "--gpumem-device", "sim", "--gpumem-budget", "1 ms", *QUICKLY)
"""Measure on the simulated device, quickly."""

TRIAD = """
def test_triad(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    result = gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert result.latency > 0
"""
"""A test that measures once."""


def gate_result(text: str) -> str:
    """The result of a gate: the last line that begins with its name. What fails and what to do follows."""
    return next(
        (line for line in reversed(text.splitlines()) if line.startswith("gpumem gate: ")), ""
    )


def results_in(folder: Path, name: str = "out.json") -> dict[str, Any]:
    """What `--benchmark-json` wrote of this plugin."""
    found: dict[str, Any] = json.loads((folder / name).read_text())["gpumem"]
    return found


def rows_in(folder: Path, name: str = "out.json") -> list[dict[str, Any]]:
    """Its rows."""
    found: list[dict[str, Any]] = results_in(folder, name)["rows"]
    return found


def row_in(folder: Path, name: str = "out.json") -> dict[str, Any]:
    """Its only row."""
    (row,) = rows_in(folder, name)
    return row


def stored_in(folder: Path) -> list[Path]:
    """The files of the default baseline, oldest first."""
    return sorted(folder.glob(".benchmarks/*/gpumem/*.json"))


def slower(factor: str) -> str:
    """A conftest that makes kernels take a multiple of their time. `factor`: an expression, by `request` and `os.environ`."""
    return f"""
import os
import pytest
from pytest_gpumem.devices.simulated.roofline import Roofline

@pytest.fixture(autouse=True)
def _slower(request, monkeypatch):
    factor, kernel = {factor}, Roofline.kernel
    # The change that a gate is to find.
    monkeypatch.setattr(Roofline, "kernel", lambda self, *given: kernel(self, *given) * factor)
"""


PROCESSES = (
    "--gpumem-device",
    "sim",
    "--gpumem-budget",
    "1 ms",
    "-o",
    "gpumem_placements=2",
    *QUICKLY,
)
"""For the processes of commands: measure on the simulated device, quickly."""


class Repository:
    """A repository of git, and the command in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.temporary = tmp_path / "project", tmp_path / "temporary"
        self.folder.mkdir()
        self.temporary.mkdir()
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), "COLUMNS": "160"}
        self.write("pytest.ini", "[pytest]\n")

    def git(self, *arguments: str) -> str:
        return git(self.folder, *arguments)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def commit(self, subject: str = "next") -> str:
        """Everything; its id."""
        return commit(self.folder, subject)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`gpumem` inside this process, with a folder for temporary files; the processes of pytest that it starts are real."""
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(self.folder)
            patched.setattr("tempfile.tempdir", str(self.temporary))
            for name, value in self.environment.items():
                patched.setenv(name, value)
            result = CliRunner().invoke(main, arguments)
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return subprocess.CompletedProcess(
            arguments, result.exit_code, result.stdout, result.stderr
        )

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """`gpumem` in an interpreter of its own, which like the processes that it starts is not forked: a signal may end it."""
        command = [sys.executable, "-c", COMMAND, *arguments]
        return Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        )

    @property
    def worktrees(self) -> int:
        return len(self.git("worktree", "list").splitlines())
