"""A record is a summary: it has no samples, and tables are drawn from it as from the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from keep_record import kept

from pytest_gpumem.records.schema import document_from_json

SUITE = Path(__file__).parents[2] / "ci" / "records" / "nvidia-h200" / "suite.json"


@pytest.fixture(scope="module")
def run() -> dict[str, Any]:
    """A run of two tests, with samples."""
    suite: dict[str, Any] = json.loads(SUITE.read_text())
    rows = suite["gpumem"]["rows"][:2]
    for row in rows:
        measurement = row["measurement"]
        measurement["placements"] = [
            [0.9 * median, median, 2 * median] for (median,) in measurement["placements"]
        ]
        measurement["conditions"] = [{"sm_clock_hz": 1.98e9}, {}]
    return {
        **suite,
        "benchmarks": [{"stats": {"data": [1.0]}}],
        "gpumem": {**suite["gpumem"], "rows": rows},
    }


def test_a_record_has_medians_and_no_samples(run: dict[str, Any]) -> None:
    record = kept(run)
    assert {*record} == {"datetime", "commit_info", "gpumem"}
    before, after = (document_from_json(one["gpumem"]).rows for one in (run, record))
    for row, summary in zip(before, after, strict=True):
        assert row.measurement is not None
        assert summary.measurement is not None
        assert all(len(samples) == 1 for samples in summary.measurement.placements)
        assert summary.measurement.latency == pytest.approx(row.measurement.latency, rel=1e-7)
        assert summary.measurement.half_width == row.measurement.half_width
        assert (summary.key, summary.verdict, summary.limits) == (row.key, row.verdict, row.limits)
    assert kept(record) == record


def test_tests_are_chosen_by_their_names(run: dict[str, Any]) -> None:
    first, second = run["gpumem"]["rows"]
    name = first["label"] or first["nodeid"]
    assert name not in second["nodeid"]
    assert [row["nodeid"] for row in kept(run, first["nodeid"])["gpumem"]["rows"]].count(
        first["nodeid"]
    ) >= 1


def test_a_record_of_peers_has_no_runs() -> None:
    assert kept({"kind": "peers", "runs": [1], "summary": {"rows": []}}) == {
        "kind": "peers",
        "summary": {"rows": []},
    }
