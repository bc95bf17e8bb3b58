"""Persisting L2, the granules of a set-aside: the cases, the claims, and the script on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import l2_persistence
import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")

SCRIPT = Path(l2_persistence.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)


def test_two_windows_on_the_simulated_device(tmp_path: Path) -> None:
    file = tmp_path / "l2_windows.json"
    done = run("--device", "sim:h200", "--json", str(file), "--parts", "streams")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(file.read_text())
    assert said["device"]["simulated"]
    assert [len(said[part]) for part in ("streams", "placements")] == [6, 0]
    assert l2_persistence.table(said) in done.stdout


def test_a_mistake_is_refused_before_anything_runs() -> None:
    for arguments, named in [
        (("--device", "sim:gtx"), "--device sim:gtx"),
        (("--device", "sim", "--parts", "placement"), "'placement'"),
        (("--device", "sim", "--json", "/no/such/folder/x.json"), "there is no folder"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert named in done.stderr, arguments
