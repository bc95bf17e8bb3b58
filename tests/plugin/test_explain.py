"""`--gpumem-explain` in a session, and `gpumem explain` from outside, on the simulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from forked import COMMAND
from sessions import SIMULATED, row_in, rows_in

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
"""


def test_a_failed_row_says_why_and_how_to_learn_the_rest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=SUITE)
    side = pytester.path / "side.txt"
    side.write_text("base")
    for _ in range(3):
        assert pytester.runpytest_inprocess(*SIMULATED, "--gpumem-explain", "--gpumem-save", "-k", "lookup").ret == 0
    side.write_text("head")
    done = pytester.runpytest_inprocess(*SIMULATED, "--gpumem-explain", "-k", "lookup", "--benchmark-json=out.json")
    said = " ".join(done.stdout.str().split())
    assert "why: test_it.py::test_lookup: " in said
    assert "up to this: 8 MiB no longer stay in L2, their persisting window is gone; set-aside" in said
    assert "further causes, which need more counts: gpumem explain --base REVISION test_it.py::test_lookup" in said
    row = row_in(pytester.path)
    assert row["why"][0].partition(": ")[0] != row["key"]  # the row has its name
    assert [kernel["name"] for kernel in row["measurement"]["activity"]["kernels"]] == ["reset_data"]
    # Unasked, no cause is estimated: only what ran differently is known.
    plain = pytester.runpytest_inprocess(*SIMULATED, "-k", "lookup", "--benchmark-json=plain.json")
    assert "ran differently: kernel reset_data: access-policy window 8 MiB" in plain.stdout.str()
    assert "up to this" not in plain.stdout.str()
    assert rows_in(pytester.path, "plain.json")[0]["measurement"]["activity"] is None


def test_both_sides_are_measured_and_explained(pytester: pytest.Pytester) -> None:
    folders = [pytester.mkdir(name) for name in ("base", "head")]
    for folder in folders:
        (folder / "test_it.py").write_text(SUITE)
        (folder / "side.txt").write_text(folder.name)
        (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-c", COMMAND, "explain", "--base", "../base", "--pairs", "1"]
    command += ["--json", "why.json", "--keep", "kept", "test_it.py::test_copy", "test_it.py::test_same", "--", *SIMULATED[1:]]
    done = subprocess.run(command, cwd=folders[1], env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pageable instead of pinned: 16.78 MB from host to device in each launch" in done.stdout
    assert "nothing to explain: no slow-down beyond its interval" in done.stdout
    plain = json.loads((folders[1] / "why.json").read_text())
    assert plain["simulated"] is True
    first = {one["key"].partition("::")[2]: one["first"] for one in plain["explanations"]}
    assert first == {"test_copy": "pageable", "test_same": None}
    # Results that base wrote stand for it; head's processes are no runs of their own, and only the test that was asked for is run.
    environment = {**os.environ, "COLUMNS": "200", "GITHUB_STEP_SUMMARY": "steps.md", "GITHUB_ACTIONS": "true"}
    stored = [*command[:3], "explain", "--base", "kept/base.json", "--pairs", "1", "test_it.py::test_copy", "--", ".", *SIMULATED[1:]]
    done = subprocess.run(stored, cwd=folders[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pageable instead of pinned" in done.stdout
    assert "note: only base measured test_it.py::test_same" in done.stdout
    assert not (folders[1] / "steps.md").exists()
    again = subprocess.run(
        [*command[:3], "explain", "kept/base.json", "kept/head.json"], cwd=folders[1], capture_output=True, text=True, env=os.environ
    )
    assert again.returncode == 0, again.stderr
    assert "pageable instead of pinned" in again.stdout
