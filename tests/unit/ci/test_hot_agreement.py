"""Hot times against do_bench_cudagraph on the same placements: what the pairs say."""

from __future__ import annotations

import sys

import hot_agreement
import pytest
from triad_bench import TriadBench, prepared


def test_placements_cancel_in_the_difference() -> None:
    theirs = [2.0e-6, 2.1e-6, 2.2e-6, 2.05e-6]
    found = hot_agreement.summary([(1.005 * value, 1.02 * value, value) for value in theirs])
    assert found["less_median"] == pytest.approx(0.005)
    assert found["less_median_low"] == pytest.approx(found["less_median_high"])
    assert found["less_mean"] == pytest.approx(1.005 / 1.02 - 1)
    assert found["between_placements_ours"] == pytest.approx(found["between_placements_median"])
    assert found["between_placements_ours"] > 0.03


def test_the_table_names_both_of_their_values() -> None:
    record = {
        "device": {"name": "NVIDIA H200", "driver": "580"},
        "ended": "2026-11-21T00:00:00",
        "pairs": {"2": [[2.0e-6, 2.1e-6, 2.01e-6], [2.1e-6, 2.2e-6, 2.11e-6], [2.2e-6, 2.3e-6, 2.2e-6]]},
        "launches": {"2": [1500, 1510, 1490]},
        "lengths": {"triad, 2 MiB, around": {str(length): 2e-6 for length in hot_agreement.LENGTHS}},
    }
    text = hot_agreement.table(record)
    assert "do_bench_cudagraph, mean" in text
    assert "do_bench_cudagraph, median" in text
    assert "1500" in text


def test_a_simulated_device_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["hot_agreement.py", "--device", "sim"])
    with pytest.raises(SystemExit):
        hot_agreement.main()
    assert "--device sim: Triton needs a GPU" in capsys.readouterr().err


def test_every_length_of_a_graph_is_timed_by_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_agreement, "LENGTHS", (20, 200))
    bench = TriadBench(prepared("sim"), [], index=0)
    try:
        found = hot_agreement.by_length(bench, 2)
    finally:
        bench.close()
    assert list(found) == [f"{what}, {where}" for what in ("triad, 2 MiB", "nothing to do") for where in ("events inside", "around")]
    for lengths in found.values():
        assert [int(length) for length in lengths] == list(hot_agreement.LENGTHS)
        assert max(lengths.values()) < 2 * min(lengths.values())
    inside, around = found["triad, 2 MiB, events inside"], found["triad, 2 MiB, around"]
    assert all(inside[length] <= around[length] for length in inside)
