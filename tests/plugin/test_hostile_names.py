"""Test ids, labels and reasons from which a log, a terminal or a page could be taken over."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from sessions import Run

from pytest_gpumem.cli import main

HOSTILE = "test_a\n::add-mask::x\x1b[2J\u202e\udcff.py"
"""Name of a file with tests."""
MEASURED = """
import pytest
def test_fast(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
def test_slow(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, max_latency="1 ns")
def test_skipped(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
    pytest.skip("why\\n::add-mask::x\\x1b[2J")
"""


def refuse_control(text: str, where: str) -> None:
    for line in re.split(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", text):
        assert not line.lstrip().startswith("::add-mask"), f"{where}: {line!r}"
        shown = line.replace("\t", "")
        assert shown.isprintable() or "\N{NO-BREAK SPACE}" in shown, f"{where}: {line!r}"


def ours(result: pytest.RunResult) -> str:
    """What the plugin prints: without pytest's own lines about tests."""
    text = result.stdout.str()
    return text[text.index("gpumem: NVIDIA") :]


def test_nothing_is_taken_over(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / HOSTILE).write_text(MEASURED)
    for name, value in {
        "GITHUB_ACTIONS": "true",
        "GITHUB_STEP_SUMMARY": "step.md",
        "PY_COLORS": "0",
    }.items():
        monkeypatch.setenv(name, value)
    files = ["--benchmark-json=out.json", "--gpumem-report=out.html"]
    once = ("-v", "-rN", "--gpumem-save", "--benchmark-disable", "--import-mode=importlib")
    result = gpumem(*once, *files)
    result.assert_outcomes(passed=1, failed=1, skipped=1)
    refuse_control(ours(result), "terminal")
    assert r"test_a\n::add-mask::x\x1b[2J\u202e\udcff.py::test_skipped: the test" in re.sub(
        r"\s+", " ", ours(result)
    )
    for name in ("out.html", "step.md"):
        refuse_control((pytester.path / name).read_text(), name)
    failure = result.stdout.str()
    (told,) = (line for line in failure.splitlines() if line.startswith("  verdict "))
    assert r"test_a\n::add-mask::x\x1b[2J" in told

    # Every command escapes the names that it reads from the saved files.
    monkeypatch.chdir(pytester.path)
    (folder,) = {path.parent for path in Path(".benchmarks").rglob("gpumem/*.json")}
    stored = json.loads(next(folder.glob("*.json")).read_text())
    (row,) = stored["content"]["rows"]
    os.environ.pop("GITHUB_ACTIONS")
    for arguments, code in (
        (["report", "none\n::add-mask::x"], 4),
        (["report", "out.json", "-o", "a\n::add-mask::x.html"], 0),
        (
            [
                "accept",
                row["nodeid"],
                "--change",
                "time=5%",
                "--reason",
                "because\n::add-mask::x\x1b[2J",
            ],
            0,
        ),
    ):
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == code, done.output
        refuse_control(done.output, " ".join(arguments))
    accepted = gpumem("-v", "-rN", "-k", "fast", "--gpumem-save")
    refuse_control(ours(accepted), "after accept")
