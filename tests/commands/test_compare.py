"""`gpumem compare`: which files it takes, what it says of them, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace
from result_files import H100, Folder

from pytest_gpumem.baselines.compare import compare_sides, side
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.footprint import Footprint, MemoryUse
from pytest_gpumem.records.measurement import Conditions, Limits
from pytest_gpumem.records.row import Omission, Row, Status, Verdict
from pytest_gpumem.records.what_ran import Step, StepKind, what_ran

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
    base, head = folder.runs("base", 5), folder.runs("head", 3, 268e-6 * 1.15)
    result = compare(base, head, "--max-regression", "1%")
    assert result.exit_code == 1
    assert f"base: base-*.json, 5 processes on {H100.key}, driver 580.95.05\n" in result.stdout
    assert "head: head-*.json, 3 processes on" in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("test_triad")]
    assert line.split()[-1] == "FAIL"
    assert "FAIL tests/test_a.py::test_triad: +" in result.stdout
    smaller = compare(base, folder.runs("head", 3, 268e-6 * 1.03), "--max-regression", "1%")
    assert smaller.exit_code == 0
    words = " ".join(smaller.stdout.split())
    assert "UNDECIDED tests/test_a.py::test_triad: +3.0" in words
    assert "looks slower than max_regression 1%" in words


def test_what_passes_and_what_passes_no_strict_gate(folder: Folder, compare: Compare) -> None:
    rows: list[tuple[Any, Any, str | None, str, tuple[int, int]]] = [
        ((12, {}), (3, {}), "2%", "1 PASS", (0, 0)),
        ((3, {}), (1, {"latency": 300e-6}), None, "1 measured", (6, 6)),
        ((3, {"spread": 0.02}), (1, {"spread": 0.02}), "1%", "1 UNDECIDED", (0, 6)),
        ((3, {"mode": "hot"}), (1, {}), "10%", "1 UNDECIDED", (6, 6)),
        ((3, {}), (1, {"nodeid": "tests/test_a.py::test_new"}), None, "1 measured", (1, 1)),
        ((3, {"facts": SIMULATED}), (1, {"facts": SIMULATED}), "10%", "1 PASS", (0, 6)),
        (
            (3, {}),
            (1, {"failed": True, "verdict": Verdict(Outcome.FAIL, "too slow")}),
            "10%",
            "1 PASS",
            (0, 0),
        ),
        (
            (3, {}),
            (1, {"failed": True, "strict": True, "verdict": Verdict(Outcome.NEW, "none")}),
            "10%",
            "1 PASS",
            (0, 0),
        ),
    ]
    for number, (base, head, limit, last, codes) in enumerate(rows):
        arguments = [
            folder.runs(f"base-{number}", base[0], **base[1]),
            folder.runs(f"head-{number}", head[0], **head[1]),
        ]
        arguments += ["--max-regression", limit] if limit else []
        plain, strict = compare(*arguments), compare(*arguments, "--strict")
        (counts,) = [
            line
            for line in plain.stdout.splitlines()
            if " row with " not in line and line.startswith("1 row")
        ]
        found = counts.partition(": ")[2], plain.exit_code, strict.exit_code
        assert found == (last, *codes)
        assert ("(simulated)" in counts) == ("facts" in base[1])


def test_each_test_is_held_to_its_own_limit(folder: Folder, compare: Compare) -> None:
    for origin in ["marker", "call", "marker of origin/main"]:
        folder.runs("base", 5)
        held = Limits(max_regression="1%", origin={"max_regression": origin})
        folder.runs("head", 3, 320e-6, limits=held)
        for arguments in ([], ["--max-regression", "10%"]):  # as in a gate
            result = compare("base-*.json", "head-*.json", *arguments)
            assert (f"max_regression 1% ({origin})" in result.stdout, result.exit_code) == (
                True,
                1,
            ), origin
        lifted = Limits(origin={"max_regression": origin})
        folder.runs("head", 3, 320e-6, limits=lifted)
        lines = compare("base-*.json", "head-*.json", "--max-regression", "1%").stdout.splitlines()
        assert "1 row: 1 measured" in lines, origin
        of_the_session = Limits(
            max_regression="1%", origin={"max_regression": "--gpumem-max-regression"}
        )
        folder.runs("head", 3, 270e-6, limits=of_the_session)
        assert (
            compare("base-*.json", "head-*.json", "--max-regression", "10%", "--strict").exit_code
            == 0
        ), origin


def test_the_change_is_the_ratio_of_the_times(folder: Folder, compare: Compare) -> None:
    """Also where another launch overhead is a part of the times of one side."""
    for index in range(3):
        folder.write(f"base-{index}.json", [folder.row(20e-6)])
    row = folder.row(20.5e-6)
    assert row.measurement is not None
    folder.write("head.json", [replace(row, measurement=replace(row.measurement, overhead=2.5e-6))])
    compare("base-*.json", "head.json", "--json", "out.json")
    (found,) = json.loads((folder.path / "out.json").read_text())["rows"]
    assert found["head_s"] / found["base_s"] - 1 == pytest.approx(found["change"])
    assert found["head_s"] == pytest.approx(20.5e-6, rel=1e-3)
    assert found["change"] == pytest.approx(0.0, abs=2e-3)


def test_the_newest_run_has_the_limit(folder: Folder, compare: Compare) -> None:
    """Whatever the files are called."""
    for limits, code in [(("1%", "400%"), 0), (("400%", "1%"), 1), (("1%", None), 6)]:
        folder.runs("base", 5)
        for name, day, limit in (
            ("head-2.json", "2026-11-20", limits[0]),
            ("head-1.json", "2026-11-21", limits[1]),
        ):
            folder.write(name, [folder.row(600e-6, limits=Limits(max_regression=limit))])
            value = json.loads((folder.path / name).read_text())
            folder.put(name, {**value, "datetime": f"{day}T18:00:00+00:00"})
        assert compare("base-*.json", "head-*.json").exit_code == code, limits


def test_rows_of_one_side_are_named(folder: Folder, compare: Compare) -> None:
    for index in range(3):
        folder.write(f"a{index}.json", [folder.row(), folder.row(name="test_gone")])
    folder.write("b.json", [folder.row(), folder.row(name="test_new")])
    result = compare("a?.json", "b.json", "--max-regression", "10%")
    assert result.exit_code == 1
    assert "lost: tests/test_a.py::test_gone: not in b.json" in result.stdout
    assert "NEW tests/test_a.py::test_new: max_regression 10%" in result.stdout
    assert "nothing to compare with: not in a?.json" in " ".join(result.stdout.split())
    assert "2 rows: 1 NEW, 1 PASS" in result.stdout.splitlines()
    found = compare_sides(side("a?.json"), side("b.json"), "10%")
    assert [row.verdict.code for row in found.rows] == [None, Code.NO_BASELINE]
    assert [(one.key, one.status) for one in found.missing] == [
        ("tests/test_a.py::test_gone", "lost")
    ]


def test_what_the_run_itself_said_of_a_missing_row_holds(folder: Folder, compare: Compare) -> None:
    cases: list[tuple[Status, bool, int]] = [
        ("lost", False, 1),
        ("accepted", False, 0),
        ("not run", False, 1),
    ]
    for status, by_words, code in cases:
        for index in range(3):
            folder.write(f"a{index}.json", [folder.row(), folder.row(name="test_gone")])
        folder.write(
            "b.json",
            [folder.row()],
            missing=[
                Omission("tests/test_a.py::test_gone", "", status, "deselected", by_words=by_words)
            ],
        )
        result = compare("a?.json", "b.json", "--max-regression", "10%")
        assert (result.exit_code, "deselected" in result.stdout) == (code, True), (
            status,
            by_words,
            code,
        )


THROTTLED = (Conditions(), Conditions(throttle_reasons=("sw_power_cap",)))


def test_a_row_that_cannot_be_compared_gets_what_a_session_gives_it(
    folder: Folder, compare: Compare
) -> None:
    cases: list[tuple[str, dict[str, Any], str, str, int]] = [
        (
            "a.json",
            {"conditions": THROTTLED},
            "NEW",
            "throttled after the samples (sw_power_cap)",
            6,
        ),
        ("a.json", {"profiled": True}, "NEW", "a profiler was attached", 6),
        ("a.json", {"failed": True}, "NEW", "its test failed", 6),
        (
            "b.json",
            {"conditions": THROTTLED},
            "UNDECIDED",
            "mend the machine: throttled after the samples (sw_power_cap); no limit was judged",
            6,
        ),
        (
            "b.json",
            {"profiled": True},
            "UNDECIDED",
            "mend the machine: a profiler was attached; no limit was judged",
            6,
        ),
        ("b.json", {"failed": True}, "FAIL", "its test failed in b.json", 1),
    ]
    for bad, changes, outcome, why, code in cases:
        for name in ("a.json", "b.json"):
            folder.write(
                name,
                [folder.row(**(changes if name == bad else {})), folder.row(name="test_other")],
            )
        result = compare("a.json", "b.json", "--max-regression", "10%", "--strict")
        assert result.exit_code == code, (bad, changes, outcome, why, code)
        assert f"{outcome} tests/test_a.py::test_triad: " in result.stdout, (
            bad,
            changes,
            outcome,
            why,
            code,
        )
        assert why in " ".join(result.stdout.split()), (bad, changes, outcome, why, code)


def test_a_limit_that_one_row_breaks_leaves_the_other_rows_of_its_test(folder: Folder) -> None:
    broken = Verdict(Outcome.FAIL, "above max_latency")
    rows = [folder.row(label="x", failed=True, verdict=broken), folder.row(label="y", failed=True)]
    found = side(folder.write("a.json", rows))
    assert ({key.rpartition("[")[2] for key in found.baseline.rows}, found.left_out) == (
        {"x]", "y]"},
        {},
    )
    by_itself = side(folder.write("b.json", rows[1:]))
    assert [why for _, why in by_itself.left_out.values()] == ["its test failed"]
    # An assertion that fails besides the limit may have left anything to time.
    both = side(folder.write("c.json", [replace(row, test_error=True) for row in rows]))
    assert both.baseline.rows == {}
    assert {why for _, why in both.left_out.values()} == {"its test failed"}


def test_different_gpus_are_refused(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()], A100)
    line = one_line(compare("a.json", "b.json"))
    assert line == (
        f"a.json is of {H100.key}, b.json of {A100.key}: results of different GPUs are not comparable"
    )
    line = one_line(compare("[ab].json", folder.write("c.json", [folder.row()])))
    assert line.startswith("[ab].json is of ")


def test_simulated_never_meets_real(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()], SIMULATED)
    assert (
        one_line(compare("a.json", "b.json")) == "simulated results are never compared with a GPU's"
    )


# Baselines


def test_a_folder_of_a_baseline(folder: Folder, compare: Compare) -> None:
    store = Store(folder.path / "kept", H100)
    for _ in range(4):
        store.save([folder.row()], "abc")
    head = folder.runs("head", 3, 268e-6 * 1.16)
    result = compare(str(store.folder), head, "--max-regression", "1%")
    assert result.exit_code == 1
    assert "4 processes on" in result.stdout


# Mistakes


def test_a_file_that_cannot_be_used(folder: Folder, compare: Compare) -> None:
    for content, words in [
        ("", "not JSON"),
        ("[1]", "neither a --benchmark-json file of a session with --gpumem nor"),
        ('{"gpumem": {"schema": 9}}', "$.gpumem.schema: 9; this version reads 2"),
        ('{"schema": 7}', "$.schema: 7; this version reads 4"),
    ]:
        folder.put("a.json", content)
        folder.write("b.json", [folder.row()])
        for arguments in (["a.json", "b.json"], ["b.json", "a.json"]):
            line = one_line(compare(*arguments))
            assert line.startswith("a.json: "), content
            assert words in line, content


def test_arguments_that_cannot_be_used(folder: Folder, compare: Compare) -> None:
    folder.write("a.json", [folder.row()])
    folder.write("b.json", [folder.row()])
    (folder.path / "copy.json").write_bytes((folder.path / "a.json").read_bytes())
    (folder.path / "another-a.json").write_bytes((folder.path / "a.json").read_bytes())
    (folder.path / "empty").mkdir()
    (folder.path / "baselines" / "gpu" / "gpumem").mkdir(parents=True)
    (folder.path / "baselines" / "gpu" / "gpumem" / "1.json").write_text("{}")
    for arguments, words in [
        (
            ["a.json", "b.json", "c.json"],
            "BASE and HEAD are two, not 3; put a pattern such as 'base-*.json' into quotes",
        ),
        (["a.json", "none.json"], "none.json: no such file, folder or pattern"),
        (["a.json", "baselines"], "; there are some in baselines/gpu/gpumem"),
        (["a.json", "empty"], "empty: a folder without a .json file"),
        (["a.json", "b.json", "--max-regression", "1"], "--max-regression: '1' is not understood"),
    ]:
        assert words in one_line(compare(*arguments))


def test_what_fails_comes_first_and_programs_read_the_same(
    folder: Folder, compare: Compare
) -> None:
    for index in range(5):
        folder.write(f"base-{index}.json", [folder.row(name=f"test_{name}") for name in "abcd"])
    for index in range(3):
        folder.write(
            f"head-{index}.json",
            [
                folder.row(name="test_a"),
                folder.row(name="test_b"),
                folder.row(320e-6, name="test_c"),
                folder.row(name="test_d"),
            ],
        )
    result = compare("base-*.json", "head-*.json", "--max-regression", "5%")
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.startswith("test_")]
    assert (rows[0], set(rows)) == ("test_c", {"test_a", "test_b", "test_c", "test_d"})
    plain = compare("base-*.json", "head-*.json", "--max-regression", "5%", "--json", "-")
    document = json.loads(plain.stdout)
    assert (plain.exit_code, document["exit"]) == (1, 1)
    outcomes = [row["outcome"] for row in document["rows"]]
    assert outcomes == ["PASS", "PASS", "FAIL", "PASS"]
    named = compare("base-*.json", "head-*.json", "--json", "c.json").stdout.splitlines()
    assert named[-1] == "wrote c.json"


# Counts, bytes, code and memory

KERNEL = Step(
    StepKind.KERNEL,
    "triad",
    code="aa",
    grid=(64, 1, 1),
    block=(256, 1, 1),
    registers=32,
    local=0,
    stream=7,
)
COPY = Step(
    StepKind.COPY, "host to device", nbytes=4096, source="pinned", memory="device", stream=7
)


def with_steps(row: Row, *steps: Step, not_watched: str | None = None) -> Row:
    assert row.measurement is not None
    return replace(
        row,
        measurement=replace(row.measurement, what_ran=what_ran(steps, {}, not_watched=not_watched)),
    )


def with_peak(row: Row, nbytes: int, **limits: str) -> Row:
    use = MemoryUse("CuPy", "device", peak=nbytes, allocations=2, largest=nbytes)
    held = Limits(**limits, origin=dict.fromkeys(limits, "marker"))
    return replace(row, footprint=Footprint(nbytes, (use,), watched=("CuPy",)), limits=held)


def differing(compare: Compare) -> list[str]:
    (row,) = json.loads(compare("base.json", "head.json", "--json", "-").stdout)["rows"]
    lines: list[str] = row["differences"]
    return lines


def test_bytes_and_steps_that_differ_are_listed(folder: Folder, compare: Compare) -> None:
    row = folder.row()
    folder.write("base.json", [with_peak(with_steps(row, KERNEL, COPY), 80 << 20)])
    faster = replace(KERNEL, code="bb", block=(128, 1, 1), registers=40)
    folder.write("head.json", [with_peak(with_steps(row, faster, COPY, COPY), 90596964)])
    lines = differing(compare)
    assert lines[0] == "peak 80 MiB → 86.4 MiB (+8.00 %)"
    assert "kernel triad: registers 32 → 40" in lines
    assert "kernel triad: block 256 → 128" in lines
    assert any(line.startswith("copy host to device added") for line in lines)
    shown = [line.strip() for line in compare("base.json", "head.json").stdout.splitlines()]
    assert set(lines) <= set(shown)


def test_every_limit_of_a_test_is_judged(folder: Folder, compare: Compare) -> None:
    for limits, base, head, code in [
        ({"max_copies": "base"}, (KERNEL, COPY), (KERNEL, COPY, COPY), 1),
        ({"max_copies": "base"}, (KERNEL, COPY), (KERNEL, COPY), 0),
        ({"max_latency": "1 us"}, (KERNEL,), (KERNEL,), 1),
    ]:
        folder.write("base.json", [with_steps(folder.row(), *base)])
        held = Limits(**limits, origin=dict.fromkeys(limits, "marker"))
        folder.write("head.json", [replace(with_steps(folder.row(), *head), limits=held)])
        assert compare("base.json", "head.json").exit_code == code, (limits, base, head, code)


def test_memory_is_judged_as_in_a_session(folder: Folder, compare: Compare) -> None:
    for timed in [True, False]:
        for base, head, limits, code in [
            (80 << 20, 90596964, {"max_peak_regression": "0 B"}, 1),
            (80 << 20, 80 << 20, {"max_peak_regression": "0 B"}, 0),
            (80 << 20, 90596964, {"max_peak_regression": "10%"}, 0),
            (80 << 20, 90596964, {"max_peak": "64 MiB"}, 1),
        ]:
            row = folder.row() if timed else replace(folder.row(), measurement=None)
            folder.write("base.json", [with_peak(row, base)])
            folder.write("head.json", [with_peak(row, head, **limits)])
            result = compare("base.json", "head.json")
            assert result.exit_code == code, (timed, base, head, limits, code)
            assert ("86.4 MiB" in result.stdout) == (head != base), (
                timed,
                base,
                head,
                limits,
                code,
            )


def test_a_limit_that_the_run_judged_by_nothing_gives_no_verdict(
    folder: Folder, compare: Compare
) -> None:
    unjudged = Omission("tests/test_a.py::test_host", "", "undecided", "no time", "max_latency")
    for index in range(3):
        folder.write(f"a{index}.json", [folder.row()])
    folder.write("b.json", [folder.row()], missing=[unjudged])
    assert compare("a?.json", "b.json", "--max-regression", "10%").exit_code == 6
    folder.write("a0.json", [folder.row()], missing=[unjudged])  # nothing that HEAD changed
    assert compare("a?.json", "b.json", "--max-regression", "10%").exit_code == 0
