"""The script for `git bisect run` on the page "Not in scope", on the simulated device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from committing import AUTHOR, SETTINGS, commit, git
from document_blocks import blocks
from sessions import PROCESSES

TEST = """
from kern import NBYTES

def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer(NBYTES), device_buffer(NBYTES))
"""
LACKING = "def test_other(): pass\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository whose test copies 16 MiB, is missing once, and in the end copies 48 MiB."""
    folder = tmp_path / "project"
    folder.joinpath("tests").mkdir(parents=True)
    folder.joinpath("pytest.ini").write_text("[pytest]\npythonpath = .\n")
    for subject, mib, test in (
        ("good", 16, TEST),
        ("comment", 16, TEST),
        ("lacking", 16, LACKING),
        ("another comment", 16, TEST),
        ("slower", 48, TEST),
        ("last", 48, TEST),
    ):
        folder.joinpath("kern.py").write_text(f"NBYTES = {mib} << 20  # {subject}\n")
        folder.joinpath("tests", "test_copy.py").write_text(test)
        commit(folder, subject)
        if subject == "good":
            git(folder, "tag", "v1.4")
    return folder


def search(project: Path, programs: Path, script: str) -> str:
    """What the page's search prints with this script."""
    page = {block.marker: block.code for block in blocks("sh")}
    project.joinpath("step.sh").write_text(script)
    environment = {
        **os.environ,
        **SETTINGS,
        **AUTHOR,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_ADDOPTS": " ".join(f"'{word}'" for word in PROCESSES),
    }
    command = f"set -e\n{page['bisect: search'].rstrip()}"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# skip: " in git(project, "bisect", "log")
    return done.stdout


def test_the_script_finds_the_commit_that_made_a_test_slower(project: Path, programs: Path) -> None:
    page = {block.marker: block.code for block in blocks("sh")}
    found = search(project, programs, page["bisect: step.sh"])
    assert f"{git(project, 'rev-parse', 'main~1')} is the first bad commit" in found


def test_the_script_finds_the_commit_that_takes_more_memory(project: Path, programs: Path) -> None:
    page = {block.marker: block.code for block in blocks("sh")}
    first, _, last = page["bisect: step.sh"].splitlines(keepends=True)
    found = search(project, programs, first + page["bisect: memory"] + last)
    assert f"{git(project, 'rev-parse', 'main~1')} is the first bad commit" in found
