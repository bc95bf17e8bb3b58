"""Persisting L2, the granules of a set-aside and resets: the cases, the claims, and the script on the simulated device."""

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


def test_resets_and_two_windows_on_the_simulated_device(tmp_path: Path) -> None:
    file = tmp_path / "l2_windows.json"
    done = run("--device", "sim:h200", "--json", str(file), "--parts", "resets,streams")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(file.read_text())
    assert said["device"]["simulated"]
    assert [len(said[part]) for part in ("resets", "streams", "placements")] == [11, 6, 0]
    assert all(
        set(one["found"]) == {"never", "none", "window", "context"} for one in said["resets"]
    )
    assert l2_persistence.table(said) in done.stdout


def test_a_mistake_is_refused_before_anything_runs() -> None:
    for arguments, named in [
        (("--device", "sim:gtx"), "--device sim:gtx"),
        (("--device", "sim", "--parts", "placement"), "'placement'"),
        (("--device", "sim", "--placements", "1"), "--placements 1"),
        (("--device", "sim", "--json", "/no/such/folder/x.json"), "there is no folder"),
    ]:
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert named in done.stderr, arguments
