"""What readings contain besides the kernel: the summary finds what a made record hides, and the script runs on the simulated device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reading_noise

from pytest_gpumem.devices.opening import Chosen, choose
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.ranges import Ranges

NS = 1e-9
STREAMS, PLACES = reading_noise.STREAMS, 32


def run(random: np.random.Generator, overhead: float, *, follows: str = "position") -> dict[str, Any]:
    """A process whose launches all take `overhead` longer, its triads 15 ns by drawing; streams differ by 30 ns, placements by 80."""
    streams, places, slots = random.normal(0, 30 * NS, STREAMS), random.normal(0, 80 * NS, PLACES), random.normal(0, 200 * NS, PLACES)
    streams, places, slots = streams - streams.mean(), places - places.mean(), slots - slots.mean()
    rest = 4e-6 + overhead + random.normal(0, 15 * NS)
    triad = rest + places[:, None] + streams[None, :]
    both = []
    for _ in range(2):
        order = random.permutation(PLACES)
        seen = slots if follows == "position" else places[order]
        both.append({"order": order.tolist(), "readings": (rest + 350 * NS + streams[0] + seen).tolist()})
    kinds = [f"{kind}, {state}" for kind in reading_noise.KINDS for state in reading_noise.STATES]
    return {
        "error": None,
        "overhead": {kind: (1e-6 + (overhead if "nothing" not in kind else 0) + streams).tolist() for kind in kinds},
        "triad": {"2": triad.tolist()},
        "graphs": {"2": both},
        "together": {"2": {"positions": [5.0e-6] + [5.6e-6] * 7, "alone": 5.0e-6}},
    }


def record(*, follows: str = "position", processes: int = 14) -> dict[str, Any]:
    random = np.random.default_rng(3)
    runs = [run(random, random.normal(0, 60 * NS), follows=follows) for _ in range(processes)]
    device = {"name": "NVIDIA H200", "simulated": False, "driver": "580"}
    return {"device": device, "ended": "2026-11-21T00:00:00", "mib": [2], "placements": PLACES, "rounds": 6, "runs": runs}


def test_the_spread_between_processes_is_that_of_their_means() -> None:
    held = record()
    (found,) = reading_noise.triads(held)
    means = [np.mean(one["triad"]["2"]) for one in held["runs"]]
    assert found["processes"] == pytest.approx(np.std(means, ddof=1))
    low, high = found["interval"]
    # chi-square with 13 degrees of freedom: 5.009 and 24.736
    assert (low, high) == (
        pytest.approx(found["processes"] * (13 / 24.736) ** 0.5, rel=1e-4),
        pytest.approx(found["processes"] * (13 / 5.009) ** 0.5, rel=1e-4),
    )
    assert 20 * NS < found["streams"] < 40 * NS
    assert 70 * NS < found["placements"] < 90 * NS
    assert found["by_streams"]["8"] == pytest.approx(found["processes"])
    assert found["by_streams"]["1"] != pytest.approx(found["processes"])


def test_subtracting_the_own_launch_overhead_leaves_what_is_not_overhead() -> None:
    (found,) = reading_noise.triads(record())
    by = {one["kind"]: one for one in found["corrected"]}
    assert by["16 bytes, hot"]["left"] < 25 * NS < found["processes"]
    assert by["16 bytes, hot"]["correlation"] > 0.9
    assert by["16 bytes, hot"]["low"] < by["16 bytes, hot"]["correlation"] < by["16 bytes, hot"]["high"]
    assert by["nothing, cold"]["left"] == pytest.approx(found["processes"])


def test_overheads_have_their_mean_and_both_spreads() -> None:
    held = record()
    found = {one["kind"]: one for one in reading_noise.overheads(held)}
    assert len(found) == 6
    means = [np.mean(one["overhead"]["16 bytes, cold"]) for one in held["runs"]]
    assert found["16 bytes, cold"]["mean"] == pytest.approx(np.mean(means))
    assert found["16 bytes, cold"]["processes"] == pytest.approx(np.std(means, ddof=1))
    assert found["nothing, hot"]["processes"] == pytest.approx(0, abs=1e-12)
    assert 20 * NS < found["nothing, hot"]["streams"] < 40 * NS


@pytest.mark.parametrize("follows", ["position", "placement"])
def test_a_graphs_readings_follow_the_position_or_the_placement(follows: str) -> None:
    (found,) = reading_noise.graphs(record(follows=follows))
    other = {"position": "placement", "placement": "position"}[follows]
    assert found[f"by_{follows}"] == pytest.approx(1)
    assert abs(found[f"by_{other}"]) < 0.2
    assert found["alone_by_placement"] == pytest.approx(1)
    assert found["above"] == pytest.approx(350 * NS, abs=1e-15)
    assert found["deviation"] == pytest.approx((200 if follows == "position" else 80) * NS, rel=0.15)
    assert found["alone_deviation"] == pytest.approx(80 * NS, rel=0.15)


def test_samples_behind_one_hold_are_set_against_those_alone() -> None:
    (found,) = reading_noise.together(record())
    assert found["positions"] == pytest.approx([0.0] + [600 * NS] * 7, abs=1e-15)
    assert found["above"] == pytest.approx(600 * NS)


def test_the_correlation_has_fishers_interval_and_none_where_nothing_varies() -> None:
    first = np.arange(12.0)
    second = first + np.array([1, -1] * 6)
    found = reading_noise.correlation(first, second)
    r = np.corrcoef(first, second)[0, 1]
    assert found["correlation"] == pytest.approx(r)
    assert found["low"] == pytest.approx(np.tanh(np.arctanh(r) - 1.96 / 3), rel=1e-3)
    assert found["high"] == pytest.approx(np.tanh(np.arctanh(r) + 1.96 / 3), rel=1e-3)
    assert reading_noise.correlation(first, np.ones(12)) == {"correlation": None, "low": None, "high": None}
    assert reading_noise.correlation(first, first)["correlation"] == pytest.approx(1)


def test_the_middle_mean_leaves_outliers_out() -> None:
    assert reading_noise.middle_mean([1.0, 2.0, 4.0, 900.0]) == 3.0
    assert reading_noise.middle_mean([5.0]) == 5.0


def test_failed_workers_are_left_out_and_too_few_are_said() -> None:
    held = record()
    held["runs"][0] = {"error": "broken"}
    assert "13 processes" in reading_noise.table(held)
    few = record(processes=3)
    assert "3 processes answered: at least 4 are needed" in reading_noise.table(few)


def test_the_launch_on_a_full_grid_is_the_one_that_a_measurement_takes_its_overhead_from(monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose("sim").open()
    seen: list[tuple[Any, ...]] = []
    launch = device.kernels.launch

    def watched(one: Any, stream: Any) -> None:
        seen.append((one.kernel.name, one.shape, one.call.arrays))
        launch(one, stream)

    monkeypatch.setattr(device.kernels, "launch", watched)
    conductor = Conductor(device, Ranges(), profiled=False)
    conductor.floors()
    conductor.close()
    timed = seen[-1]
    seen.clear()
    job = {"process": 2, "device": "sim", "mib": [1], "placements": 8, "rounds": 1}
    reading_noise.answer(Chosen(device.facts, lambda: device), job)
    assert timed in seen


def test_where_the_bytes_lie_shows_within_a_process() -> None:
    held = record()
    assert reading_noise.written(held) is None
    random = np.random.default_rng(4)
    for one in held["runs"]:
        one["written"] = random.normal(3e-6, 40 * NS, 500).tolist()
    assert reading_noise.written(held) == pytest.approx(40 * NS, rel=0.1)
    assert "16 bytes, by where they lie" in reading_noise.table(held)


def test_the_table_gives_nanoseconds() -> None:
    text = reading_noise.table(record())
    assert "+0   +600" in text
    assert text.count("idle grid, hot *") == 2
    assert "triad, 2 MiB" in text
    assert text.startswith("NVIDIA H200, driver 580, 2026-11-21")


def test_a_worker_takes_every_reading() -> None:
    job = {"process": 1, "device": "sim", "mib": [1, 2], "placements": 8, "rounds": 1}
    found = reading_noise.answer(choose("sim"), job)
    assert np.shape(found["triad"]["1"]) == (8, STREAMS)
    assert np.mean(found["triad"]["2"]) > np.mean(found["triad"]["1"]) > np.mean(found["overhead"]["16 bytes, hot"])
    assert np.mean(found["overhead"]["16 bytes, hot"]) > np.mean(found["overhead"]["nothing, hot"])
    assert [sorted(graph["order"]) for graph in found["graphs"]["2"]] == [list(range(8))] * 2
    assert len(found["together"]["1"]["positions"]) == reading_noise.TOGETHER


def test_hot_readings_have_no_flush_before_them_and_cold_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[bool, int, bool]] = []
    take = reading_noise.HeldSamples.take

    def watched(self: Any, stream: Any, before: Any, works: Any) -> list[float]:
        taken.append((before is not None, len(works), works[0] is None))
        seconds: list[float] = take(self, stream, before, works)
        return seconds

    monkeypatch.setattr(reading_noise.HeldSamples, "take", watched)
    reading_noise.answer(choose("sim"), {"process": 2, "device": "sim", "mib": [1], "placements": 8, "rounds": 1})
    each = STREAMS * reading_noise.OVERHEAD_SAMPLES
    assert (taken.count((True, 1, True)), taken.count((False, 1, True))) == (each, each)  # nothing between the events
    by_place = reading_noise.WRITTEN_PLACES * reading_noise.OVERHEAD_SAMPLES
    assert taken.count((False, 1, False)) == 2 * each + by_place  # 16 bytes and the idle grid; 16 bytes at each place
    assert taken.count((True, 8, False)) == 1
    assert not any(not flushed and count > 1 for flushed, count, _ in taken)


def test_the_script_runs_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "noise.json"
    options = ["--processes", "4", "--mib", "1", "--placements", "8", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["x", "--device", "sim", *options])
    assert reading_noise.main() == 0
    held = json.loads(file.read_text())
    assert held["kind"] == "reading_noise"
    assert [one["process"] for one in held["runs"]] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.startswith("SIMULATED")
    assert said.rstrip() == reading_noise.table(held)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--processes", "3", "at least 4"),
        ("--placements", "7", "at least 8"),
        ("--mib", "2,2", "each once"),
        ("--device", "sim:x", "no simulated"),
        ("--seconds", "0", "no process was run"),
    ],
)
def test_a_wrong_option_is_said(
    option: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--device", "sim", option, value])
    with pytest.raises(SystemExit):
        reading_noise.main()
    assert said in capsys.readouterr().err
