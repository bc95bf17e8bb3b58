"""The simulation of the duet's errors: its noise, its bounds, and that a broken promise is said."""

from __future__ import annotations

import json
from pathlib import Path

import duet_simulation
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("noise", ["normal", "heavy-tailed"])
def test_a_pair_spreads_by_the_root_of_two_processes(noise: str) -> None:
    rng = np.random.default_rng(1)
    drawn = duet_simulation.log_ratios(rng, duet_simulation.NOISES[noise], 0.01, 0.02, 200_000)
    assert len(drawn) == 200_000
    assert np.std(drawn) == pytest.approx(0.01 * np.sqrt(2), rel=0.05)
    assert np.median(drawn) == pytest.approx(np.log(1.02), abs=1e-4)


def test_a_drift_turns_its_sign_within_a_block() -> None:
    drawn = duet_simulation.log_ratios(np.random.default_rng(2), lambda rng, shape: np.arange(shape[0]), 1.0, 0.0, 400)
    assert {tuple(pair) for pair in drawn.reshape(-1, 2)} == {(1.0, -1.0), (-1.0, 1.0)}


def test_spreads_are_the_larger_ones_of_the_records() -> None:
    known = duet_simulation.spreads([ROOT / path for path in duet_simulation.RECORDS])
    assert list(known) == [2, 32, 256]
    assert known[2] > known[32] > known[256] > 0


def test_a_small_run_keeps_its_promises_and_a_broken_one_is_said() -> None:
    record = {"device": "D", **duet_simulation.simulate(40, 4, {2: 0.005, 32: 0.0013}, seed=3)}
    assert json.loads(json.dumps(record)) == record
    broken = [words for words, _, _, kept in duet_simulation.claims(record) if not kept]
    assert [words for words in broken if not words.startswith("unchanged, all")] == []  # so few verdicts cannot show 1 in 1000
    record["single"][0]["outcomes"] = {"FAIL": 20, "PASS": 20}
    assert "BROKEN 2 MiB, normal, +0.0 %: alarms: 50.000 %" in duet_simulation.table(record)
    record["suites"][-1]["common FAIL"] = 0
    assert "common shift caught: 0.000 %" in duet_simulation.table(record)
