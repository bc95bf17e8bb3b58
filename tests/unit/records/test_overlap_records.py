"""How much overlap hides, and what it is held against."""

from __future__ import annotations

import pytest

from pytest_gpumem.records.measurement import Overlap, Part


def overlap(*seconds: float, bound: float | None = None, chunks: int | None = 4) -> Overlap:
    parts = tuple(Part(f"part {i}", s) for i, s in enumerate(seconds))
    return Overlap(
        parts, sequential=sum(seconds), bound=bound or max(seconds), streams=4, chunks=chunks
    )


def test_the_share_runs_from_one_after_another_to_the_bound() -> None:
    for latency, hidden in [(8.0, 0.0), (5.0, 1.0), (6.5, 0.5), (9.5, -0.5)]:
        assert overlap(5.0, 3.0).hidden(latency) == pytest.approx(hidden), latency


def test_the_estimate_is_the_texts() -> None:
    for transfer, kernel, estimate in [
        (4.0, 8.0, 8.0 + 4.0 / 4),
        (8.0, 4.0, 8.0 + 4.0 / 4),
        (6.0, 6.0, 7.5),
    ]:
        assert overlap(transfer, kernel).estimate == pytest.approx(estimate), transfer


def test_where_nothing_was_cut_there_is_no_estimate() -> None:
    assert overlap(1.0, 2.0, chunks=None).estimate is None


def test_parts_that_share_an_engine_leave_nothing_to_hide() -> None:
    shared = overlap(3.0, 3.0, bound=6.0)
    assert (shared.hideable, shared.hidden(5.0)) == (None, None)
    assert overlap(100.0, 1.0).hidden(100.0) is None  # 1 % is less than can be told
