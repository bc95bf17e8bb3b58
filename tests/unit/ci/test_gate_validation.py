"""The gate's validation: its verdicts follow from raw data by the shipped code, and are as simulated raw data say they should be."""

from __future__ import annotations

import copy
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gate_validation as script
import gate_validation_collect as collect
import gate_validation_rows as rows
import gate_validation_table as tables
import gate_validation_verdicts as verdicts
import numpy as np
import pytest
import renew_tables
from scipy.stats import binomtest

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.records.schema import device_to_json

DEVICE = json.loads(json.dumps(device_to_json(choose("sim:h200").facts)))
FEW = tuple(row for row in rows.ROWS if row.planned in (0.0, 0.01) and not row.bimodal and row.size in ("256 MiB", "32 MiB"))
PROCESSES = collect.PILOTS + verdicts.BASELINE + 4 * verdicts.PAIRS
"""The fewest that duets get their processes of."""


def few(patched: pytest.MonkeyPatch) -> None:
    for module in (collect, verdicts):
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


def outcomes(record: dict[str, Any], question: str, size: str) -> Counter[str]:
    found = (one for one in record["verdicts"]["screens"] if one["question"] == question and rows.BY_NAME[one["row"]].size == size)
    return Counter("".join(one["outcomes"] for one in found))


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
        return {"nodeid": f"gate_validation_worker.py::test_pilot[{name}-{more}]", "measurement": measurement}

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
        throttled = outcome == "UNDECIDED"
        verdict = {"outcome": outcome, "reason": "throttled" if throttled else "no limit", "code": "conditions" if throttled else None}
        return {"nodeid": f"s.py::test_row[{name}]", "measurement": seen, "failed": False, "verdict": verdict}

    stats = dict.fromkeys(collect.STATS, 1e-5)
    benchmarks = [{"fullname": f"s.py::test_row[{name}]", "stats": stats} for name in ("good", "hot", "slow")]
    results = {
        "gpumem": {"rows": [row("good", "PASS"), row("hot", "UNDECIDED"), row("slow", "PASS")], "device": DEVICE},
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
    for processes in (1, 3, 6):
        heads = [number for run in data.runs(processes) for number in run]
        assert len({*heads, *data.baseline}) == len(heads) + len(data.baseline)
        assert len(data.heads) - processes < len(heads) <= len(data.heads)


def test_unchanged_code_passes_and_slower_code_does_not(record: dict[str, Any]) -> None:
    for size in ("256 MiB", "32 MiB"):
        same = outcomes(record, verdicts.SEVERAL, size)
        assert same["P"] > 0.95 * same.total()
        assert same["F"] + same[verdicts.ABOVE] == 0
        at = outcomes(record, verdicts.planned_name(0.01), size)
        assert at["P"] + at["F"] <= 0.02 * at.total()
    twice = outcomes(record, verdicts.TWICE, "256 MiB")
    assert twice["F"] > 0.5 * twice.total()
    assert twice["P"] == 0


def test_duets_decide(record: dict[str, Any]) -> None:
    found = {(one["question"], one["outcome"]) for one in record["verdicts"]["duets"]}
    assert found == {(verdicts.SEVERAL, "P"), (verdicts.TWICE, "F")}


def test_questions_have_both_rows_in_every_set() -> None:
    for name, chosen in rows.SETS.items():
        there = {row.name for row in chosen}
        asked = list(verdicts.questions(there))
        assert len({one.name for one in asked}) == len(asked) > 2, name
        for one in asked:
            assert set(one.rows) | set(one.rows.values()) <= there
            assert one.asked.keys() == one.rows.keys()


def test_code_that_is_slower_than_it_should_be_is_an_alarm() -> None:
    """What is planted as an unrelated allocation that costs nothing costs 3 %: the verdicts say so."""
    with pytest.MonkeyPatch.context() as patched:
        both = tuple(rows.BY_NAME[name] for name in ("triad-256", "triad-256 after an allocation"))
        for module in (collect, verdicts):
            patched.setattr(module, "ROWS", both)
        card = collect.simulated(DEVICE, 2, collect.PILOTS + verdicts.BASELINE + 9, worse=0.03)
        (asked,) = (one for one in verdicts.questions() if one.name == verdicts.ALLOCATION)
        (found,) = verdicts.screens(verdicts.Data(card), asked)
    assert found["outcomes"] == "FFF"


def test_twins_are_as_slow_as_all_processes_say(record: dict[str, Any]) -> None:
    found = verdicts.measured_ratios(record)
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

    asked = [one for one in verdicts.questions() if one.name == verdicts.planned_name(0.01)]
    monkeypatch.setattr(verdicts, "questions", lambda measured: asked)
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
    for part in ("unchanged, 1 process", "+1 % held to 0.5 %", "duets of single rows", "peers on the same data"):
        assert part in drawn
    assert max(map(len, drawn.splitlines())) <= 120
    assert "not judged yet" in tables.table({name: value for name, value in record.items() if name != "verdicts"})


def test_works_of_twins_follow_from_earlier_records(record: dict[str, Any]) -> None:
    slopes = verdicts.seen_slopes([record])
    true, _ = verdicts.measured_ratios(record)["triad-256+1"]
    row, (card,) = rows.BY_NAME["triad-256+1"], record["cards"]
    more = rows.work_of(row, card["slopes"]) / row.work
    assert slopes["triad-256+1"] == pytest.approx(math.log1p(true) / math.log(more))
    assert rows.work_of(row, slopes) / row.work == pytest.approx(1.01 ** (1 / slopes["triad-256+1"]), rel=1e-4)
    assert verdicts.seen_slopes([record, record]) == pytest.approx(slopes)


def test_bounds_count_runs_and_baselines_and_never_verdicts(record: dict[str, Any]) -> None:
    """Two FAILs of one run are one wrong run, of one wrong baseline."""
    altered = copy.deepcopy(record)
    screens = [one for one in altered["verdicts"]["screens"] if one["question"] == verdicts.SEVERAL and one["row"].endswith("-256")]
    runs = len(screens[0]["outcomes"])
    for one in screens[:2]:
        one["outcomes"] = "F" + one["outcomes"][1:]
    line = next(line for line in tables.table(altered).splitlines() if line.startswith("unchanged  ") and "256 MiB" in line)
    assert f"1 of {runs}, <" in line
    assert line.endswith("1 of 1, <100")
    high = binomtest(1, runs).proportion_ci(0.95, method="exact").high
    assert tables.at_most(1, runs) == pytest.approx(high)
    # The same session twice is two baselines.
    both = next(line for line in tables.table(record, record).splitlines() if line.startswith("unchanged  ") and "256 MiB" in line)
    assert f"0 of {2 * runs}, <" in both
    assert "0 of 2, <84.2" in both


def test_a_pass_of_code_that_is_slower_than_its_limit_is_wrong() -> None:
    assert tables.wrong_letters(None, 0.01) == "F" + verdicts.ABOVE
    assert tables.wrong_letters(0.0101, 0.01) == "P"
    assert tables.wrong_letters(0.0099, 0.01) == ""


def test_a_further_session_is_appended(record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"

    def call(*more: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gate_validation.py", "--simulated", "4", "--raw", "--json", str(path), *more])
        return script.main()

    with pytest.raises(SystemExit) as refused:
        call("--append")
    assert refused.value.code == 2
    assert call() == call("--append", "--seed", "1") == 0
    cards = json.loads(path.read_text())["cards"]
    assert [len(card["processes"]) for card in cards] == [2, 2]
    assert cards[0]["processes"] != cards[1]["processes"]
    before = path.read_text()
    with pytest.raises(SystemExit):
        call("--append", "--rows", "small")
    assert path.read_text() == before


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
        (verdicts.NVBENCH, 0.0005, "."),
        (verdicts.NVBENCH, 0.005, "X"),
        (verdicts.NVBENCH, -0.005, "."),
        (verdicts.ROBUST, 0.0, "."),
        (verdicts.ROBUST, 0.004, "?"),
        (verdicts.ROBUST, 0.02, "X"),
        (verdicts.ROBUST, -0.02, "."),
    ],
)
def test_peers_rules(check: str, slower: float, said: str) -> None:
    samples = 1e5 * (1 + 0.001 * np.random.default_rng(0).normal(size=200))
    assert verdicts.peer_verdict(check, stats(samples), stats(samples * (1 + slower))) == said


def test_peers_take_the_smaller_noise_and_no_wide_one() -> None:
    quiet, noisy = (1e5 * (1 + spread * np.random.default_rng(1).normal(size=400)) for spread in (0.001, 0.03))
    assert verdicts.peer_verdict(verdicts.NVBENCH, stats(quiet), stats(noisy * 1.01)) == "X"
    assert verdicts.peer_verdict(verdicts.ROBUST, stats(noisy), stats(noisy)) == "?"
    still = stats(quiet) | {"stddev": 0.0}
    assert verdicts.peer_verdict(verdicts.NVBENCH, still, still) == "?"
