"""`gpumem explain`: the counters that differ, what ran differently, and why there is no answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import ncu_csv
import pytest
from click.testing import CliRunner, Result
from committing import commit

from pytest_gpumem.cli import main
from pytest_gpumem.nsight import explain
from pytest_gpumem.nsight.explain import compare, ran_differently
from pytest_gpumem.nsight.ncu import COUNTERS, ProfiledKernel
from pytest_gpumem.runs.processes import BASE, HEAD
from pytest_gpumem.runs.worktree import two_sides

REGISTERS, HIT_RATE = "launch__registers_per_thread", "lts__t_sector_hit_rate.pct"
SUITE = """
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.copy, device_buffer({size} << 20), device_buffer({size} << 20))
"""

Call = Callable[..., Result]


def kernel(metrics: dict[str, float], name: str = "triad", launches: int = 5) -> ProfiledKernel:
    return ProfiledKernel("test_a", "", name, launches, metrics)


def test_counters_that_differ_by_more_than_five_percent_have_both_values() -> None:
    base = kernel({REGISTERS: 100.0, HIT_RATE: 50.0})
    assert compare([base], [kernel({REGISTERS: 105.0, HIT_RATE: 48.0})], COUNTERS) == {}
    changed = compare([base], [kernel({REGISTERS: 106.0, HIT_RATE: 40.0}, launches=10)], COUNTERS)
    assert changed == {
        "test_a": [
            "triad: launches 5 → 10",
            "triad: L2 hit rate 50 % → 40 %",
            "triad: registers 100 → 106",
        ]
    }


def test_a_kernel_of_one_side_is_named() -> None:
    assert compare([kernel({}, "old")], [kernel({}, "new")], COUNTERS) == {
        "test_a": ["old: only in base", "new: only in head"]
    }


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a commit, and a change of its test that is not committed; the working directory."""
    for name in [*os.environ]:
        if name.startswith(("GPUMEM", "NVTX", "GIT")):
            monkeypatch.delenv(name)
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    test = folder / "test_a.py"
    test.write_text(SUITE.format(size=1))
    commit(folder)
    test.write_text(SUITE.format(size=2))
    return folder


@pytest.mark.usefixtures("quick_processes")
def test_what_ran_differently_is_listed_by_row(project: Path) -> None:
    with two_sides("HEAD", project) as (base, head):
        lines = ran_differently(
            {BASE: base, HEAD: head}, "test_a.py::test_copy", ["--gpumem-device", "sim"], os.environ
        )
    assert "declared bytes 2 MiB → 4 MiB" in lines["test_a.py::test_copy"]


@pytest.fixture
def gpumem(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs `gpumem explain` with tools that print a file, as if there were a GPU; no pytest runs."""
    differs = {"test_a.py::test_copy": ["kernel copy: block 256 → 128"]}
    for name, answer in (("choose", None), ("ran_differently", differs)):
        # Without a GPU nothing is chosen; what ran has the test above.
        monkeypatch.setattr(explain, name, lambda *_, answer=answer: answer)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, log in (
        ("ncu", '--log-file) cp "$PRINTED" "$2";;'),
        ("nsys", 'stats) cat "$PRINTED";;'),
    ):
        program = tools / name
        # Base runs in a worktree.
        program.write_text(
            f'#!/bin/sh\nPRINTED={tmp_path}/{name}-head; [ "$PWD" = {project} ] || PRINTED={tmp_path}/{name}-base\n'
            f'[ -e $PRINTED ] || {{ echo "==ERROR== ERR_NVGPUCTRPERM"; exit 1; }}\n'
            f'while [ $# -gt 0 ]; do case "$1" in {log} esac; shift; done\n'
            f"[ ! -e {tmp_path}/failing ]\n"
        )
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(
            main,
            ["explain", "--base", "HEAD", "test_a.py::test_copy", *arguments],
            prog_name="gpumem",
        )

    return run


def counts(read: int) -> str:
    return ncu_csv.log(ncu_csv.line(0, "copy", ncu_csv.measured("test_copy"), (read, 0, 1, 1, 1)))


def test_both_sides_are_counted_once(gpumem: Call, tmp_path: Path) -> None:
    (tmp_path / "ncu-base").write_text(counts(1 << 20))
    (tmp_path / "ncu-head").write_text(counts(2 << 20))
    result = gpumem()
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "differ by more than 5 % by Nsight Compute:",
        "  test_copy",
        "    copy: DRAM bytes 1 MiB → 2 MiB",
        "ran differently:",
        "  test_a.py::test_copy",
        "    kernel copy: block 256 → 128",
    ]
    (tmp_path / "failing").touch()
    result = gpumem()
    assert result.exit_code == 1
    assert "base: pytest ended with exit code 1" in result.stderr
    assert "1 MiB → 2 MiB" in result.stdout


def test_without_a_gpu_or_a_tool_there_is_one_line(
    project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["explain", "--base", "HEAD", "test_a.py::test_copy"]
    monkeypatch.setenv("GPUMEM_NCU", "nowhere")
    result = CliRunner().invoke(main, words, prog_name="gpumem")
    assert (result.exit_code, result.stdout) == (6, "")
    assert result.stderr.startswith("gpumem: GPUMEM_NCU='nowhere' is no program")
    tool = tmp_path / "ncu"
    tool.touch(mode=0o755)
    monkeypatch.setenv("GPUMEM_NCU", str(tool))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = CliRunner().invoke(main, words, prog_name="gpumem")
    assert (result.exit_code, result.stdout) == (6, "")
    assert result.stderr.startswith("gpumem: counters are of a GPU: no CUDA device 0")
    assert len(result.stderr.splitlines()) == 1
