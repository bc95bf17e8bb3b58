"""Rows of workers beside serial ones of the same card."""

from __future__ import annotations

from typing import Any

import pytest
import two_workers


def row(latency: float, card: str = "a", spoilt: str | None = None) -> dict[str, Any]:
    return {"card": card, "latency": latency, "half_width": 0.001, "spoilt": spoilt}


def record(**rows: dict[str, Any]) -> dict[str, Any]:
    serial = [{"x": row(100e-6), "y": row(50e-6)}, {"x": row(110e-6, "b"), "y": row(55e-6, "b")}, {"x": row(100.2e-6), "y": row(50e-6)}]
    workers = {"x": row(100.1e-6), "y": row(55.01e-6, "b"), **rows}
    runs: list[dict[str, Any]] = [{"workers": 0, "seconds": 10.0, "rows": one, "compared": [], "notice": False} for one in serial]
    runs.append({"workers": 2, "seconds": 6.0, "rows": workers, "compared": two_workers.compared(serial, workers), "notice": False})
    return {"runs": runs, "device": {"name": "G", "driver": "1"}, "ended": "2026-01-01"}


def test_rows_are_compared_with_those_of_their_own_card() -> None:
    by_row = {one["row"]: one for one in record()["runs"][-1]["compared"]}
    assert by_row["x"]["difference"] == pytest.approx(0.0, abs=1e-9)
    assert by_row["x"]["noise"] == pytest.approx(0.001, rel=0.01)
    assert by_row["y"]["difference"] == pytest.approx(0.01 / 55, rel=1e-6)
    assert all(two_workers.promises(record()).values())
    (line,) = [line for line in two_workers.table(record()).splitlines() if line.split()[:1] == ["2"]]
    assert line.split()[1:5] == ["2", "2", "6.0", "0"]


@pytest.mark.parametrize(
    ("rows", "broken"),
    [
        ({"x": row(120e-6)}, {"differs by at most 0.2%", "times the noise"}),
        ({"x": row(100.1e-6, spoilt="1 other process on the device")}, {"spoilt"}),
        ({"y": row(50e-6)}, {"both cards"}),
        ({"z": row(1e-6)}, {"every row is measured"}),
    ],
)
def test_a_broken_promise_is_named(rows: dict[str, Any], broken: set[str]) -> None:
    missed = [promise for promise, kept in two_workers.promises(record(**rows)).items() if not kept]
    assert len(missed) == len(broken)
    assert all(any(words in promise for promise in missed) for words in broken)
