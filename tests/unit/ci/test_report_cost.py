"""The bench of the report, at a small size."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import report_cost

RECORD = Path(__file__).parents[3] / "ci" / "records" / "no-gpu" / "report_cost.json"


def test_a_small_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        sys, "argv", ["report_cost.py", "--tests", "10", "--processes", "2", "--runs", "1", "--json", str(tmp_path / "r.json")]
    )
    monkeypatch.setattr(report_cost, "SECONDS", 1e9)
    assert report_cost.main() == 0
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["tests"], record["processes"], len(record["seconds"]), len(record["cpu_seconds"])) == (10, 2, 1, 1)
    assert 10_000 < record["bytes"] < 200_000
    assert "10 tests x 2 processes" in capsys.readouterr().out
    monkeypatch.setattr(report_cost, "measure", lambda *_: ([1.0], [1.0], report_cost.BYTES + 1))
    assert report_cost.main() == 1


def test_rows_are_parametrised_and_differ() -> None:
    rows = report_cost.rows(20, random.Random(1))
    assert len({row.key for row in rows}) == 20
    assert len(rows[0].measurement.samples) == 320


def test_the_record_keeps_its_limits() -> None:
    record = json.loads(RECORD.read_text())
    assert (record["tests"], record["processes"]) == (300, 20)
    assert record["median_seconds"] <= record["limit_seconds"] == report_cost.SECONDS
    assert record["bytes"] <= record["limit_bytes"] == report_cost.BYTES
