"""The README's first five minutes, on the simulated device: a test, a baseline, a red gate."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
STEP = re.compile(r"^<!-- five minutes: ([^\n]+) -->\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_a_slow_down_of_an_own_kernel_is_found_with_the_readme_alone(
    tmp_path: Path, programs: Path
) -> None:
    blocks = dict(STEP.findall(README.read_text(encoding="utf-8")))
    (tmp_path / "test_scale.py").write_text(blocks["test_scale.py"], encoding="utf-8")
    own = {"GPUMEM_DEVICE": "sim", "GPUMEM_BUDGET": "5 ms"}
    own["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    lines = [line for name in ("save", "slow down") for line in blocks[name].splitlines()]
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == (line == lines[-1]), done.stdout + done.stderr
    assert re.search(r"^FAIL.*test_scale\.py::test_scale", done.stdout, re.MULTILINE)
