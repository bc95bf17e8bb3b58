"""A few damaged files and killed runs; the scripts make many by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "ci"


@pytest.mark.usefixtures("quick_processes")
def test_what_is_damaged_is_refused_and_what_is_stored_stays() -> None:
    for script, cases, passed in [("hostile_files.py", 11, 11), ("killed_saves.py", 2, 2)]:
        command = [sys.executable, str(CI / script), "--cases", str(cases)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{passed} passed, 0 failed" in done.stdout, script
