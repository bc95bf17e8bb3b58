"""The gate's validation: its verdicts follow from raw data by the shipped code, and are as simulated raw data say they should be."""

from __future__ import annotations

import copy
import itertools
import json
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

pytestmark = pytest.mark.usefixtures("quick_processes")

DEVICE = json.loads(json.dumps(device_to_json(choose("sim:h200").facts)))
FEW = tuple(
    row
    for row in rows.ROWS
    if row.planned in (0.0, 0.01) and not row.bimodal and row.size in ("256 MiB", "32 MiB")
)
BASELINE = (1,) * 20
PROCESSES = len(BASELINE) + 4 * verdicts.PAIRS
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
            "options": [],
            "ended": "2026-11-21T00:00:00+00:00",
            "cards": [collect.simulated(DEVICE, 1, PROCESSES, FEW)],
        }
        found["verdicts"] = verdicts.judged(found)
    return found


@pytest.fixture
def record(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small simulated record with its verdicts, of the rows that the targets are about; there are no others meanwhile."""
    few(monkeypatch)
    return made


def outcomes(record: dict[str, Any], question: str, size: str) -> Counter[str]:
    found = (
        one
        for one in record["verdicts"]["screens"]
        if one["question"] == question and rows.BY_NAME[one["row"]].size == size
    )
    return Counter("".join(one["outcomes"] for one in found))


# Rows


def test_every_row_has_a_name_of_its_own_and_the_row_that_it_stands_for() -> None:
    assert len(rows.BY_NAME) == len(rows.ROWS)
    for row in rows.ROWS:
        assert rows.BY_NAME[row.of].of == row.of
        assert rows.BY_NAME[row.of].size == row.size
        assert row.changed == bool(row.planned or row.unrelated)


# Raw data


def test_a_process_on_a_device_measures_every_row(tmp_path: Path) -> None:
    """The whole way: the worker, pytest, the plugin on the simulated device, and what is kept of its results."""
    names = ("copy-2", "copy-2+10")
    said: list[str] = []
    stop = collect.Stop(120.0, 1, time.monotonic())
    card = collect.measured(
        "sim:h200",
        tmp_path,
        0,
        stop,
        said.append,
        [rows.BY_NAME[name] for name in names],
        {"copy-2+10": 0.5},
    )
    assert (card["failed"], said) == ([], [])
    (process,) = card["processes"]
    assert process["rows"].keys() == {*names}
    assert process["spoilt"] == {}
    assert None not in process["controls"]
    assert card["device"]["simulated"]
    data = verdicts.Data(card)
    base, more = (data.measurement(0, name, "copy-2") for name in names)
    assert base is not None
    assert base.provenance is not None
    assert base.provenance.controls is not None
    assert base.provenance.controls.latency == pytest.approx(process["controls"][4] * collect.UNIT)
    assert more is not None
    assert base.moved_bytes == more.moved_bytes  # of the twin nobody is told that it moves more
    assert len(base.medians) == 32
    stats = collect.unpacked_stats(process["rows"]["copy-2"])
    assert stats["min"] * collect.UNIT <= base.latency <= 1.2 * stats["median"] * collect.UNIT


# Verdicts


def test_no_process_is_the_head_of_a_row_twice_nor_of_its_baseline(record: dict[str, Any]) -> None:
    data = verdicts.Data(record["cards"][0], BASELINE)
    assert len(data.baseline) == len(BASELINE)
    for processes in (1, 3, 6):
        heads = [number for run in data.runs(processes) for number in run]
        assert len({*heads, *itertools.chain(*data.baseline)}) == len(heads) + len(data.baseline)
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


def test_code_that_is_slower_than_it_should_be_is_an_alarm() -> None:
    """What is planted as an unrelated allocation that costs nothing costs 3 %: the verdicts say so."""
    with pytest.MonkeyPatch.context() as patched:
        both = tuple(rows.BY_NAME[name] for name in ("triad-256", "triad-256 after an allocation"))
        for module in (collect, verdicts):
            patched.setattr(module, "ROWS", both)
        card = collect.simulated(DEVICE, 2, len(BASELINE) + 9, both, worse=0.03)
        (asked,) = (one for one in verdicts.questions() if one.name == verdicts.ALLOCATION)
        data = verdicts.Data(card, BASELINE)
        (found,) = verdicts.screens(data, asked, data)
    assert found["outcomes"] == "FFF"


def test_twins_are_as_slow_as_all_processes_say(record: dict[str, Any]) -> None:
    found = verdicts.measured_ratios(record)
    for name in ("triad-256+1", "copy-32+1"):
        share, error = found[name]
        assert share == pytest.approx(0.01, abs=1e-3)
        assert 0 < error < 5e-4
    share, error = found["triad-32 after an allocation"]
    assert abs(share) < 5 * error


def test_the_record_has_a_line_for_each_process_and_is_drawn_by_its_script(
    record: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    script.write(path, record)
    assert json.loads(path.read_text()) == record
    assert path.read_text().count("\n") == len(record["cards"][0]["processes"]) + 2
    drawn = renew_tables.bench_table(record)
    assert drawn.startswith("SIMULATED: NVIDIA H200")
    for part in (
        "unchanged, 1 process",
        "+1 % held to 0.5 %",
        "duets of single rows",
        "peers on the same data",
    ):
        assert part in drawn
    assert max(map(len, drawn.splitlines())) <= 120
    assert "not judged yet" in tables.table(
        {name: value for name, value in record.items() if name != "verdicts"}
    )


def test_bounds_count_runs_and_baselines_and_never_verdicts(record: dict[str, Any]) -> None:
    """Two FAILs of one run are one wrong run, of one wrong baseline."""
    altered = copy.deepcopy(record)
    screens = [
        one
        for one in altered["verdicts"]["screens"]
        if one["question"] == verdicts.SEVERAL and one["row"].endswith("-256")
    ]
    runs = len(screens[0]["outcomes"])
    for one in screens[:2]:
        one["outcomes"] = "F" + one["outcomes"][1:]
    line = next(
        line
        for line in tables.table(altered).splitlines()
        if line.startswith("unchanged  ") and "256 MiB" in line
    )
    assert f"1 of {runs}, <" in line
    assert line.endswith("1 of 1, <100")
    high = binomtest(1, runs).proportion_ci(0.95, method="exact").high
    assert tables.at_most(1, runs) == pytest.approx(high)
    # The same session twice is two baselines.
    both = next(
        line
        for line in tables.table(record, record).splitlines()
        if line.startswith("unchanged  ") and "256 MiB" in line
    )
    assert f"0 of {2 * runs}, <" in both
    assert "0 of 2, <84.2" in both


def test_runs_of_a_users_project_count_as_sessions_too(record: dict[str, Any]) -> None:
    passed, failed = ({"rows": [{"outcome": outcome}] * 15} for outcome in ("PASS", "FAIL"))
    projects: list[dict[str, Any]] = [
        {
            "parts": {
                "unchanged": [passed, passed],
                "gate": [{**passed, "changes": "comment"}, {**failed, "changes": "wait"}],
            }
        },
        {"parts": {"unchanged": [passed, {"error": "ended"}, failed]}},
    ]
    lines = tables.table(record, projects=projects).splitlines()
    (own,) = (line for line in lines if line.startswith("a user's project"))
    assert "75 rows" in own
    assert "1 of 5, <" in own
    assert "1 of 2, <" in own
    (together,) = (line for line in lines if line.startswith("together"))
    assert "1 of 3, <" in together


def test_a_pass_of_code_that_is_slower_than_its_limit_is_wrong() -> None:
    assert tables.wrong_letters(None, 0.01) == "F" + verdicts.ABOVE
    assert tables.wrong_letters(0.0101, 0.01) == "P"
    assert tables.wrong_letters(0.0099, 0.01) == ""


def test_sessions_of_a_minute_are_added_and_judged_against_three_runs_and_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "record.json", tmp_path / "other.json"

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gate_validation.py", *arguments])
        return script.main()

    minute = ("--rows", "minute", "--raw", "--json")
    for seed, file in enumerate((path, path, other)):
        assert call("--simulated", "18", "--seed", str(seed), *minute, str(file)) == 0
    assert call("--judge", str(path), str(other)) == 0
    record = json.loads(path.read_text())
    assert [len(card["processes"]) for card in record["cards"]] == [18, 18, 18]
    assert len({json.dumps(card["processes"]) for card in record["cards"]}) == 3
    data = verdicts.Data(record["cards"][0], verdicts.baseline_of(record))
    assert data.baseline == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert set(data.kinds) == set(rows.TWELVE)
    for question in (verdicts.SEVERAL, verdicts.ELSEWHERE):
        same = outcomes(record, question, "256 MiB")
        assert same["P"] == same.total() == 3 * 3 * 3  # sessions, runs, rows
    assert outcomes(record, verdicts.NOTHING, "256 MiB")["F"] == 0
    assert {row.name for row in rows.SETS["minute"].rows if row.planned} <= verdicts.seen_slopes(
        [record]
    ).keys()
    # Refused: another set of rows, a baseline without a head, another GPU.
    before = path.read_text()
    for arguments in (
        ("--simulated", "30", "--raw", "--json", str(path)),
        ("--judge", str(path), str(other)),
    ):
        if "--judge" in arguments:
            other.write_text(other.read_text().replace('"key":"', '"key":"another '))
        with pytest.raises(SystemExit) as refused:
            call(*arguments)
        assert refused.value.code == 2
    assert call("--simulated", "9", *minute, str(path)) == 1
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
