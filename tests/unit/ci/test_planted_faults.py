"""The script plants a fault, counts what it cost, and holds it to the promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import planted_faults
import pytest


def test_a_fault_is_counted_and_held_to_the_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    monkeypatch.setattr(planted_faults, "MODES", {"no workers": ()})
    arguments = ["planted_faults.py", "--device", "sim", "--only", "illegal access", "segfault", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert planted_faults.main() == 0
    sessions = json.loads(file.read_text())["sessions"]
    lost, crashed = sessions["illegal access"]["no workers"], sessions["segfault"]["no workers"]
    assert (len(lost["passed"]), len(lost["failed"]), lost["lost"]) == (20, 20, [])
    assert (len(crashed["passed"]), crashed["failed"], len(crashed["lost"])) == (13, ["test_13"], 26)
    assert crashed["rows"] == crashed["printed_as_passed"][::2]
    assert "segfault" in capsys.readouterr().out
    measuring = planted_faults.project(tmp_path, simulated=True)
    assert planted_faults.broken("segfault", "-n 2", crashed, measuring)
    assert planted_faults.broken("segfault", "no workers", {**crashed, "rows": crashed["rows"][1:]}, measuring)
    assert planted_faults.broken("segfault", "no workers", {**crashed, "locked": True}, measuring)
