"""The simulation of the duet: its noise, the pair that decides, and that a broken promise is named."""

from __future__ import annotations

import json
from pathlib import Path

import duet_simulation as duet
import numpy as np
import pytest

from pytest_gpumem.judging.paired import judge_pairs

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("noise", duet.NOISES)
def test_pairs_lie_around_the_change(noise: str) -> None:
    rng = np.random.default_rng(1)
    drawn = np.array([duet.log_ratios(rng, noise, 0.002, 0.02) for _ in range(200)])
    assert drawn.shape == (200, duet.ROUNDS)
    assert np.median(drawn) == pytest.approx(np.log(1.02), abs=3e-4)
    if noise == "normal":
        assert np.std(drawn) == pytest.approx(0.002 * np.sqrt(2), rel=0.05)


def test_a_verdict_is_that_of_the_first_pair_that_decides() -> None:
    values = duet.log_ratios(np.random.default_rng(2), "normal", 0.004, 0.02)
    found = duet.decided(values)
    after = [
        judge_pairs({"": values[:pairs]}, {"": duet.DELTA})[""].outcome
        for pairs in range(1, duet.ROUNDS + 1)
    ]
    first = next(index for index, outcome in enumerate(after, 1) if outcome is not None)
    assert (found.pairs, found.outcome) == (first, after[first - 1])


def test_spreads_are_the_larger_ones_of_the_records() -> None:
    known = duet.spreads([ROOT / path for path in duet.RECORDS])
    assert list(known) == [256, 32, 2]
    assert known[2] > known[32] > known[256] > 0


def test_a_small_run_keeps_its_promises_and_a_broken_one_is_named() -> None:
    record = duet.simulate(20, 2, {32: 0.0013}, 1)
    assert json.loads(json.dumps(record)) == record == duet.simulate(20, 2, {32: 0.0013}, 2)
    assert duet.missed(record) == []
    by_code = {
        row["change"]: row["outcomes"] for row in record["single"] if row["noise"] == "normal"
    }
    assert by_code[0.0] == {"PASS": 20}
    assert by_code[50.0] == {"FAIL": 20}
    record["single"][0]["outcomes"] = {"FAIL": 10, "PASS": 10}
    assert "MISS  normal, 0.130 %, same: FAIL in 50.00 %, promised 0.1 %" in duet.table(record)
