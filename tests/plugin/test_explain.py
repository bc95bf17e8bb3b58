"""Causes in the report of a failed row, and `gpumem explain` from outside, on the simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from forked import COMMAND
from sessions import SIMULATED, row_in, rows_in

from pytest_gpumem.explain.processes import SideRun
from pytest_gpumem.runs.worktree import Side

SUITE = """
import pathlib

import pytest

HEAD = pathlib.Path(__file__).with_name("side.txt").read_text() == "head"

@pytest.mark.gpumem(max_regression="1%")
def test_lookup(gpu_benchmark, gpu_kernels, device_buffer, persisting_stream):
    out, table = device_buffer("1 GiB", "i4"), device_buffer("8 MiB", "i4")
    with persisting_stream(table, **({"set_aside": "off"} if HEAD else {})) as stream:
        gpu_benchmark(gpu_kernels.reset_data, out, table, stream=stream)

def test_copy(gpu_benchmark, gpu_kernels, device_buffer, pinned_buffer, pageable_buffer):
    gpu_benchmark(gpu_kernels.memcpy, device_buffer("16 MiB"), (pageable_buffer if HEAD else pinned_buffer)("16 MiB"))

def test_same(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy, device_buffer("64 MiB"), device_buffer("64 MiB"))

def test_grid(gpu_benchmark, gpu_kernels, device_buffer):
    gpu_benchmark(gpu_kernels.copy.with_grid(2 if HEAD else 64), device_buffer("64 MiB"), device_buffer("64 MiB"))
"""


def test_a_failed_row_says_why_and_how_to_learn_the_rest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    side = pytester.path / "side.txt"
    side.write_text("base")
    for _ in range(3):
        assert (
            pytester.runpytest_inprocess(
                *SIMULATED, "--gpumem-save", "--gpumem-processes=1", "-k", "lookup"
            ).ret
            == 0
        )
    side.write_text("head")
    done = pytester.runpytest_inprocess(*SIMULATED, "-k", "lookup", "--benchmark-json=out.json")
    said = " ".join(done.stdout.str().split())
    assert "why: test_it.py::test_lookup: " in said
    assert (
        "up to this: 8 MiB no longer stay in L2, their persisting window is gone; set-aside" in said
    )
    assert (
        "further causes, which need more counts: gpumem explain --base BASE test_it.py::test_lookup"
        in said
    )
    row = row_in(pytester.path)
    assert row["why"][0].partition(": ")[0] != row["key"]  # the row has its name
    assert [kernel["name"] for kernel in row["measurement"]["activity"]["kernels"]] == [
        "reset_data"
    ]
    # The pass is taken where it may be needed: of a row that is not slower it is not, nor where nothing of it may be recorded.
    side.write_text("base")
    for arguments in ((), ("--gpumem-no-what-ran",)):
        assert (
            pytester.runpytest_inprocess(
                *SIMULATED, "-k", "lookup", "--benchmark-json=same.json", *arguments
            ).ret
            == 0
        )
        assert rows_in(pytester.path, "same.json")[0]["measurement"]["activity"] is None


def test_without_a_stored_pass_a_failed_row_names_the_command_and_the_revision_of_the_baseline(
    pytester: pytest.Pytester,
) -> None:
    """The baseline was saved without CUPTI, or by a run that records nothing."""
    pytester.makepyfile(test_it=SUITE)
    side = pytester.path / "side.txt"
    side.write_text("base")
    author = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-qm", "base"]):
        subprocess.run(["git", *words], cwd=pytester.path, check=True)
    base = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pytester.path, check=True, capture_output=True, text=True
    ).stdout.strip()
    for _ in range(3):
        assert (
            pytester.runpytest_inprocess(
                *SIMULATED,
                "--gpumem-save",
                "--gpumem-processes=1",
                "--gpumem-no-what-ran",
                "-k",
                "grid",
            ).ret
            == 0
        )
    side.write_text("head")
    done = pytester.runpytest_inprocess(
        *SIMULATED, "--gpumem-max-regression=1%", "-k", "grid", "--benchmark-json=out.json"
    )
    assert row_in(pytester.path)["measurement"]["activity"] is None
    assert (
        f"why: test_it.py::test_grid: for causes: gpumem explain --base {base[:12]} test_it.py::test_grid"
        in done.stdout.str()
    )


def test_both_sides_are_measured_and_explained(pytester: pytest.Pytester) -> None:
    folders = [pytester.mkdir(name) for name in ("base", "head")]
    for folder in folders:
        (folder / "test_it.py").write_text(SUITE)
        (folder / "side.txt").write_text(folder.name)
        (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", COMMAND, "explain", "--base", "../base", "--pairs", "1"]
    command += [
        "--json",
        "why.json",
        "--keep",
        "kept",
        "test_it.py::test_copy",
        "test_it.py::test_same",
        "--",
        *SIMULATED[1:],
    ]
    done = subprocess.run(
        command,
        cwd=folders[1],
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "pageable instead of pinned: 16 MiB from host to device in each launch" in done.stdout
    assert "nothing to explain: no slow-down beyond its interval" in done.stdout
    plain = json.loads((folders[1] / "why.json").read_text())
    assert plain["simulated"] is True
    first = {one["key"].partition("::")[2]: one["first"] for one in plain["explanations"]}
    assert first == {"test_copy": "pageable", "test_same": None}
    # Results that base wrote stand for it; head's processes are no runs of their own, and only the test that was asked for is run.
    environment = {
        **os.environ,
        "COLUMNS": "200",
        "GITHUB_STEP_SUMMARY": "steps.md",
        "GITHUB_ACTIONS": "true",
    }
    stored = [
        *command[:3],
        "explain",
        "--base",
        "kept/base.json",
        "--pairs",
        "1",
        "test_it.py::test_copy",
        "--",
        ".",
        *SIMULATED[1:],
    ]
    done = subprocess.run(stored, cwd=folders[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pageable instead of pinned" in done.stdout
    assert "note: only base measured test_it.py::test_same" in done.stdout
    assert not (folders[1] / "steps.md").exists()
    again = subprocess.run(
        [*command[:3], "explain", "kept/base.json", "kept/head.json"],
        cwd=folders[1],
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert again.returncode == 0, again.stderr
    assert "pageable instead of pinned" in again.stdout


def test_the_session_under_a_profiler_measures_without_a_baseline(
    pytester: pytest.Pytester,
) -> None:
    body = "gpu_benchmark(gpu_kernels.read, *map(device_buffer, (1 << 20, 1 << 16)))"
    pytester.makepyfile(
        test_it=f"def test_it(gpu_benchmark, gpu_kernels, device_buffer):\n    {body}\n"
    )
    tree = Side("working tree", "", pytester.path, pytester.path, sys.executable, str)
    run = SideRun(tree, None, ("-q", "--gpumem-device=sim"), ("test_it.py",), os.environ)
    results = pytester.path / "results.json"
    assert pytester.run(*run.command(results)).ret == 0
    assert json.loads(results.read_text())["gpumem"]["rows"]
