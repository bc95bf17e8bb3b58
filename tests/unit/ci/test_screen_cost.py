"""The script that says what loading and judging cost, and that both grow with the number of tests and no faster."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import screen_cost


def test_the_cost_of_a_test_does_not_grow_with_the_suite(tmp_path: Path) -> None:
    """Eight times the tests take eight times as long; were each compared with all, they would take 64 times."""
    seconds = {}
    for count in (30, 240):
        screen_cost.store(tmp_path / str(count), count, 6)
        gc.collect()
        seconds[count] = min(screen_cost.spend(tmp_path / str(count), count).seconds for _ in range(3))
    assert seconds[240] / 240 < 2 * seconds[30] / 30


def test_what_is_above_its_limit() -> None:
    def cost(rows: int, seconds: float, nbytes: int = 10**8) -> object:
        return screen_cost.Cost(rows, seconds / 2, seconds / 4, seconds / 4, nbytes)

    assert screen_cost.misses([cost(300, 1.0), cost(10_000, 40.0)]) == []
    assert screen_cost.misses([cost(300, 2.5)]) == ["300 tests take 2.50 s, more than 2.0 s"]
    assert screen_cost.misses([cost(300, 1.0, 4 * 10**8)]) == ["300 tests take 400 MB, more than 300 MB"]
    assert screen_cost.misses([cost(300, 1.0), cost(3000, 20.0)]) == [
        "a test among 3000 takes 2.00 times as long as among 300, more than 1.5"
    ]
    assert screen_cost.misses([cost(1000, 90.0)]) == []


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cost.json"
    monkeypatch.setattr("sys.argv", ["screen_cost.py", "--rows", "5", "10", "--processes", "3", "--repeats", "1", "--json", str(file)])
    assert screen_cost.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    record = json.loads(file.read_text())
    assert [cost["rows"] for cost in record["costs"]] == [5, 10]
    assert all(cost["bytes"] > 10**7 and cost["load"] > 0 and cost["judge"] > 0 for cost in record["costs"])
    assert record["misses"] == []
