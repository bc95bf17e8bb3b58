"""The tutorial from its first run to the gate, on the simulated device: the commands of the page, in its order."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from tutorial import PAGE, ROOT, Project, change, missing, steps

CODES = {"first run": 0, "baseline": 0, "red": 1, "fix": 0, "gate": 0}
"""With what each step that needs no GPU ends."""


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_whole_story(tmp_path: Path, programs: Path) -> None:
    project = Project(
        tmp_path,
        GPUMEM_DEVICE="sim",
        GPUMEM_BUDGET="20 ms",
        PATH=f"{programs}:{os.environ['PATH']}",
    )
    told = {name: step for name, step in steps().items() if not step.needs_gpu}
    assert [*told] == [*CODES]
    for name, step in told.items():
        if name == "red":
            project.apply(change("break"))
        *first, last = step.commands
        for command in first:
            assert project.run(command)[0] == 0
        code, output = project.run(last)
        assert code == CODES[name], f"{last}\n{output}"
        assert not missing(step.shown, output), f"{last}\n{output}"
    assert (project.folder / "gpumem-results" / "summary.md").exists()


def test_a_line_that_is_not_printed_is_missed() -> None:
    assert missing(("a ... c", "x ... z"), "a b c\nx y") == ["x ... z"]
    assert missing(("ends ...",), "ends") == []


@pytest.mark.parametrize(
    "file",
    re.findall(r"^<!-- file: (\S+ \S+) -->$", PAGE.read_text(encoding="utf-8"), re.MULTILINE),
)
def test_the_code_shown_is_the_projects(file: str) -> None:
    name, function = file.split()
    shown = re.search(
        rf"^<!-- file: {re.escape(file)} -->\n```python\n(.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    source = (ROOT / "tests" / "examples" / "pixelbox" / name).read_text(encoding="utf-8")
    there = {
        node.name: ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
    }
    assert shown is not None
    assert shown[1].rstrip() == there[function]
