"""The simulation of the gate, with counts that take seconds; the script runs it with larger ones."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import gate_simulation as gate
import numpy as np
import pytest
from msgspec import structs

from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.what_ran import WhatRan

SAME = gate.Case("a group", gate.LARGE)


def outcomes(case: gate.Case, count: int = 40) -> Counter[str]:
    return gate.play((case, count, (1,))).outcomes


def test_unchanged_code_passes_and_a_slow_down_of_twice_the_limit_fails() -> None:
    assert outcomes(SAME)["PASS"] >= 39
    assert outcomes(replace(SAME, slower=2))["FAIL"] >= 39


def test_a_slow_down_of_the_limit_does_not_pass_and_is_repeated_while_more_processes_can_decide() -> (
    None
):
    at = gate.play((replace(SAME, slower=1), 40, (2,)))
    assert at.outcomes["PASS"] <= 2
    beyond = gate.play((replace(SAME, slower=1.5), 40, (2,)))
    assert at.processes < 120  # more processes of the same change cannot decide it
    assert 80 <= beyond.processes <= 12 * 40


def test_a_slow_mode_is_no_regression_and_its_runs_are_accepted() -> None:
    found = gate.play((replace(SAME, slow=0.3, nights=40), 2, (3,)))
    assert found.outcomes["FAIL"] == 0
    assert found.outcomes["UNDECIDED"] > found.outcomes["PASS"]
    assert found.groups == 2


def test_creep_fails_although_each_night_passes() -> None:
    found = gate.play((replace(SAME, slower=0.0005, nights=120), 1, (4,)))
    assert found.outcomes["FAIL"] == 1
    (change,) = found.failed_at
    assert 0.01 < change < 0.03


CLOCKS = gate.CONDITIONS[0]
NOISY = replace(gate.MIDDLE, process=0.004)


@pytest.mark.parametrize(
    ("slower", "changes"),
    [
        (1.0, {"conditions": (structs.replace(CLOCKS, sm_clock_hz=0.99 * 1.98e9),) * 2}),
        (1.0, {"conditions": (structs.replace(CLOCKS, memory_clock_hz=0.99 * 3.2e9),) * 2}),
        (
            1.0,
            {
                "conditions": (
                    CLOCKS,
                    structs.replace(CLOCKS, throttle_reasons=("hw_thermal_slowdown",)),
                )
            },
        ),
        (1.0, {"conditions": (structs.replace(CLOCKS, other_processes=1), CLOCKS)}),
        (1.0, {"what_ran": WhatRan("without the window, or with other advice")}),
        (1.0, {"sampler": "host"}),
        (2.0, {}),
    ],
    ids=[
        "SM clock",
        "memory clock",
        "throttled",
        "another process",
        "window or advice",
        "the host",
        "seen by the time alone",
    ],
)
def test_of_planted_slow_downs_by_other_causes_none_passes_by_the_same_code(
    slower: float, changes: dict[str, Any]
) -> None:
    """Slower by the limit where the record or the conditions show it; by twice the limit where the time alone does."""
    source = gate.Source(
        gate.Case("planted", NOISY, gate.MODELLED[1], slower, same_code=True), (6,)
    )
    found = Counter(
        gate.judged(source.case, structs.replace(source.head(), **changes), source.history())[
            0
        ].code
        for _ in range(200)
    )
    assert found[Code.SAME_CODE] == 0, found


def test_the_same_code_settles_most_doubts_of_unchanged_code_and_few_of_slower_code() -> None:
    case = gate.Case("planted", NOISY, gate.MODELLED[1], same_code=True)
    assert outcomes(case, 200)["PASS"] > 150 > outcomes(replace(case, same_code=False), 200)["PASS"]
    assert outcomes(replace(case, slower=1), 200)["PASS"] <= 20


def test_a_suite_counts_its_rows() -> None:
    found = gate.play((replace(SAME, suite=6), 2, (5,)))
    assert (found.outcomes.total(), found.groups, found.alarmed) == (12, 2, 0)


@pytest.mark.parametrize("shape", ["normal", "bimodal", "t3"])
def test_processes_are_drawn_with_the_stated_spreads(shape: str) -> None:
    source = gate.Source(
        replace(SAME, kernel=gate.MIDDLE, shape=shape, baseline=gate.Runs(4000, 1, 4000)), (6,)
    )
    levels = np.log(
        [run.latency - (run.overhead or 0.0) + gate.OVERHEAD for run in source.history()]
    )
    kernel = gate.MIDDLE
    expected = np.sqrt(
        kernel.process**2 + kernel.session**2 + kernel.placement**2 / gate.PLACEMENTS
    )
    # Of a normal, the quartiles lie 1.349 standard deviations apart.
    seen = (
        np.subtract(*np.quantile(levels, (0.75, 0.25))) / 1.349 if shape == "t3" else np.std(levels)
    )
    assert seen == pytest.approx(expected, rel=0.1)


CHOSEN = (
    SAME,
    replace(SAME, slower=1, note="a note"),
    replace(SAME, suite=4, weight=0.1),
    replace(SAME, nights=5, weight=0.1),
)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return gate.simulate(20, 1, CHOSEN)


def test_the_same_record_whatever_the_number_of_workers(record: dict[str, Any]) -> None:
    assert json.loads(json.dumps(record)) == gate.simulate(20, 2, CHOSEN)


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        ({"outcomes": {"FAIL": 4, "PASS": 3996}}, None),
        ({"outcomes": {"FAIL": 20, "PASS": 3980}}, "unchanged code fails in 0.50 %"),
        (
            {"outcomes": {"PASS": 100, "FAIL": 3900}, "slower": 1},
            "a slow-down of the limit passes in 2.50 %",
        ),
        ({"outcomes": {"PASS": 100, "FAIL": 3900}, "slower": 2}, None),
        (
            {"outcomes": {"PASS": 900, "UNDECIDED": 100}, "asked": True},
            "unchanged code does not pass in 10.00 %",
        ),
        (
            {"outcomes": {"FAIL": 20, "PASS": 29980}, "suites": 100, "alarmed": 20},
            "unchanged suites fail in 20.00 %",
        ),
    ],
)
def test_a_broken_promise_is_named_with_its_rate(
    record: dict[str, Any], row: dict[str, Any], missed: str | None
) -> None:
    altered = {**record, "rows": [{**record["rows"][0], **row}]}
    found = gate.missed(altered, modelled=True)
    assert len(found) == (missed is not None)
    assert missed is None or missed in found[0]
    # The same beyond the model is named too, and apart.
    altered["rows"][0]["note"] = "8 x"
    assert gate.missed(altered, modelled=True) == []
    assert len(gate.missed(altered, modelled=False)) == (missed is not None)


def test_only_a_modelled_row_makes_the_script_fail(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gate_simulation.py"])
    broken = {**record["rows"][0], "outcomes": {Outcome.FAIL.value: 50, "PASS": 50}}
    for note, code in (("", 1), ("8 x", 0)):
        monkeypatch.setattr(
            gate, "simulate", lambda *_, note=note: {**record, "rows": [{**broken, "note": note}]}
        )
        assert gate.main() == code
