"""The gate's validation: its verdicts follow from raw data by the shipped code, and are as simulated raw data say they should be."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import gate_validation as script
import gate_validation_collect as collect
import gate_validation_peers as peers
import gate_validation_rows as rows
import gate_validation_summary as summary
import gate_validation_tables as tables
import gate_validation_together as together
import gate_validation_verdicts as verdicts
import numpy as np
import pytest
import renew_tables
from scipy.stats import binomtest

from pytest_gpumem.baselines.history import Accepted
from pytest_gpumem.baselines.layout import written
from pytest_gpumem.compare.pairs import compare_sides
from pytest_gpumem.compare.sides import side
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.records.schema import device_to_json

DEVICE = json.loads(json.dumps(device_to_json(choose("sim:h200").facts)))
FEW = tuple(row for row in rows.ROWS if row.planned in (0.0, 0.01) and not row.bimodal and row.size in ("256 MiB", "32 MiB"))
PROCESSES = collect.PILOTS + verdicts.BASELINE + 4 * verdicts.PAIRS
"""The fewest that duets get their processes of."""


def few(patched: pytest.MonkeyPatch) -> None:
    for module in (collect, verdicts, tables):
        patched.setattr(module, "ROWS", FEW)


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        few(patched)
        found: dict[str, Any] = {
            "kind": "gate_validation",
            "simulated": True,
            "options": list(collect.OPTIONS["all"]),
            "ended": "2026-11-21T00:00:00+00:00",
            "cards": [collect.simulated(DEVICE, 1, PROCESSES)],
        }
        found["verdicts"] = verdicts.judged(found)
    return found


@pytest.fixture
def record(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small simulated record with its verdicts, of the rows that the targets are about; there are no others meanwhile."""
    few(monkeypatch)
    return made


def outcomes(record: dict[str, Any], scenario: str, size: str) -> Counter[str]:
    return summary.tallies(record["verdicts"])[scenario, size].letters


# Rows


def test_every_row_has_a_name_of_its_own_and_the_row_that_it_stands_for() -> None:
    assert len(rows.BY_NAME) == len(rows.ROWS)
    for row in rows.ROWS:
        assert rows.BY_NAME[row.of].of == row.of
        assert rows.BY_NAME[row.of].size == row.size
        assert row.changed == bool(row.planned or row.unrelated)


def test_a_twin_has_as_much_more_work_as_the_pilot_says_it_takes() -> None:
    row = rows.BY_NAME["triad-256+1"]
    assert rows.work_of(row, {}) == pytest.approx(1.01 * row.work, rel=1e-5)
    half = {"triad-268435456": 0.5}
    assert rows.work_of(row, half) == pytest.approx(1.01**2 * row.work, rel=1e-5)
    assert rows.work_of(rows.BY_NAME["chase+1"], {}) == 404
    slow = rows.work_of(rows.BY_NAME["bimodal"], {}, slow=True)
    assert slow == pytest.approx((1 + rows.MODES) * row.work, rel=1e-5)


def test_a_slope_is_what_latency_grows_by_and_stays_within_reason() -> None:
    assert rows.slope(10.0, 10.0 * 1.1**0.8, "triad", 1 << 28) == pytest.approx(0.8, rel=1e-4)
    assert rows.slope(10.0, 9.0, "triad", 1 << 28) == rows.SLOPES[0]


def test_a_pilots_results_give_a_slope_for_every_launch_that_was_measured_twice() -> None:
    def row(name: str, more: float, latency: float | None) -> dict[str, Any]:
        measurement = None if latency is None else {"latency": latency}
        return {"nodeid": f"gate_validation_suite.py::test_pilot[{name}-{more}]", "measurement": measurement}

    def results(latency: float) -> dict[str, Any]:
        name, other = "triad-268435456", "copy-268435456"
        first = [row(name, 1, 2e-4), row(name, rows.PILOT_MORE, latency)]
        return {"gpumem": {"rows": [*first, row(other, 1, 1e-4), row(other, rows.PILOT_MORE, None)]}}

    found = collect.piloted([results(2e-4 * 1.1**0.8), results(2e-4 * 1.1)])
    assert found == {"triad-268435456": pytest.approx(0.9, rel=1e-4)}


# Raw data


def test_what_is_kept_of_seconds_comes_back_to_a_tenth_of_a_nanosecond() -> None:
    medians = [24.8123e-6, 24.7e-6, 25.00004e-6]
    assert collect.unpacked(collect.packed(medians)) == pytest.approx(medians, abs=6e-11)
    stats = dict(zip(collect.STATS, (96, 1e-7, 24.9e-6, 24.6e-6, 24.8e-6, 24.85e-6, 25e-6), strict=True))
    row = {"m": collect.packed(medians), "s": collect.packed_stats(stats, collect.units(medians[0]))}
    for name, value in collect.unpacked_stats(row).items():
        assert value == (96 if name == "rounds" else collect.units(stats[name]))


def test_two_processes_on_a_device_are_a_pilot_and_a_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: the worker, pytest, the plugin on the simulated device, and what is kept of its results."""
    names = {0: [], 1: ["copy-2", "copy-2+10"]}

    def job(number: int, _seed: int, _rows: object) -> dict[str, Any]:
        pilot = [] if number else ["copy-2097152"]
        return {"number": number, "rows": names[number], "slow": [], "pilot": pilot, "more": rows.PILOT_MORE}

    monkeypatch.setattr(collect, "job", job)
    monkeypatch.setattr(collect, "PILOTS", 1)
    said: list[str] = []
    card = collect.measured("sim:h200", tmp_path, 0, collect.Stop(120.0, 2, time.monotonic()), said.append)
    assert (card["failed"], said) == ([], [])
    assert rows.SLOPES[0] <= card["slopes"]["copy-2097152"] <= rows.SLOPES[1]
    (process,) = card["processes"]
    assert process["rows"].keys() == {"copy-2", "copy-2+10"}
    assert process["spoilt"] == {}
    assert None not in process["controls"]
    assert card["device"]["simulated"]
    data = verdicts.Data(card)
    base, more = (data.measurement(1, name, "copy-2") for name in ("copy-2", "copy-2+10"))
    assert base is not None
    assert base.taken is not None
    assert base.taken.controls is not None
    assert base.taken.controls.latency == pytest.approx(process["controls"][4] * collect.UNIT)
    assert more is not None
    assert base.traffic == more.traffic  # of the twin nobody is told that it moves more
    assert len(base.medians) == 16
    stats = collect.unpacked_stats(process["rows"]["copy-2"])
    assert stats["min"] * collect.UNIT <= base.latency <= 1.2 * stats["median"] * collect.UNIT


def test_a_row_that_was_not_measured_well_is_left_out_with_the_reason() -> None:
    def row(name: str, outcome: str) -> dict[str, Any]:
        seen = {
            "placements": [[1e-5, 2e-5, 3e-5], [2e-5]],
            "overhead": 3e-6,
            "sampler": "blocked",
            "floor": 1e-6,
            "target": "copy",
            "mode": "clean-cold",
            "traffic": {"reads": 3, "writes": 4},
            "footprint": 7,
            "taken": None,
            "conditions": [{"sm_clock_hz": 1.98e9}, {"sm_clock_hz": 1.98e9 if name == "good" else 1.7e9}],
            "during": None,
        }
        verdict = {"outcome": outcome, "reason": "throttled" if outcome == "UNRELIABLE" else "no limit"}
        return {"nodeid": f"s.py::test_row[{name}]", "measurement": seen, "failed": False, "verdict": verdict}

    stats = dict.fromkeys(collect.STATS, 1e-5)
    benchmarks = [{"fullname": f"s.py::test_row[{name}]", "stats": stats} for name in ("good", "hot", "slow")]
    results = {
        "gpumem": {"rows": [row("good", "PASS"), row("hot", "UNRELIABLE"), row("slow", "PASS")], "device": DEVICE},
        "benchmarks": benchmarks,
    }
    process, card = collect.reduced(results, {"number": 1})
    assert process["spoilt"] == {"hot": "throttled"}
    assert process["rows"].keys() == {"good", "slow"}
    assert process["rows"]["good"]["m"] == [200_000, 0]
    assert (process["mhz"], process["rows"]["slow"]["mhz"]) == (1980, [1980, 1700])
    assert "mhz" not in process["rows"]["good"]
    assert card["rows"]["good"]["bytes"] == 7


def test_a_process_that_would_end_too_late_is_not_begun() -> None:
    stop = collect.Stop(100.0, 50, time.monotonic() - 90)
    assert stop.now(3, 12.0)
    assert not stop.now(3, 5.0)
    assert stop.now(50, 5.0)
    stop.asked.set()
    assert stop.now(3, 5.0)


# Verdicts


def test_no_process_is_the_head_of_a_row_twice_nor_of_its_baseline(record: dict[str, Any]) -> None:
    data = verdicts.Data(record["cards"][0])
    assert len(data.baseline) == verdicts.BASELINE
    for processes in (1, 4, 2 * verdicts.PAIRS):
        heads = [number for run in data.runs(processes) for number in run]
        assert len({*heads, *data.baseline}) == len(heads) + len(data.baseline)
        assert all(len(run) == processes for run in data.runs(processes))
        assert len(data.heads) - processes < len(heads) <= len(data.heads)


def test_unchanged_code_raises_no_alarm_and_slower_code_is_caught(record: dict[str, Any]) -> None:
    for size in ("256 MiB", "32 MiB"):
        same = outcomes(record, verdicts.UNCHANGED, size)
        assert same["P"] > 0.95 * same.total()
        assert same["F"] + same["S"] == 0
        slower = outcomes(record, verdicts.planned_name(0.01), size)
        assert slower["F"] >= 0.95 * slower.total() > 0
    assert outcomes(record, verdicts.SEVERAL, "32 MiB")["F"] == 0


def test_duets_and_the_common_shift_decide(record: dict[str, Any]) -> None:
    for one in record["verdicts"]["duets"]:
        assert one["outcome"] == ("P" if one["scenario"] == verdicts.UNCHANGED else "F")
    both = {
        scenario: [one["outcome"] for one in record["verdicts"]["common"] if one["scenario"] == scenario]
        for scenario in (verdicts.UNCHANGED, verdicts.planned_name(0.01))
    }
    assert {scenario: set(found) for scenario, found in both.items()} == dict(zip(both, ({"P"}, {"F"}), strict=True))


def test_code_that_is_slower_than_it_should_be_is_an_alarm() -> None:
    """What is planted as an unrelated allocation that costs nothing costs 3 %: the verdicts say so."""
    with pytest.MonkeyPatch.context() as patched:
        both = tuple(rows.BY_NAME[name] for name in ("triad-256", "triad-256 after an allocation"))
        for module in (collect, verdicts):
            patched.setattr(module, "ROWS", both)
        card = collect.simulated(DEVICE, 2, collect.PILOTS + verdicts.BASELINE + 9, worse=0.03)
        (asked,) = (one for one in verdicts.scenarios() if one.name == verdicts.ALLOCATION)
        (found,) = verdicts.screens(verdicts.Data(card), asked)
    assert found["outcomes"] == "FFF"


def test_a_screen_says_what_gpumem_compare_says_of_such_files(record: dict[str, Any], tmp_path: Path) -> None:
    card = record["cards"][0]
    data = verdicts.Data(card)
    (asked,) = (one for one in verdicts.scenarios() if one.name == verdicts.planned_name(0.01))

    def store(folder: Path, number: int, shown: dict[str, str]) -> None:
        folder.mkdir(exist_ok=True)
        accepted = [one for of, row in shown.items() if (one := data.accepted(number, row, of)) is not None]
        text = written(
            id=str(number),
            utc=datetime.fromisoformat(data.processes[number]["utc"]),
            revision=None,
            key=data.device.key,
            written_by="a test",
            device=data.device,
            rows=[Accepted(one.nodeid, one.measurement, one.process) for one in accepted],
        )
        (folder / f"{number}.json").write_text(text)

    sized = [row for row in asked.rows if rows.BY_NAME[row].size == "32 MiB"]
    for number in data.baseline:
        store(tmp_path / "base", number, {row: row for row in sized})
    runs = data.runs(6)[:2]
    for index, run in enumerate(runs):
        for number in run:
            store(tmp_path / f"head{index}", number, {row: asked.rows[row] for row in sized})
    told = {screen["row"]: screen["outcomes"] for screen in record["verdicts"]["screens"] if screen["scenario"] == asked.name}
    for index in range(len(runs)):
        compared = compare_sides(side(str(tmp_path / "base")), side(str(tmp_path / f"head{index}")), "1%", force=False)
        for row in compared.rows:
            assert verdicts.LETTERS[row.verdict.outcome] == told[row.nodeid][index]


def test_twins_are_as_slow_as_all_processes_say(record: dict[str, Any]) -> None:
    found = summary.measured_ratios(record)
    for name in ("triad-256+1", "copy-32+1"):
        share, error = found[name]
        assert share == pytest.approx(0.01, abs=1e-3)
        assert 0 < error < 5e-4
    share, error = found["triad-32 after an allocation"]
    assert abs(share) < 5 * error


def test_a_record_replays_and_an_altered_one_does_not(record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(given: dict[str, Any]) -> int:
        path = tmp_path / "record.json"
        script.write(path, given)
        monkeypatch.setattr(sys, "argv", ["gate_validation.py", "--replay", str(path)])
        return script.main()

    asked = [one for one in verdicts.scenarios() if one.name == verdicts.planned_name(0.01)]
    monkeypatch.setattr(verdicts, "scenarios", lambda measured: asked)
    kept = copy.deepcopy(record)
    kept["verdicts"] = verdicts.judged(kept)
    assert replay(kept) == 0
    head = kept["cards"][0]["processes"][verdicts.BASELINE]["rows"]["triad-256+1"]
    head["m"][0] = round(0.99 * head["m"][0])
    assert replay(kept) == 1


def test_the_record_has_a_line_for_each_process_and_is_drawn_by_its_script(record: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    script.write(path, record)
    assert json.loads(path.read_text()) == record
    assert path.read_text().count("\n") == len(record["cards"][0]["processes"]) + 2
    drawn = renew_tables.bench_table(record)
    assert drawn.startswith("SIMULATED: NVIDIA H200")
    for part in ("unchanged code", "slower code", "duets of single rows", "common shift", "peers on the same data", "too few"):
        assert part in drawn
    assert "NOT MET" not in drawn
    assert "not judged yet" in tables.table({name: value for name, value in record.items() if name != "verdicts"})


def test_a_target_that_is_missed_is_said(record: dict[str, Any]) -> None:
    altered = copy.deepcopy(record)
    screen = next(one for one in altered["verdicts"]["screens"] if one["scenario"] == verdicts.UNCHANGED)
    screen["outcomes"] = "F" + screen["outcomes"][1:]
    assert next(target.met for target in summary.targets(altered)) is False
    assert "NOT MET" in tables.table(altered)


# Bounds


def test_bounds_are_those_of_clopper_and_pearson() -> None:
    assert summary.interval(0, 3000)[1] == pytest.approx(1 - 0.025 ** (1 / 3000))
    found = binomtest(297, 299).proportion_ci(0.95, method="exact")
    assert summary.interval(297, 299) == pytest.approx((found.low, found.high))
    assert summary.interval(0, 0) == (0.0, 1.0)


def test_verdicts_that_hang_together_count_less() -> None:
    # Nothing shows how they hang together: as many as there are clusters.
    assert summary.clustered([0] * 40, [10] * 40) == summary.interval(0, 40)
    # All verdicts of a cluster agree: again.
    low, high = summary.clustered([10] * 20 + [0] * 20, [10] * 40)
    assert (low, high) == pytest.approx(summary.interval(20, 40), abs=0.01)
    # Independent ones: about all of them.
    drawn = np.random.default_rng(0).binomial(10, 0.5, 400)
    low, high = summary.clustered(drawn.tolist(), [10] * 400)
    whole = summary.interval(int(drawn.sum()), 4000)
    assert high - low == pytest.approx(whole[1] - whole[0], rel=0.1)


def test_what_a_process_could_not_measure_is_no_verdict() -> None:
    tally = summary.Tally("1%", 1)
    tally.add({"outcomes": "PIISF-", "card": 0, "resolves": 0.01, "head": "x"})
    assert tally.letters == Counter(P=1, I=2, F=1, S=1)
    assert (tally.count, tally.caught) == (5, 2)


def test_a_twin_that_is_not_as_slow_as_planned_is_shown_and_not_counted(record: dict[str, Any]) -> None:
    twin, size = "triad-256+1", "256 MiB"
    assert not summary.off_plan(twin, {twin: (0.0091, 0.0001)})
    assert summary.off_plan(twin, {twin: (0.0089, 0.0001)})
    assert not summary.off_plan("triad-256", {"triad-256": (0.5, 0.0)})  # no twin has a plan to be off
    key = verdicts.planned_name(0.01), size
    every, left = summary.tallies(record["verdicts"])[key], summary.tallies(record["verdicts"], {twin})[key]
    assert left.rows == every.rows - 1
    assert twin not in left.heads
    # Where the twin stands for unchanged code, what it was meant to be is no matter.
    same = verdicts.UNCHANGED, size
    assert summary.tallies(record["verdicts"], {twin})[same].rows == summary.tallies(record["verdicts"])[same].rows
    slowed = copy.deepcopy(record)
    for process in slowed["cards"][0]["processes"]:
        process["rows"][twin]["m"][0] = round(1.02 * process["rows"][twin]["m"][0])
    assert f"*{verdicts.planned_name(0.01)}" in tables.table(slowed)
    assert "*" not in tables.table(record)


def test_records_count_together(record: dict[str, Any]) -> None:
    (alone, both) = (next(one.sentence for one in summary.targets(*many)) for many in ([record], [record, record]))
    count = int(alone.split(" in ")[1].split()[0])
    assert f"in {2 * count} verdicts" in both
    said = list(together.lines([record, record]))
    assert said[0].startswith("2 records of NVIDIA H200")
    assert "promised 0.1 %" in said[-1]


def test_works_of_twins_follow_from_earlier_records(record: dict[str, Any]) -> None:
    slopes = summary.seen_slopes([record])
    true, _ = summary.measured_ratios(record)["triad-256+1"]
    row, (card,) = rows.BY_NAME["triad-256+1"], record["cards"]
    more = rows.work_of(row, card["slopes"]) / row.work
    assert slopes["triad-256+1"] == pytest.approx(math.log1p(true) / math.log(more))
    assert rows.work_of(row, slopes) / row.work == pytest.approx(1.01 ** (1 / slopes["triad-256+1"]), rel=1e-4)
    assert summary.seen_slopes([record, record]) == pytest.approx(slopes)


# Peers


def stats(samples: Any) -> dict[str, float]:
    quartiles = np.quantile(samples, (0.25, 0.5, 0.75))
    found = (len(samples), samples.std(ddof=1), samples.mean(), samples.min(), *quartiles)
    return {name: float(one) for name, one in zip(collect.STATS, found, strict=True)}


@pytest.mark.parametrize(
    ("check", "slower", "said"),
    [
        ("mean:5%", 0.04, "."),
        ("mean:5%", 0.06, "X"),
        ("median:1%", 0.02, "X"),
        ("min:1%", 0.005, "."),
        (peers.NVBENCH, 0.0005, "."),
        (peers.NVBENCH, 0.005, "X"),
        (peers.NVBENCH, -0.005, "."),
        (peers.ROBUST, 0.0, "."),
        (peers.ROBUST, 0.004, "?"),
        (peers.ROBUST, 0.02, "X"),
        (peers.ROBUST, -0.02, "."),
    ],
)
def test_peers_rules(check: str, slower: float, said: str) -> None:
    samples = 1e5 * (1 + 0.001 * np.random.default_rng(0).normal(size=200))
    assert peers.verdict(check, stats(samples), stats(samples * (1 + slower))) == said


def test_peers_take_the_smaller_noise_and_no_wide_one() -> None:
    quiet, noisy = (1e5 * (1 + spread * np.random.default_rng(1).normal(size=400)) for spread in (0.001, 0.03))
    assert peers.verdict(peers.NVBENCH, stats(quiet), stats(noisy * 1.01)) == "X"
    assert peers.verdict(peers.ROBUST, stats(noisy), stats(noisy)) == "?"
    still = stats(quiet) | {"stddev": 0.0}
    assert peers.verdict(peers.NVBENCH, still, still) == "?"


def test_every_question_is_asked_once_and_has_its_limits() -> None:
    asked = verdicts.scenarios()
    assert len({one.name for one in asked}) == len(asked)
    for one in asked:
        assert one.rows.keys() == one.limits.keys() == one.processes.keys()
        assert one.rows
    (slower,) = (one for one in asked if one.name == verdicts.planned_name(0.01))
    assert {(slower.limits[row], slower.processes[row]) for row in slower.rows if row.endswith("-32")} == {("1%", 6)}
    assert all(rows.BY_NAME[head].planned == 0.01 for head in slower.rows.values())


def test_the_small_set_has_both_rows_of_every_question_that_it_asks() -> None:
    small = {row.name for row in rows.SETS["small"]}
    assert set(rows.BY_NAME) > rows.LEFT_OUT
    assert all(row.of in small for row in rows.SETS["small"])
    asked = verdicts.scenarios(small)
    assert {one.name for one in asked} >= {verdicts.UNCHANGED, verdicts.HALVED, verdicts.planned_name(0.01), verdicts.ALLOCATION}
    assert all(set(one.rows) | set(one.rows.values()) <= small for one in asked)
    assert all(set(one.limits) == set(one.rows) == set(one.processes) for one in asked)
