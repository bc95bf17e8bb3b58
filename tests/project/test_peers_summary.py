"""The figures of a record of the side-by-side comparison."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peers_records
import peers_summary
import pytest
from peers_summary import CORRECTED, NVBENCH, OURS

from pytest_gpumem.judging import limits

RECORDS = Path(__file__).parents[2] / "ci" / "records"


def scattered(mean: float, spread: float, n: int = 30) -> list[float]:
    """Values with exactly this mean and standard deviation over mean."""
    raw = np.random.default_rng(3).normal(size=n)
    raw = (raw - raw.mean()) / raw.std(ddof=1)
    return list(mean * (1 + spread * raw))


def test_one_process_has_no_spread() -> None:
    assert peers_summary.spread_interval([1.0]) is None
    assert peers_summary.cost_ratio([1.0], [1.0, 2.0], [1.0], [1.0]) is None
    assert peers_summary.mean_difference([1.0], [1.0, 2.0]) is None


def lines_of(
    values: dict[tuple[str, int], list[float]], walls: dict[tuple[str, int], float] | None = None
) -> dict[tuple[str, int], peers_summary.Line]:
    found = peers_summary.lines(peers_records.record(values, walls))
    return {(line.claim, line.mib): line for line in found}


COST = "cost of precision over nvbench's"


def test_half_the_spread_is_worth_four_times_the_time() -> None:
    for mib, factor, wall, holds in [
        (256, 1.0, 0.19, True),
        (256, 1.0, 0.21, False),
        (256, 0.5, 0.79, True),
        (32, 2.0, 0.0124, True),
        (32, 2.0, 0.0126, False),
        (2, 1.0, 0.06, False),
    ]:
        values = {
            (OURS, mib): scattered(1e-5, 0.001 * factor),
            (NVBENCH, mib): scattered(2e-5, 0.001),
        }
        line = lines_of(values, {(OURS, mib): wall, (NVBENCH, mib): 1.0})[COST, mib]
        assert line.measured is not None
        assert line.measured.value == pytest.approx(factor**2 * wall)
        assert (line.holds, line.beyond_doubt) == (holds, False)


def with_overheads(values: list[float], overheads: list[float | None]) -> dict[str, Any]:
    record = peers_records.record({})
    record["runs"] = [
        peers_records.run(
            [peers_records.case(OURS, 2, value, medians=[value, value], overhead=overhead)],
            number=i,
        )
        for i, (value, overhead) in enumerate(zip(values, overheads, strict=True))
    ]
    return record


def test_corrected_values_have_the_launch_overhead_of_all() -> None:
    record = with_overheads([6.0e-6, 6.1e-6, 6.2e-6], [2.0e-6, 2.1e-6, 2.2e-6])
    rows = {row.way: row for row in peers_summary.rows(record)}
    assert rows[OURS].mean == pytest.approx(rows[OURS + CORRECTED].mean)
    corrected = rows[OURS + CORRECTED].spread
    assert corrected is not None
    assert corrected.value < 1e-9
    raw = rows[OURS].spread
    assert raw is not None
    assert raw.value > 0.01
    parts = peers_summary.made_of(record, 2)
    assert parts is not None
    assert parts["overhead"] == pytest.approx(parts["found"])
    assert parts["rest"] < 1e-6


def test_the_spreads_that_judging_expects_are_those_of_a_card() -> None:
    """Within a factor of two: the spread of twelve processes is known no better."""
    summary = json.loads((RECORDS / "nvidia-h200" / "peers_nvbench.json").read_text())["summary"]
    rows = {(row.way, row.mib): row for row in peers_summary.kept_rows(summary)}
    of_sizes = {parts["mib"]: parts for parts in summary["clean_cold_spread_is_made_of"]}
    for mib in (2, 32, 256):
        row, parts = rows[OURS + CORRECTED, mib], of_sizes[mib]
        assert row.spread is not None
        placements = limits.share_of(limits.BETWEEN_PLACEMENTS, row.mean)
        assert 0.5 < parts["between_placements"] / placements < 2, mib
        expected = math.hypot(
            limits.share_of(limits.BETWEEN_PROCESSES, row.mean),
            placements / math.sqrt(parts["placements"]),
        )
        assert 0.45 < row.spread.value / expected < 2, mib
        assert parts["overhead"] * row.mean < 2 * limits.LAUNCH_OVERHEAD, mib
