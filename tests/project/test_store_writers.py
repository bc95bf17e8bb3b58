"""Writers of one baseline that are killed: a small run of the proof, and what the proof calls broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "ci" / "bench" / "store_writers.py"


def test_no_acknowledged_run_is_lost(tmp_path: Path) -> None:
    store_writers = pytest.importorskip("store_writers")
    out = tmp_path / "record.json"
    # In a separate process: it forks.
    command = [sys.executable, str(SCRIPT), "--writers", "4", "--runs", "8", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    record = json.loads(out.read_text())
    assert (record["acknowledged"], record["lost"], record["damaged"]) == (32, 0, None)
    assert record["kills"] > 0
    assert record["processes"] >= 32
    assert store_writers.kept(record)
    assert not store_writers.kept({**record, "lost": 1})
