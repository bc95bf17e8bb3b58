"""The history of a store: what counts as one series, which change was accepted, and what is kept between queries."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import measurements
import pytest
from known_devices import H100
from msgspec.structs import replace

from pytest_gpumem.baselines.history import Accepted, AcceptedFootprint, Content, Process, Reset
from pytest_gpumem.baselines.storage import BaselineError, Storage
from pytest_gpumem.baselines.store import IMPROVED, record
from pytest_gpumem.history import columns as module
from pytest_gpumem.history.columns import Columns
from pytest_gpumem.history.data import History, Series
from pytest_gpumem.history.query import history, of_columns, recent
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Controls, Limits, Measurement, Provenance, Repeat
from pytest_gpumem.records.row import Row, Verdict

pytest.importorskip("ruptures", reason="ruptures is of the extra history")

TEST = "tests/test_a.py::test_copy"
BEGIN = datetime(2026, 1, 1, tzinfo=timezone.utc)


def measurement(latency: float = 1e-4, *, card: str | None = "GPU-a", dram: float | None = 6e-7, **more: Any) -> Measurement:
    controls = None if dram is None else Controls(3e-5, 2e-5, 3e-6, dram, str(more.pop("control", "one")))
    provenance = Provenance(BEGIN.isoformat(), card, controls)
    return measurements.measurement(**{"placements": ((latency,),), "floor": 1e-9, "provenance": provenance} | more)


def content(day: int, *measured: Measurement, peak: int | None = None, resets: Sequence[Reset] = ()) -> tuple[str, Content]:
    utc = BEGIN + timedelta(days=day)
    name = f"{day:04d}{len(resets)}"
    process = Process(name, utc, f"commit-{day}", H100) if measured or peak is not None else None
    rows = tuple(Accepted(TEST, one, process) for one in measured if process is not None)
    footprints = (AcceptedFootprint(TEST, "", Footprint(peak=peak), process),) if process is not None and peak is not None else ()
    return f"{name}.json", Content(H100.key, process, name, utc, f"commit-{day}", 1, rows, footprints, tuple(resets))


def accepted(day: int, who: str = "ada") -> tuple[str, Content]:
    return content(day, resets=[Reset("id", TEST, "checks bounds", who, BEGIN + timedelta(days=day))])


def columns(*contents: tuple[str, Content]) -> Columns:
    found = Columns()
    found.add(contents)
    return found


def of(*contents: tuple[str, Content], recorded: Sequence[tuple[str, Content]] = ()) -> History:
    return of_columns({H100.key: (columns(*contents), columns(*recorded))})


def series(found: History, metric: str) -> list[Series]:
    return [one for one in found.series if one.metric == metric]


def test_a_change_of_bytes_and_its_commits() -> None:
    found = of(*(content(day, peak=1000 if day < 4 else 1500) for day in range(8)))
    (change,) = found.changes
    one = found.series[change.series]
    assert (one.test, one.metric, one.unit, one.card) == (TEST, "peak", "B", H100.key)
    assert (change.before, change.after, change.relative) == (1000, 1500, 0.5)
    assert [found.runs[one.runs[at]].revision for at in (change.earliest - 1, change.latest)] == ["commit-3", "commit-4"]
    assert change.worse
    assert recent(found, BEGIN + timedelta(days=4)) == [change]
    assert recent(found, BEGIN + timedelta(days=5)) == []


def test_runs_between_two_levels_are_of_neither() -> None:
    found = of(*(content(day, peak=peak) for day, peak in enumerate((1000, 1000, 200, 300, 400, 1500, 1500, 100, 200, 2000, 2000))))
    assert [(change.before, change.after) for change in found.changes] == [(1000, 1500), (1500, 2000)]
    one = found.series[0]
    assert [found.runs[one.runs[change.earliest - 1]].revision for change in found.changes] == ["commit-1", "commit-6"]


def test_the_time_of_a_run_is_the_mean_over_its_processes() -> None:
    """As the gate compares it."""
    found = of(content(0, measurement(1e-4, further=(Repeat((2e-4,)), Repeat((4e-4,))))), content(1, measurement(1e-4)))
    assert series(found, "latency")[0].values.tolist() == pytest.approx([2e-4, 1e-4])


def test_worse_and_open_changes_come_first() -> None:
    contents = [content(day, peak=1000 + 500 * (day >= 4) + 100 * (day >= 6) - 900 * (day >= 8)) for day in range(10)]
    found = of(*contents, accepted(5))
    assert [round(change.after) for change in recent(found, BEGIN)] == [1600, 1500, 700]


@pytest.mark.parametrize(
    ("who", "peaks", "by"),
    [
        ("ada", (1000, 1500), "ada"),
        (IMPROVED, (1000, 1500), ""),  # a gain of another time accepts no loss
        (IMPROVED, (1500, 1000), IMPROVED),
    ],
)
def test_an_accepted_change_has_who_and_why(who: str, peaks: tuple[int, int], by: str) -> None:
    found = of(*(content(day, peak=peaks[day >= 4]) for day in range(8)), accepted(6, who))
    (change,) = found.changes
    assert (change.accepted, change.who, change.why) == ((True, by, "checks bounds") if by else (False, "", ""))


def test_an_earlier_acceptance_is_of_another_change() -> None:
    found = of(*(content(day, peak=1000 + 500 * (day >= 4)) for day in range(8)), accepted(2))
    assert [change.accepted for change in found.changes] == [False]


def test_a_card_of_another_variant_is_another_series() -> None:
    runs = [content(day, measurement(1e-4, card="GPU-a", dram=6e-7)) for day in range(10)]
    runs += [content(day, measurement(1.1e-4, card="GPU-b", dram=6.4e-7)) for day in range(10, 20)]
    found = of(*runs)
    assert [(one.variant, len(one.runs)) for one in series(found, "latency")] == [("DRAM 600.0 ns", 10), ("DRAM 640.0 ns", 10)]
    assert found.changes == ()


def test_readings_of_one_card_by_two_controls_are_of_one_variant() -> None:
    one = [content(day, measurement(dram=6e-7, control="one")) for day in range(4)]
    other = [content(day, measurement(dram=9e-7, control="two")) for day in range(4, 8)]
    (found,) = series(of(*one, *other), "latency")
    assert (found.variant, len(found.runs)) == (None, 8)


def test_another_way_of_measuring_is_another_series() -> None:
    runs = [content(day, measurement(1e-4 if day < 5 else 5e-5, mode="clean-cold" if day < 5 else "hot")) for day in range(10)]
    found = of(*runs)
    assert [one.variant for one in series(found, "latency")] == ["clean-cold, blocked", "hot, blocked"]
    assert found.changes == ()


def test_a_way_of_measuring_whose_runs_were_removed_names_no_series() -> None:
    runs = columns(*(content(day, measurement(mode="clean-cold" if day < 5 else "hot")) for day in range(10)))
    runs.remove({f"{day:04d}0.json" for day in range(5)})
    (found,) = series(of_columns({H100.key: (runs, Columns())}), "latency")
    assert (found.variant, len(found.runs)) == (None, 5)


def test_a_run_that_was_recorded_and_accepted_counts_once() -> None:
    runs = [content(day, measurement(), peak=1000) for day in range(4)]
    found = of(*runs[2:], recorded=runs)
    assert [run.accepted for run in found.runs] == [False, False, True, True]
    assert [len(one.runs) for one in found.series] == [4] * len(found.series)
    assert [run.when for run in found.runs] == sorted(run.when for run in found.runs)


def test_tests_are_chosen_as_on_the_command_line_of_pytest() -> None:
    both = {H100.key: (columns(*(content(day, peak=1000 + day // 2) for day in range(4))), Columns())}
    assert {one.test for one in of_columns(both, test="tests/test_a.py").series} == {TEST}
    assert of_columns(both, test=TEST).changes[0].series < len(of_columns(both, test=TEST).series)
    assert of_columns(both, test="tests/test_b.py").series == ()


def test_a_set_of_parameters_chooses_its_labelled_rows_too() -> None:
    test, other = f"{TEST}[x[1]]", f"{TEST}[x]"
    process = Process("run", BEGIN, "commit", H100)
    rows = tuple(Accepted(nodeid, measurement(label=label), process) for nodeid in (test, other) for label in ("", "warm"))
    both = {H100.key: (columns(("run.json", Content(H100.key, process, "run", BEGIN, "commit", 1, rows))), Columns())}
    keys = {row.key for row in rows if row.nodeid == test}
    assert {one.test for one in of_columns(both, test=test).series} == keys
    for key in keys:
        assert {one.test for one in of_columns(both, test=key).series} == {key}


def row(latency: float = 1e-4, **more: object) -> Row:
    return replace(Row(TEST, Limits(), Verdict(Outcome.PASS, "because"), measurement(latency)), **more)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_files_are_read_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Storage(tmp_path / "store")
    paths = [record(place, H100, [row(1e-4 * (1 + number))], f"commit-{number}", {}, str(number))[0] for number in range(3)]
    read = list[Path]()
    monkeypatch.setattr(module, "_content", lambda path, shown, own=module._content: read.append(path) or own(path, shown))
    assert len(history(place).runs) == len(read) == 3
    first = history(place)
    assert len(read) == 3
    assert [list(one.values) for one in series(first, "latency")] == [pytest.approx([1e-4, 2e-4, 3e-4])]
    record(place, H100, [row()], "commit-3", {}, "3")
    paths[0].unlink()
    now = history(place)
    assert len(read) == 4
    assert sorted(run.revision for run in now.runs) == ["commit-1", "commit-2", "commit-3"]
    (file,) = (one for one in cache.rglob("*.npz"))
    file.write_bytes(file.read_bytes()[:100])
    assert len(history(place).runs) == 3
    assert len(read) == 7


def test_a_damaged_file_is_named(tmp_path: Path, cache: Path) -> None:
    place = Storage(tmp_path / "store")
    path, _ = record(place, H100, [row()], "commit", {}, "1")
    path.write_text(path.read_text().replace('"commit"', '"another"'))
    with pytest.raises(BaselineError, match=rf"{path.name}: its content does not fit its sha256"):
        history(place)


def test_a_copy_of_a_file_is_no_second_run(tmp_path: Path, cache: Path) -> None:
    place = Storage(tmp_path / "store")
    path, _ = record(place, H100, [row()], "commit", {}, "1")
    path.with_name("copy.json").write_bytes(path.read_bytes())
    with pytest.raises(BaselineError, match=rf"copy\.json: a copy of {path.name}"):
        history(place)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 1),
        ({"verdict": Verdict(Outcome.FAIL, "slower"), "failed": True}, 1),
        ({"failed": True, "test_error": True}, 0),
        ({"verdict": Verdict(Outcome.PASS, "", simulated=True)}, 0),
        ({"measurement": measurement(profiled=True)}, 0),
        ({"measurement": None}, 0),
        ({"measurement": None, "footprint": Footprint(peak=1)}, 1),
    ],
)
def test_what_is_recorded(tmp_path: Path, changes: dict[str, Any], kept: int) -> None:
    assert record(Storage(tmp_path), H100, [row(**changes)], None, {}, "1")[1] == kept
