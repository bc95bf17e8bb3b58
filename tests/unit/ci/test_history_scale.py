"""A generated history: a small run of the proof, and what the proof calls broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("quick_processes")

SCRIPT = Path(__file__).parents[3] / "ci" / "bench" / "history_scale.py"


def test_planted_changes_are_found(tmp_path: Path) -> None:
    pytest.importorskip("ruptures", reason="ruptures is of the extra history")
    history_scale = pytest.importorskip("history_scale")
    out = tmp_path / "record.json"
    command = [sys.executable, str(SCRIPT), "--tests", "200", "--runs", "400", "--out", str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert out.exists(), ended.stderr
    record = json.loads(out.read_text())
    (whole, *_) = record["histories"]
    assert (whole["found"], len(whole["planted"])) == (40, 40)
    assert whole["false"] <= 2
    assert whole["counts"]["found"] == whole["counts"]["planted"]
    assert record["read_once"]["seconds"] > 0
    assert history_scale.table(record) in ended.stdout
    assert not history_scale.meets({**whole, "found": 39})
