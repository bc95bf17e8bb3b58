"""Start, process and small tests are timed from fresh processes, and held to their targets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wall_time

pytestmark = pytest.mark.usefixtures("quick_processes")


def test_every_part_is_recorded_and_held_to_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "record.json"
    run = wall_time.session

    def session(*given: Any, byte_code: Path | None = None, **named: Any) -> dict[str, float]:
        return run(*given, byte_code=byte_code or tmp_path, **named)  # to compile everything four times decides nothing here

    monkeypatch.setattr(wall_time, "session", session)
    monkeypatch.setattr(wall_time, "TARGETS", {"start, warm": 1e-3, "start, cold": 1e3})
    monkeypatch.setattr(sys, "argv", ["wall_time.py", "--device", "sim", "--repeats", "1", "--small", "6", "--json", str(file)])
    assert wall_time.main() == 1
    record = json.loads(file.read_text())
    assert wall_time.missed(record) == ["start, warm"]
    readings = {part: sides["after"] for part, sides in record["readings_s"].items()}
    assert list(readings) == [
        "alone, cold",
        "start, cold",
        "start, first",
        "pytest alone",
        *wall_time.STAGES[:-1],
        "start, warm",
        "process",
        "small",
    ]
    warm = [readings[part][0] for part in (*wall_time.STAGES[:-1], "start, warm", "process")]
    assert warm == sorted(warm)
    assert warm[0] > 0
    assert "start, warm" in capsys.readouterr().out
