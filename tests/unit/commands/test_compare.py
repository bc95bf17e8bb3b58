"""`gpumem compare`: which files it takes, what it says of them, and its exit codes."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace
from result_files import H100, Folder

from pytest_gpumem.baselines import compare as pairs
from pytest_gpumem.baselines.compare import compare_sides
from pytest_gpumem.baselines.result_sets import side
from pytest_gpumem.baselines.store import Store, reset
from pytest_gpumem.judging.judge import judge as judging
from pytest_gpumem.judging.screen import Family
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Conditions, Controls, Limits, Provenance, Repeat
from pytest_gpumem.records.row import Verdict

Compare = Callable[..., Result]
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
SIMULATED = replace(H100, simulated=True)


def one_line(result: Result) -> str:
    """The error of a call that compared nothing."""
    assert (result.exit_code, result.stdout) == (4, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpumem: ")
    return line.removeprefix("gpumem: ")


def test_a_slow_down_fails(folder: Folder, compare: Compare) -> None:
    base, head = folder.runs("base", 5), folder.runs("head", 3, 268e-6 * 1.02)
    result = compare(base, head, "--max-regression", "1%")
    assert result.exit_code == 1
    assert f"base: base-*.json, 5 processes on {H100.key}, driver 580.95.05\n" in result.stdout
    assert "head: head-*.json, 3 processes on" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("test_triad")]
    assert line.split()[-1] == "FAIL"
    assert "FAIL tests/test_a.py::test_triad: +" in result.stdout
    assert "over 3 processes of this run" in " ".join(result.stdout.split())


def test_rows_of_another_model_than_the_files_are_left_out(folder: Folder, compare: Compare) -> None:
    """As workers of xdist measure them: the same test on two cards, and one test on the other card alone."""
    for of, slower in (("base", 1.0), ("head", 2.0)):
        theirs = [folder.row(268e-6 * slower, device=A100), folder.row(268e-6, "test_other", device=A100)]
        folder.write(f"{of}.json", [folder.row(), *theirs])
    result = compare("base.json", "head.json", "--max-regression", "50%", "--json", "-")
    rows = {row["test"].partition("::")[2]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["test_triad"]["outcome"] != "FAIL"
    assert rows["test_triad"]["head_s"] == pytest.approx(268e-6, rel=0.01)
    assert rows["test_other"]["reason"] == f"in head.json: measured on {A100.key}, and the run on {H100.key}"


@pytest.mark.parametrize(("width", "between"), [(120, True), (80, False)])
def test_rows_stay_apart_and_within_a_terminal(
    width: int, between: bool, folder: Folder, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files have a test of the same name; what the interval is of is said where it is shown."""
    for of in ("base", "head"):
        rows = [folder.row(nodeid=f"tests/test_{file}.py::test_prefetch_pays_for_all[faulting]") for file in ("first", "second")]
        folder.write(f"{of}.json", rows, replace(SIMULATED, name="GPU"))
    monkeypatch.setenv("COLUMNS", str(width))
    lines = compare("base.json", "head.json", "--max-regression", "5%").stdout.splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("test  "))) :][:4]
    assert max(map(len, lines)) <= width
    assert ("between" in table[0]) == between == any(line.startswith("between: ") for line in lines)
    assert len({row.split("  ")[0] for row in table[2:]}) == 2


@pytest.mark.parametrize(
    ("base", "head", "limit", "last", "codes"),
    [
        ((5, {}), (3, {}), "1%", "1 PASS", (0, 0)),
        ((3, {}), (1, {"latency": 300e-6}), None, "1 no limit", (0, 6)),
        ((3, {"spread": 0.02}), (1, {"spread": 0.02}), "1%", "1 UNDECIDED", (0, 6)),
        ((3, {"mode": "hot"}), (1, {}), "10%", "1 NEW", (0, 6)),
        ((3, {}), (1, {"nodeid": "tests/test_a.py::test_new"}), None, "1 UNDECIDED, 1 NEW", (6, 6)),
        ((3, {"facts": SIMULATED}), (1, {"facts": SIMULATED}), "10%", "1 PASS", (0, 6)),
        ((3, {}), (1, {"failed": True, "verdict": Verdict(Outcome.FAIL, "too slow")}), "10%", "1 PASS", (0, 0)),
        ((3, {}), (1, {"failed": True, "strict": True, "verdict": Verdict(Outcome.NEW, "none")}), "10%", "1 PASS", (0, 0)),
    ],
    ids=["no change", "no limit", "noise", "another mode", "nothing in common", "simulated", "failed by its limit", "failed by strict"],
)
def test_what_passes_and_what_passes_no_strict_gate(
    folder: Folder, compare: Compare, base: Any, head: Any, limit: str | None, last: str, codes: tuple[int, int]
) -> None:
    arguments = [folder.runs("base", base[0], **base[1]), folder.runs("head", head[0], **head[1])]
    arguments += ["--max-regression", limit] if limit else []
    plain, strict = compare(*arguments), compare(*arguments, "--strict")
    assert (plain.stdout.splitlines()[-1].partition(": ")[2], plain.exit_code, strict.exit_code) == (last, *codes)
    assert ("(simulated)" in plain.stdout.splitlines()[-1]) == ("facts" in base[1])


def test_more_processes_of_head_see_more(folder: Folder, compare: Compare) -> None:
    base, head = folder.runs("base", 5), folder.runs("head", 5)

    def resolved(*arguments: str) -> float:
        (line,) = [line for line in compare(*arguments, "--max-regression", "5%").stdout.splitlines() if line.startswith("test_triad")]
        return float(line.split()[-3])

    assert resolved(base, head) < resolved(base, "head-0.json")


def test_the_times_are_those_that_the_change_is_of(folder: Folder, compare: Compare) -> None:
    """Of the mean over all processes of a side, and not of its newest one."""
    base = folder.runs("base", 3)
    for index, slower in enumerate((1.0, 1.0, 1.03)):
        folder.write(f"head-{index}.json", [folder.row(268e-6 * slower)])
    (row,) = json.loads(compare(base, "head-*.json", "--json", "-").stdout)["rows"]
    assert row["head_s"] / row["base_s"] - 1 == pytest.approx(row["delta"], abs=1e-9)


def test_each_test_is_held_to_its_own_limit(folder: Folder, compare: Compare) -> None:
    folder.runs("base", 5)
    held = Limits(max_regression="1%", origin={"max_regression": "marker"})
    folder.runs("head", 3, 275e-6, limits=held)
    assert "max_regression 1% (of its test)" in compare("base-*.json", "head-*.json").stdout
    assert compare("base-*.json", "head-*.json").exit_code == 1
    assert compare("base-*.json", "head-*.json", "--max-regression", "10%", "--strict").exit_code == 0


def test_the_change_is_the_ratio_of_the_times(folder: Folder, compare: Compare) -> None:
    """Also where another launch overhead is a part of the times of one side."""
    for index in range(3):
        folder.write(f"base-{index}.json", [folder.row(20e-6)])
    row = folder.row(20.5e-6)
    assert row.measurement is not None
    folder.write("head.json", [replace(row, measurement=replace(row.measurement, overhead=2.5e-6))])
    compare("base-*.json", "head.json", "--json", "out.json")
    (found,) = json.loads((folder.path / "out.json").read_text())["rows"]
    assert found["head_s"] / found["base_s"] - 1 == pytest.approx(found["delta"])
    assert found["head_s"] == pytest.approx(20.5e-6, rel=1e-3)
    assert found["delta"] == pytest.approx(0.0, abs=2e-3)


@pytest.mark.parametrize(("limits", "code"), [(("1%", "400%"), 0), (("400%", "1%"), 1), (("1%", None), 0)])
def test_the_newest_run_has_the_limit(folder: Folder, compare: Compare, limits: tuple[str, str | None], code: int) -> None:
    """Whatever the files are called."""
    folder.runs("base", 5)
    for name, day, limit in (("head-2.json", "2026-11-20", limits[0]), ("head-1.json", "2026-11-21", limits[1])):
        folder.write(name, [folder.row(600e-6, limits=Limits(max_regression=limit))])
        value = json.loads((folder.path / name).read_text())
        folder.put(name, {**value, "datetime": f"{day}T18:00:00+00:00"})
    assert compare("base-*.json", "head-*.json").exit_code == code


def test_rows_of_one_side_are_named(folder: Folder, compare: Compare) -> None:
    for index in range(3):
        folder.write(f"a{index}.json", [folder.row(), folder.row(name="test_gone")])
    folder.write("b.json", [folder.row(), folder.row(name="test_new")])
    result = compare("a?.json", "b.json", "--max-regression", "10%")
    assert result.exit_code == 0
    assert "UNDECIDED tests/test_a.py::test_gone: not in b.json" in result.stdout
    assert "NEW tests/test_a.py::test_new: not in a?.json" in result.stdout
    assert result.stdout.splitlines()[-1] == "3 rows: 1 UNDECIDED, 1 NEW, 1 PASS"
    assert compare("a?.json", "b.json", "--max-regression", "10%", "--strict").exit_code == 6
    found = compare_sides(side("a?.json"), side("b.json"), "10%", force=False).rows
    assert [row.verdict.code for row in found] == [None, Code.NO_BASELINE, Code.NOT_MEASURED]


THROTTLED = (Conditions(), Conditions(throttle_reasons=("sw_power_cap",)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"conditions": THROTTLED}, "it was measured under throttling (sw_power_cap)"),
        ({"profiled": True}, "it was measured under a profiler"),
        ({"failed": True}, "its test failed"),
        ({"measurement": None, "failed": True}, "its test failed"),
    ],
)
@pytest.mark.parametrize("bad", ["a.json", "b.json"])
def test_what_says_nothing_is_not_compared(folder: Folder, compare: Compare, bad: str, changes: dict[str, Any], why: str) -> None:
    for name in ("a.json", "b.json"):
        folder.write(name, [folder.row(**(changes if name == bad else {})), folder.row(name="test_other")])
    result = compare("a.json", "b.json", "--max-regression", "10%", "--strict")
    assert result.exit_code == 6
    outcome = "UNDECIDED" if bad == "b.json" else "NEW"
    assert f"{outcome} tests/test_a.py::test_triad: " in result.stdout
    assert why in result.stdout


def test_a_limit_that_one_row_breaks_leaves_the_other_rows_of_its_test(folder: Folder) -> None:
    broken = Verdict(Outcome.FAIL, "above max_latency")
    rows = [folder.row(label="x", failed=True, verdict=broken), folder.row(label="y", failed=True)]
    found = side(folder.write("a.json", rows))
    assert ({key.rpartition("[")[2] for key in found.rows}, found.left_out) == ({"x]", "y]"}, {})
    by_itself = side(folder.write("b.json", rows[1:]))
    assert list(by_itself.left_out.values()) == ["its test failed"]
    # An assertion that fails besides the limit may have left anything to time.
    both = side(folder.write("c.json", [replace(row, test_error=True) for row in rows]))
    assert (both.rows, set(both.left_out.values())) == ({}, {"its test failed"})


def test_different_gpus_are_refused(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()], A100)
    line = one_line(compare("a.json", "b.json"))
    assert line == (
        f"a.json is of {H100.key}, b.json of {A100.key}: results of different GPUs are not comparable; "
        "--force compares them all the same, and then passes no gate"
    )
    line = one_line(compare("[ab].json", folder.write("c.json", [folder.row()])))
    assert line.startswith("[ab].json holds results of different GPUs (")


def test_what_was_forced_never_passes_a_gate(folder: Folder, compare: Compare) -> None:
    for index in range(3):
        folder.write(f"a{index}.json", [folder.row()])
    folder.write("b.json", [folder.row()], A100)
    folder.write("slow.json", [folder.row(400e-6)], A100)
    for arguments in (["--max-regression", "10%"], []):
        result = compare("a*.json", "b.json", "--force", *arguments)
        assert result.exit_code == 6
        assert "FORCED: a*.json is of" in result.stdout
    assert compare("a*.json", "slow.json", "--force", "--max-regression", "10%").exit_code == 1


def test_simulated_never_meets_real(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()], SIMULATED)
    assert one_line(compare("a.json", "b.json", "--force")) == "simulated results are never compared with a GPU's"


def test_what_changed_between_the_sides_is_said(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row(kernel_source="a" * 64)])
    folder.write("b.json", [folder.row(kernel_source="b" * 64, test_source="c" * 64)], replace(H100, driver="590.10"))
    text = compare("a.json", "b.json").stdout
    assert "changed between the sides: driver 580.95.05 -> 590.10 (1 of 1)" in text
    assert "changed between the sides: the kernel's source (1 of 1)" in text


# Stock pytest-benchmark


def test_stock_files_one_a_side_decide_nothing(folder: Folder, compare: Compare) -> None:
    folder.stock("a.json", {"test_a.py::test": 1e-3})
    folder.stock("b.json", {"test_a.py::test": 1.0001e-3})
    result = compare("a.json", "b.json", "--max-regression", "50%", "--strict")
    assert result.exit_code == 6
    text = " ".join(result.stdout.split())
    assert "base: a.json, 1 process on an unknown GPU" in text
    assert "stock pytest-benchmark wrote a.json and b.json: the GPU, its clocks and driver are not known" in text
    assert "test 1.000 ms 1.000 ms +0.0100 %" in text
    folder.stock("slow.json", {"test_a.py::test": 3e-3})
    for head, code in (("b.json", Code.TOO_FEW_RUNS), ("slow.json", Code.LOOKS_SLOWER)):
        (row,) = compare_sides(side("a.json"), side(head), "50%", force=False).rows
        assert (row.verdict.outcome, row.verdict.code) == (Outcome.UNDECIDED, code)


def test_heads_of_two_variants_of_a_card_are_not_averaged(folder: Folder, compare: Compare) -> None:
    """Unchanged code that takes another time on the other variant would hide half of a slow-down, or look like half of one."""

    def write(name: str, latency: float, access: float, day: int) -> None:
        row = folder.row(latency)
        assert row.measurement is not None
        provenance = Provenance(f"2026-11-{day:02}T10:00:00+00:00", f"GPU-{access}", Controls(latency=access, source="1"))
        folder.write(name, [replace(row, measurement=replace(row.measurement, provenance=provenance))])

    for index in range(6):
        write(f"base{index}.json", 268e-6, 340e-9, 1 + index)
        write(f"head{index}.json", 268e-6 * (1.0 if index % 2 else 1.1), 340e-9 if index % 2 else 353e-9, 10 + index)
    base = side(str(folder.path / "base*.json"))
    compared = compare_sides(base, side(str(folder.path / "head*.json")), "5%", force=False)
    (note,) = compared.notes
    assert "1 row of" in note
    assert "another variant of the card" in note
    (row,) = compared.rows
    assert row.measurement is not None
    assert row.measurement.provenance is not None
    assert row.measurement.provenance.controls is not None
    assert len(row.measurement.further) == 2
    same = row.measurement.provenance.controls.latency == 340e-9
    assert row.verdict.code is (None if same else Code.OTHER_CARD_VARIANT)
    # The figure beside a change is that of the processes that it is against.
    write("base9.json", 268e-6 * 1.1, 353e-9, 9)
    write("one.json", 268e-6, 340e-9, 20)
    (pair,) = compare_sides(side(str(folder.path / "base*.json")), side(str(folder.path / "one.json")), "5%", force=False).pairs
    assert pair.row.verdict.comparison is not None
    assert pair.row.verdict.comparison.processes == 6
    assert pair.base == pytest.approx(268e-6, rel=1e-3)


def test_several_stock_files_decide(folder: Folder, compare: Compare) -> None:
    for index, factor in enumerate([1, 1.002, 0.999, 1.001, 0.9985]):
        folder.stock(f"a{index}.json", {"test_a.py::test": 1e-3 * factor})
        folder.stock(f"same{index}.json", {"test_a.py::test": 1.0003e-3 * factor})
        folder.stock(f"slow{index}.json", {"test_a.py::test": 1.2e-3 * factor})
    assert compare("a*.json", "same*.json", "--max-regression", "10%", "--strict").exit_code == 0
    assert compare("a*.json", "slow*.json", "--max-regression", "10%").exit_code == 1


def test_stock_against_ours_is_refused(folder: Folder, compare: Compare) -> None:
    folder.stock("a.json", {"tests/test_a.py::test_triad": 268e-6})
    folder.write("b.json", [folder.row()])
    assert one_line(compare("a.json", "b.json")).startswith(f"a.json is of an unknown GPU, b.json of {H100.key}: ")
    forced = compare("a.json", "b.json", "--force", "--max-regression", "10%")
    assert (forced.exit_code, forced.stdout.splitlines()[-1]) == (6, "1 row: 1 NEW")


# Baselines


def test_a_folder_of_a_baseline(folder: Folder, compare: Compare) -> None:
    store = Store(folder.path / "kept", H100)
    for _ in range(4):
        store.save([folder.row()], "abc")
    head = folder.runs("head", 3, 268e-6 * 1.03)
    result = compare(str(store.folder), head, "--max-regression", "1%")
    assert result.exit_code == 1
    assert "4 processes on" in result.stdout


def test_the_processes_of_a_run_are_counted_and_not_its_files(folder: Folder, compare: Compare) -> None:
    one = folder.row()
    assert one.measurement is not None
    repeats = (Repeat(one.measurement.medians, one.measurement.overhead),) * 2
    folder.write("a.json", [replace(one, measurement=replace(one.measurement, further=repeats)), folder.row(name="test_other")])
    folder.write("b.json", [one])
    result = compare("a.json", "b.json")
    assert "base: a.json, 3 processes on" in result.stdout
    assert "head: b.json, 1 process on" in result.stdout


def test_only_runs_since_the_last_reset_of_a_baseline_are_compared_with(folder: Folder, compare: Compare) -> None:
    store, key = Store(folder.path / "kept", H100), folder.row().key
    for _ in range(4):
        store.save([folder.row(200e-6)], "abc")
    reset(folder.path / "kept", H100.key, [key], "why", "ada", None)
    for _ in range(3):
        store.save([folder.row(268e-6)], "abc")
    folder.write("b.json", [folder.row()])
    result = compare(str(store.folder), "b.json", "--max-regression", "1%", "--strict")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "1 row: 1 PASS")


def test_a_folder_of_a_baseline_counts_as_it_does_in_a_session(folder: Folder, compare: Compare) -> None:
    """Runs of a revision that was found slower leave it; a change that was accepted leaves no run to compare with."""
    store, row = Store(folder.path / "kept", H100), folder.row(limits=Limits(max_regression="1%"))
    for _ in range(3):
        store.save([row], "good")
    store.save([folder.row(300e-6, limits=row.limits)], "slow")
    store.save([replace(row, verdict=Verdict(Outcome.FAIL, "slower", code=Code.SLOWER), failed=True)], "slow")
    folder.write("b.json", [folder.row(300e-6)])
    assert compare(str(store.folder), "b.json", "--max-regression", "1%").exit_code == 1
    reset(folder.path / "kept", H100.key, [row.key], "as meant", "ada", None)
    result = compare(str(store.folder), "b.json", "--max-regression", "1%")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (6, "1 row: 1 NEW")
    assert "was accepted on" in result.stdout


def test_a_baseline_is_judged_as_in_a_session(folder: Folder, compare: Compare) -> None:
    """By its newest 20 runs, and by the first one since the last accepted change."""
    store = Store(folder.path / "kept", H100)
    for latency in (*[268e-6] * 5, *[275e-6] * 20):
        store.save([folder.row(latency)], "abc")
    row = folder.row(275e-6)
    assert row.measurement is not None
    now = replace(row.measurement, further=(row.measurement.repeat,) * 2)
    folder.write("b.json", [replace(row, measurement=now)])
    assert compare(str(store.folder), "b.json", "--max-regression", "1%", "--json", "out.json").exit_code == 1
    (found,) = json.loads((folder.path / "out.json").read_text())["rows"]
    history = store.load().history(row.key, lambda _: True)
    session = judging(now, Limits(max_regression="1%"), H100, history.measurements, strict=False, first=history.first_measurement)
    assert session.code is not None
    assert session.comparison is not None
    assert (found["code"], found["delta"]) == (session.code.value, session.comparison.delta)
    assert (session.code, found["delta"]) == (Code.CREPT, pytest.approx(0.0, abs=1e-3))
    assert found["base_s"] == pytest.approx(275e-6, rel=1e-3)


# Many rows


def test_all_rows_are_judged_as_one_family(folder: Folder, compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holm's procedure, in the order of the rows: of those that both sides have, less what was rejected before."""
    names = ["test_fine", "test_slow", "test_last"]
    for index in range(5):
        folder.write(f"base-{index}.json", [folder.row(name=name) for name in [*names, "test_gone"]])
    folder.write("head.json", [folder.row(600e-6 if name == "test_slow" else 268e-6, name) for name in [*names, "test_new"]])
    seen = []

    def judge(*arguments: Any, family: Family, **keywords: Any) -> Verdict:
        seen.append((family.size, family.rejected))
        return judging(*arguments, family=family, **keywords)

    monkeypatch.setattr(pairs, "judge", judge)
    assert compare("base-*.json", "head.json", "--max-regression", "10%").exit_code == 1
    assert seen == [(3, 0), (3, 0), (3, 1), (3, 1)]


# Mistakes


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "not JSON"),
        ("[1]", "neither a --benchmark-json file nor a baseline's"),
        ("{}", "neither a --benchmark-json file nor a baseline's"),
        ("[" * 100_000, "not JSON"),
        ('{"gpumem": {"schema": 9}}', "$.gpumem.schema: 9; this version reads 2"),
        ('{"gpumem": null}', "$.gpumem: not a JSON object"),
        ('{"benchmarks": [1]}', "$.benchmarks[0]: no fullname and stats"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"median": NaN}}]}', "$.benchmarks[0].stats.median: nan is no time"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"median": -1}}]}', "median: -1 is no time"),
        ('{"benchmarks": [{"fullname": "x", "stats": {"median": true}}]}', "median: True is no time"),
        ('{"benchmarks": [{"fullname": "x", "stats": {}}]}', "median: None is no time"),
        ('{"benchmarks": []}', "nothing was measured"),
        ('{"schema": 7}', "$.schema: 7; this version reads 2"),
    ],
)
def test_a_file_that_cannot_be_used(folder: Folder, compare: Compare, content: str, words: str) -> None:
    folder.put("a.json", content)
    folder.write("b.json", [folder.row()])
    for arguments in (["a.json", "b.json"], ["b.json", "a.json"]):
        line = one_line(compare(*arguments))
        assert line.startswith("a.json: ")
        assert words in line


def test_one_row_twice(folder: Folder, compare: Compare) -> None:
    folder.put("a.json", '{"benchmarks": [%s, %s]}' % (('{"fullname": "x", "stats": {"median": 1}}',) * 2))
    assert one_line(compare("a.json", "a.json")) == "a.json: holds x twice"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "BASE and HEAD are two, not 0"),
        (["a.json", "b.json", "c.json"], "BASE and HEAD are two, not 3; put a pattern such as 'base-*.json' into quotes"),
        (["a.json", "none.json"], "none.json: no such file, folder or pattern"),
        (["a.json", "none*.json"], "none*.json: no such file, folder or pattern"),
        (["a.json", "baselines"], "; there are some in baselines/gpu/gpumem"),
        (["a.json", "empty"], "empty: a folder without a .json file"),
        (["a.json", "a.json"], "a.json: the same file as a.json on the other side"),
        (["a.json", "copy.json"], "copy.json: the same file as a.json on the other side"),
        (["*a*.json", "b.json"], "the same as"),
        (["a.json", "b.json", "--max-regression", "1"], "--max-regression: '1' is not understood"),
    ],
)
def test_arguments_that_cannot_be_used(folder: Folder, compare: Compare, arguments: list[str], words: str) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()])
    (folder.path / "copy.json").write_bytes((folder.path / "a.json").read_bytes())
    (folder.path / "another-a.json").write_bytes((folder.path / "a.json").read_bytes())
    (folder.path / "empty").mkdir()
    (folder.path / "baselines" / "gpu" / "gpumem").mkdir(parents=True)
    (folder.path / "baselines" / "gpu" / "gpumem" / "1.json").write_text("{}")
    assert words in one_line(compare(*arguments))


def test_an_acceptance_alone_is_no_side(folder: Folder, compare: Compare) -> None:
    path: Path = reset(folder.path / "kept", H100.key, ["x"], "why", "ada", None)
    folder.write("b.json", [folder.row()])
    assert one_line(compare(str(path), "b.json")).endswith("nothing was measured")


def test_what_fails_comes_first_and_programs_read_the_same(folder: Folder, compare: Compare) -> None:
    for index in range(5):
        folder.write(f"base-{index}.json", [folder.row(name=f"test_{name}") for name in "abc"])
    for index in range(3):
        folder.write(f"head-{index}.json", [folder.row(name="test_a"), folder.row(name="test_b"), folder.row(280e-6, name="test_c")])
    result = compare("base-*.json", "head-*.json", "--max-regression", "1%")
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("test_")]
    assert rows == ["test_c", "test_a", "test_b"]
    plain = compare("base-*.json", "head-*.json", "--max-regression", "1%", "--json", "-")
    document = json.loads(plain.stdout)
    assert (plain.exit_code, document["exit"]) == (1, 1)
    assert [(row["test"][-6:], row["outcome"]) for row in document["rows"]] == [("test_c", "FAIL"), ("test_a", "PASS"), ("test_b", "PASS")]
    lines = list(csv.DictReader(compare("base-*.json", "head-*.json", "--csv", "-").stdout.splitlines()))
    assert float(lines[0]["delta"]) == pytest.approx(document["rows"][0]["delta"])
    named = compare("base-*.json", "head-*.json", "--csv", "c.csv", "--json", "c.json").stdout.splitlines()
    assert named[-2:] == ["wrote c.csv", "wrote c.json"]


def test_rows_of_memory_alone_are_left_to_the_command_that_compares_them(folder: Folder, compare: Callable[..., Result]) -> None:
    memory = replace(folder.row(name="test_memory"), measurement=None, footprint=Footprint(1 << 20, watched=("fixtures",)))
    folder.write("a.json", [folder.row(), memory])
    folder.write("b.json", [folder.row(), memory])
    done = compare("a.json", "b.json")
    assert done.exit_code == 0
    assert "UNDECIDED" not in done.stdout
    assert "1 test whose memory alone was watched: gpumem diff compares it" in done.stdout
    folder.write("c.json", [memory])
    assert one_line(compare("c.json", "b.json")) == "c.json: nothing was timed; gpumem diff compares the memory of its 1 test"
