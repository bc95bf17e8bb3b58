"""A small project as a job of a pipeline finds it, on the simulated device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from committing import commit, git

from pytest_gpumem.baselines.store import digest

BRANCH = "main"
SIMULATED = {"GPUMEM_DEVICE": "sim"}

INI = "[pytest]\ngpumem_budget = 1 ms\ngpumem_placements = 2\naddopts = -p no:cacheprovider -p no:hypothesispytest -p no:rerunfailures"
"""Measure quickly."""
IN_ONE_PROCESS = f"{INI} -n0\n"
"""Nor does a gate start a worker, which takes as long as its tests: for gates whose subject is something else."""

TESTS = """
import pytest
from kern import NBYTES

@pytest.mark.gpumem(max_regression="2%")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))
"""

Done = subprocess.CompletedProcess


class Project:
    """A clone of a small project, with everything that a job finds where it begins."""

    def __init__(self, folder: Path, programs: Path) -> None:
        """`programs`: where `python` and `gpumem` are."""
        self.folder = folder / "clone"
        upstream = folder / "upstream"
        upstream.mkdir()
        # In place of the step that makes a virtual environment: what is there.
        (folder / "bin").mkdir()
        (upstream / ".venv" / "bin").mkdir(parents=True)
        (upstream / ".venv" / "bin" / "activate").write_text(
            f'PATH="{folder / "bin"}:{programs}:$PATH"\n'
        )
        (upstream / ".gitignore").write_text(".gpumem-baseline\n__pycache__\n")
        (upstream / "pytest.ini").write_text(IN_ONE_PROCESS)
        (upstream / "test_it.py").write_text(TESTS)
        (upstream / "kern.py").write_text("NBYTES = 64 << 20\n")
        commit(upstream)
        git(folder, "clone", "-q", str(upstream), str(self.folder))

    def git(self, *arguments: str) -> None:
        git(self.folder, *arguments)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def copied(self, folder: Path) -> Project:
        """A copy of it and of its origin, in which a test can change anything."""
        shutil.copytree(self.folder.parent, folder / "all", symlinks=True)
        project = object.__new__(Project)
        project.folder = folder / "all" / "clone"
        project.git("remote", "set-url", "origin", str(folder / "all" / "upstream"))
        return project

    def change(self, nbytes: str) -> None:
        (self.folder / "kern.py").write_text(f"NBYTES = {nbytes}\n")
        self.git("commit", "-qam", "change")

    def run(self, script: str, variables: dict[str, str], /, **more: str) -> Done[str]:
        """A script as a runner runs it, in a CI that has no GPU."""
        own = {
            "CI": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(self.folder.parent),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        environment = {**os.environ, **own, **variables, **more}
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )


def saved_project(folder: Path, programs: Path, files: Mapping[str, str] | None = None) -> Project:
    """A project with these files in its base, whose baseline has three runs of it."""
    project = Project(folder, programs)
    upstream = folder / "upstream"
    git(upstream, "config", "receive.denyCurrentBranch", "ignore")
    for name, text in (files or {}).items():
        (upstream / name).parent.mkdir(parents=True, exist_ok=True)
        (upstream / name).write_text(text)
    commit(upstream, "tests")
    project.git("pull", "-q")
    done = project.run(
        ". .venv/bin/activate; python -m pytest --gpumem --gpumem-save --gpumem-processes 1",
        {"GPUMEM_BASELINE": ".gpumem-baseline", **SIMULATED},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    make_three(next((project.folder / ".gpumem-baseline").rglob("*.json")))
    return project


def make_three(baseline: Path) -> None:
    """Two more runs like that of this file, as if they had been saved too: a FAIL takes three."""
    for number in range(2):
        stored = json.loads(baseline.read_text())
        stored["content"]["id"] += str(number)
        baseline.with_name(f"again-{number}.json").write_text(
            json.dumps({**stored, "sha256": digest(stored["content"])})
        )
