"""The cost of a range without a tool: what the script measures, and its record."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import range_cost

RECORD = Path(__file__).parents[3] / "ci" / "records" / "no-gpu" / "range_cost.json"


def test_the_empty_loop_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(range_cost.time, "process_time", lambda: clock[0])

    def takes(seconds: float) -> range_cost.Loop:
        return lambda rounds: clock.__setitem__(0, clock[0] + rounds * seconds)

    monkeypatch.setattr(range_cost, "empty", takes(2.0))
    found = range_cost.costs(3, {"same": takes(2.0), "more": takes(7.0)}, rounds=10)
    assert found == {"same": [0.0] * 3, "more": [5.0] * 3}


def test_the_record_keeps_what_is_promised() -> None:
    record = json.loads(RECORD.read_text())
    assert record["limit"] == range_cost.LIMIT == 0.2e-6
    assert statistics.median(record["seconds"]["ours"]) <= record["limit"]
    assert "ours" in range_cost.table(record)
