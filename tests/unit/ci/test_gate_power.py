"""Power of the gate's screen: how much slower code must be for a run to be flagged, and how many runs are."""

from __future__ import annotations

import copy
import json
import math
import sys
from pathlib import Path
from typing import Any

import gate_validation_collect as collect
import gate_validation_power as power
import gate_validation_rows as rows
import gate_validation_summary as summary
import gate_validation_verdicts as verdicts
import pytest

from pytest_gpumem.devices.opening import choose
from pytest_gpumem.records.schema import device_to_json
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.screen import Difference, compared
from pytest_gpumem.verdicts.spread import Variance

DEVICE = json.loads(json.dumps(device_to_json(choose("sim:h200").facts)))
ROWS = tuple(
    rows.BY_NAME[name] for name in ("triad-256", "triad-256+0.5", "triad-256+1", "copy-256", "copy-256+1", "triad-32", "triad-32+1")
)
HEADS = 12
SEVERAL = rows.SIZES["256 MiB"].slower


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patched:
        for module in (collect, verdicts, power):
            patched.setattr(module, "ROWS", ROWS)
        card = collect.simulated(DEVICE, 3, collect.PILOTS + verdicts.BASELINE + HEADS)
        found: dict[str, Any] = {"kind": "gate_validation", "simulated": True, "options": [], "cards": [card]}
        found["verdicts"] = verdicts.judged(found)
    return found


@pytest.fixture
def record(made: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small simulated record; there are no rows but its own meanwhile."""
    for module in (collect, verdicts, power):
        monkeypatch.setattr(module, "ROWS", ROWS)
    return made


def slowed(record: dict[str, Any], share: float, only: str | None = None) -> dict[str, Any]:
    """The same with every head slower by a share, or all of one row."""
    found = copy.deepcopy(record)
    (card,) = found["cards"]
    for process in card["processes"] if only is not None else card["processes"][verdicts.BASELINE :]:
        for name, row in process["rows"].items():
            if only is None or name == only:
                row["m"] = collect.packed([(1 + share) * median for median in collect.unpacked(row["m"])])
    return found


# One run


def test_a_run_is_flagged_beyond_what_it_needs_and_not_before() -> None:
    limit, run = 0.01, Difference(0.0004, Variance(0.0003**2, 40.0), 20, 1, 1)
    found = power.needed(Verdict(Outcome.PASS, "", compared(run, limit)), limit / 2)
    assert found > limit / 2 - run.log

    def flagged(slower: float) -> bool:
        now = Difference(run.log + math.log1p(slower), run.variance, 20, 1, 1)
        return compared(now, limit).low > limit / 2

    assert [flagged(found + step) for step in (-1e-9, 1e-9)] == [False, True]


def test_what_could_not_be_judged_is_flagged_by_no_slow_down() -> None:
    comparison = compared(Difference(0.1, Variance(0.0003**2, 40.0), 20, 1, 1), 0.01)
    assert power.needed(Verdict(Outcome.UNRELIABLE, ""), 0.005) == math.inf
    assert power.needed(Verdict(Outcome.UNRELIABLE, "", comparison), 0.005) == math.inf
    assert power.needed(Verdict(Outcome.FAIL, "", comparison), 0.005) < 0  # flagged as it is


# Many


def test_a_curve_steps_where_runs_are_flagged() -> None:
    found = power.Curve((0.004, 0.006, 0.006, math.inf))
    assert [found.at(slower) for slower in (0.0, 0.004, 0.0041, 0.006, 0.0061, 1.0)] == [0, 0, 0.25, 0.25, 0.75, 0.75]
    assert [found.reaches(share) for share in (0.25, 0.26, 0.75, 0.99)] == [0.004, 0.006, 0.006, math.inf]
    assert (power.Curve(()).at(1.0), power.Curve(()).reaches(0.99)) == (0.0, math.inf)


def test_a_run_passes_where_it_resolves_the_limit_and_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    precise, wide = Variance(0.0003**2, 40.0), Variance(0.002**2, 40.0)
    drawn = [(0.0, precise), (-0.02, precise), (-0.02, wide), (0.02, wide)]
    judged = [Verdict(Outcome.PASS, "", compared(Difference(log, variance, 20, 1, 3), 0.01)) for log, variance in drawn]
    unread = Verdict(Outcome.UNRELIABLE, "")
    monkeypatch.setattr(power, "_judged", lambda *_: ((0, "triad-256", verdict) for verdict in (*judged, unread)))
    found = power.curve([], "256 MiB", SEVERAL)
    assert found.needed == tuple(sorted(power.needed(verdict, 0.005) for verdict in (*judged, unread)))
    assert found.at(0.01) == 2 / 5
    assert found.passing == 1


def test_a_curve_says_what_comes_of_code_that_is_slower(record: dict[str, Any]) -> None:
    """Raw data of heads that are slower by a share need that much less."""
    before, after = (power.curve([one], "256 MiB", SEVERAL) for one in (record, slowed(record, 0.004)))
    own = [row for row in ROWS if row.size == "256 MiB"]
    assert len(before.needed) == len(after.needed) == len(own) * HEADS // SEVERAL.processes
    assert [1.004 * (1 + needed) - 1 for needed in after.needed] == pytest.approx(before.needed, abs=1e-5)
    assert before.at(0.0) == 0.0  # unchanged code raises no alarm
    middle = before.reaches(0.5)
    assert before.at(middle) <= 0.5 <= before.at(middle + 1e-9)
    assert power.curve([slowed(record, middle + 1e-4)], "256 MiB", SEVERAL).at(0.0) >= 0.5


def test_records_and_cards_count_together(record: dict[str, Any]) -> None:
    one, two, cards = (
        power.curve(many, "256 MiB", SEVERAL) for many in ([record], [record] * 2, [{**record, "cards": record["cards"] * 2}])
    )
    assert two == cards == power.Curve(tuple(sorted(2 * one.needed)))


# Twins


def test_twins_are_caught_as_the_record_says(record: dict[str, Any]) -> None:
    ratios = summary.measured_ratios(record)
    for size in ("256 MiB", "32 MiB"):
        found = {one.planned: one for one in power.twins([record], size, rows.SIZES[size].slower)}
        assert found.keys() == {row.planned for row in ROWS if row.size == size and row.planned}
        for planned, one in found.items():
            tally = summary.tallies(record["verdicts"])[verdicts.planned_name(planned), size]
            assert (one.caught, len(one.slower)) == (tally.caught, tally.count)
            assert set(one.slower) == {ratios[row.name][0] for row in ROWS if row.size == size and row.planned == planned}
            assert one.as_planned
            assert one.bounds() == summary.interval(one.caught, len(one.slower))


def test_twins_that_are_off_their_plan_are_told_apart(record: dict[str, Any]) -> None:
    off = slowed(record, 0.005, only="copy-256+1")
    as_planned, other = (one for one in power.twins([off], "256 MiB", SEVERAL) if one.planned == 0.01)
    assert (as_planned.as_planned, other.as_planned) == (True, False)
    assert as_planned.mean == pytest.approx(0.01, abs=1e-3)
    assert other.mean == pytest.approx(0.015, abs=1e-3)
    assert len(as_planned.slower) == len(other.slower) == HEADS // SEVERAL.processes


# The figure


def draw(plot: Any, monkeypatch: pytest.MonkeyPatch, svg: Path, *records: Path) -> str:
    monkeypatch.setattr(sys, "argv", ["plot_power.py", *map(str, records), "--svg", str(svg)])
    assert plot.main() == 0
    return svg.read_text()


def test_the_figure_is_of_records_that_measured_as_by_default(
    record: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    import plot_power

    usual, short, other = (tmp_path / name for name in ("usual.json", "short.json", "other.json"))
    usual.write_text(json.dumps(record))
    short.write_text(json.dumps({**record, "options": ["--gpumem-budget=15ms"]}))
    other.write_text('{"kind": "peers"}')
    alone = draw(plot_power, monkeypatch, tmp_path / "images" / "alone.svg", usual)
    assert capsys.readouterr().out.count("of code slower by the limit 0 would be a PASS") == len(power.CURVES)
    assert draw(plot_power, monkeypatch, tmp_path / "both.svg", usual, short) == alone
    assert f"{short} is left out: it measured with --gpumem-budget=15ms" in capsys.readouterr().err
    runs = len(power.curve([record], "256 MiB", SEVERAL).needed)
    for shown in ("SIMULATED NVIDIA H200", "margin", "limit", "256 MiB, runs of 3 processes, limit 1%", f"({runs} runs)"):
        assert shown in alone
    for given, said in ((short, "no record among them measured as by default"), (other, "no record of ci/bench/gate_validation.py")):
        with pytest.raises(SystemExit):
            draw(plot_power, monkeypatch, tmp_path / "none.svg", given)
        assert said in capsys.readouterr().err
    assert not (tmp_path / "none.svg").exists()
