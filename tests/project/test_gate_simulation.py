"""The simulation of the gate, with counts that take seconds; the script runs it with larger ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gate_simulation as gate
import numpy as np
import pytest

from pytest_gpumem.outcomes import Outcome

RECORD = Path(__file__).parents[2] / "ci" / "records" / "no-gpu" / "gate_simulation.json"
FULL = gate.LAYOUTS["12 x 1"]


def random() -> gate.Random:
    return np.random.default_rng(1)


def test_unchanged_gates_are_green() -> None:
    tally, generator = gate.Tally(), random()
    for _ in range(20):
        tally.gate(gate.suite_of(gate.MIXED, FULL, 0.0015, generator), same_code=False)
    assert tally.share(Outcome.PASS) == 100.0
    assert 1.0 <= np.mean(tally.runs) < 6.0


def test_a_row_that_loses_two_limits_is_red_and_costs_its_duet_alone() -> None:
    rows = gate.suite_of(gate.LARGE, FULL, 0.0, random())
    rows[3].head = 0.02
    tally = gate.Tally()
    tally.gate(rows, same_code=False)
    assert tally.outcomes == {Outcome.FAIL: 1}
    assert tally.pairs == [5]
    assert tally.runs == [(15 + 2 * 5) / 15]


def test_a_row_that_loses_its_limit_is_seldom_green() -> None:
    by_time, same_code = gate.lone_rows(gate.K32, FULL, 0.003, 1.0, 200)
    assert by_time.share(Outcome.PASS) <= 4.0
    assert by_time.share(Outcome.FAIL) <= 3.0
    assert by_time.share(Outcome.PASS) < same_code.share(Outcome.PASS) <= 12.0


def test_a_slow_down_by_another_cause_than_the_code_passes_seldom() -> None:
    """What ran is the same, and the row loses two limits."""
    for kernel in (gate.K256, gate.K32, gate.K2, gate.K4):
        _, same_code = gate.lone_rows(kernel, gate.LAYOUTS["1 x 3"], 0.003, 2.0, 100)
        assert same_code.share(Outcome.PASS) <= 2.0


def test_a_slow_mode_of_head_alone_passes_where_the_screen_misses_it() -> None:
    passes, generator = 0, random()
    for _ in range(400):
        (row,) = gate.suite_of([gate.K256], FULL, 0.0, generator)
        row.kernel = replace(gate.K256, mode=0.1)
        passes += row.passes_screen([], same_code=False)
    assert 0.85 < passes / 400 < 0.94


def test_creep_is_red_soon_after_its_sum_passes_the_limit() -> None:
    for saved_before in [1, 12]:
        levels = 0.001 * np.arange(1, 60)
        red = gate.first_red(gate.K256, levels.tolist(), saved_before, 0.0, random())
        assert red is not None, saved_before
        assert 0.01 < red < 0.02, saved_before


def test_a_loss_after_a_gain_is_red_although_the_code_is_faster_than_at_first() -> None:
    levels = np.log(0.8) + 0.008 * np.arange(12)
    red = gate.first_red(gate.K32, levels.tolist(), 12, 0.0, random())
    assert red is not None
    assert red < np.log(0.85)


def full_history() -> gate.History:
    history = gate.History(gate.K256)
    for day in range(12):
        history.save(day, 0.0, 0.0)
    return history


def test_a_full_reference_takes_faster_days_and_the_day_after_each() -> None:
    history = full_history()
    for day, level in enumerate((0.5, -0.005, -0.02, 0.0, 0.0, -0.02), 12):
        history.save(day, level, 0.0)
    assert [day for day, _, _ in history.saved[12:]] == [14, 15, 17]
    assert history.restarts == 0


def test_three_faster_days_in_turn_begin_it_anew() -> None:
    history = full_history()
    for day in range(12, 15):
        history.save(day, -0.02, 0.0)
    assert history.restarts == 1
    assert [day for day, _, _ in history.saved] == [12, 13, 14]


def test_processes_are_drawn_with_the_stated_spreads() -> None:
    for heavy in [False, True]:
        kernel = replace(gate.K2, heavy=heavy)
        logs = kernel.processes(random(), 20_000)
        # Quartiles of a normal lie 1.349 standard deviations apart, those of this t 1.529 / sqrt(3).
        apart = 1.529 / np.sqrt(3) if heavy else 1.349
        quartiles = np.quantile(logs, (0.25, 0.75))
        assert quartiles[1] - quartiles[0] == pytest.approx(apart * kernel.spread, rel=0.03), heavy


def test_a_mode_is_a_share_of_the_processes() -> None:
    logs = replace(gate.K256, mode=0.3).processes(random(), 5000)
    assert np.mean(logs > 0.04) == pytest.approx(0.3, abs=0.02)


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads(RECORD.read_text())


def test_the_record_keeps_what_the_docs_promise(record: Any) -> None:
    """Where limits fit the noise: a loss of a limit is seldom green, an unchanged gate never red."""
    for line in record["tables"]["unchanged_gates"]:
        assert max(line["red"], line["red same"]) <= 1.0
        if line["suite"] != "all 1 %":
            assert line["red"] == line["open"] == line["red same"] == line["open same"] == 0.0
    for line in record["tables"]["losses"]:
        assert line["1"] <= 3.0
        assert line["1 same"] <= 14.0
        assert line["2"] <= 0.2
    for line in record["tables"]["gains"]:
        assert line["red"] >= 95.0


def test_the_record_has_a_table_of_each_kind(record: Any) -> None:
    text = gate.table(record)
    for lines in gate.TABLES:
        assert f"\n\n{lines.__doc__}\n" in text
        assert record["tables"][lines.__name__]
    assert gate.summary(record).splitlines()[1].startswith("1 x 3")


def test_the_script_draws_the_same_again_and_writes_what_it_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["gate_simulation.py", "--draws", "1", "--json", str(tmp_path / "a.json")]
    )
    assert gate.main() == 0
    written = json.loads((tmp_path / "a.json").read_text())
    assert capsys.readouterr().out == gate.table(written) + "\n"
    assert written["tables"]["gains"] == json.loads(json.dumps(list(gate.gains(1))))


def test_no_draws_are_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gate_simulation.py", "--draws", "0"])
    with pytest.raises(SystemExit):
        gate.main()
    assert "--draws 0: at least 1" in capsys.readouterr().err
