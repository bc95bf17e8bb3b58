"""The tutorial on a GPU: the planted change turns the CuPy test red too, counters say why, and the fix is green."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from tutorial import Project, change, steps

OPERATION = "tests/test_operations.py::test_channel"
PATTERN = "tests/test_patterns.py::test_channel_pattern"


@pytest.mark.usefixtures("free_gpu")
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_whole_story(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    project = Project(tmp_path, GPUMEM_DEVICE="cuda", GPUMEM_BUDGET="0.3 s")
    output = {}
    for name, step in steps().items():
        if name == "red":
            project.apply(change("break"))
        for command in step.commands:
            code, output[name] = project.run(command)
            assert code == (1 if name == "red" else 0), f"{command}\n{output[name]}"
    assert "5 passed" in output["first run"]
    assert "5 of 5 rows stored" in output["baseline"]
    for test in (OPERATION, PATTERN):
        assert f"FAIL, {test}" in output["red"], output["red"]
        assert f"why: {test}" in output["red"], output["red"]
    assert "sectors per request 4 → 16" in output["red"]
    assert "5 PASS" in output["fix"], output["fix"]
    assert "gpumem gate: green: 5 rows" in output["gate"], output["gate"]
