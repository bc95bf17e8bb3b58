"""`gpumem gate` from its arguments to its files, with a screen and a duet that say what the test wants."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from committing import git
from flagged_rows import row
from known_devices import H100
from msgspec import structs

from pytest_gpumem.baselines.accepted import Acceptances
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main
from pytest_gpumem.commands import gate
from pytest_gpumem.judging.expectations import Selection
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.difference import Difference
from pytest_gpumem.records.footprint import Site
from pytest_gpumem.records.row import Row
from pytest_gpumem.records.schema import Document, document
from pytest_gpumem.reporting.run import Place
from pytest_gpumem.revisions import Ancestry
from pytest_gpumem.runs import rounds as duet_rounds
from pytest_gpumem.runs.reading import DuetVerdict, RowFilter

Run = Callable[..., Result]


def selected(selection: Selection) -> Future[Selection]:
    found = Future[Selection]()
    found.set_result(selection)
    return found


class Fake:
    """A base that has these tests, and runs none."""

    side = None

    @contextmanager
    def selecting(self) -> Iterator[Future[Selection]]:
        yield selected(Selection({}, tuple(f"t.py::{name}" for name in "abc")))


BASE = Fake()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command; keywords say what the screen measured and what the duet answers by key. The calls stand in `calls.json`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    for name in ("GITHUB_STEP_SUMMARY", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)

    def invoke(
        *arguments: str,
        rows: tuple[Row, ...],
        duet: dict[str, str | None] | None = None,
        code: int | None = None,
    ) -> Result:
        failures = sum(one.failed for one in rows)

        def screen(
            output: Path, base: str, given: tuple[str, ...], **_: object
        ) -> gate.ScreenResult:
            assert not any((output / name).exists() for name in gate.FILES)
            (output / gate.REPORT).write_text("the screen's")
            (output / gate.RESULTS).write_text(
                json.dumps({"gpumem": document(H100, list(rows), {"mode": "clean-cold"}, [])})
            )
            found = Document(H100, {"mode": "clean-cold"}, rows) if rows else None
            failed = [gate.Failure(one.nodeid, "an error") for one in rows if one.failed]
            places = {one.nodeid: Place("sub/t.py", 7) for one in rows}
            return gate.ScreenResult(
                (1 if failures else 0) if code is None else code, failed, found, places=places
            )

        def play(
            base: str,
            wanted: RowFilter,
            pytest_arguments: list[str],
            *,
            base_side: object,
            file: Path,
            **given: Any,
        ) -> tuple[int, duet_rounds.DuetResult]:
            assert duet is not None, "nothing was to be decided"
            given |= {
                "base": base,
                "keys": sorted(wanted.keys or ()),
                "pytest_arguments": pytest_arguments,
            }
            (tmp_path / "calls.json").write_text(json.dumps(given))
            file.write_text("{}")
            verdicts = (
                DuetVerdict(
                    key, Outcome(outcome) if outcome else None, "so the duet", new=outcome is None
                )
                for key, outcome in duet.items()
            )
            return 1 if "FAIL" in duet.values() else 0, duet_rounds.DuetResult(
                tuple(verdicts), (), 0, strict=False
            )

        monkeypatch.setattr(gate, "_screen", screen)
        monkeypatch.setattr(
            gate,
            "ancestry",
            lambda of, stored, folder: Ancestry("0" * 40, frozenset({"ours"}), frozenset()),
        )
        monkeypatch.setattr(gate, "_base", lambda *_: BASE)
        monkeypatch.setattr(gate, "compare", play)
        monkeypatch.setattr(gate.GateRun, "_looked_at_again", lambda *_: [])
        return CliRunner().invoke(main, ["gate", "main", *arguments], prog_name="gpumem")

    return invoke


def test_what_the_duet_clears_is_green_and_written_so(run: Run, tmp_path: Path) -> None:
    asked = ("--rounds-max", "12", "--max-regression", "1%", "--", "tests", "-n0")
    result = run(*asked, rows=(row(Code.SLOWER), row(name="b")), duet={"t.py::a": "PASS"})
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[:2] == [
        "gpumem gate: cleared by the duet: t.py::a",
        "gpumem gate: green: 2 rows",
    ]
    call = json.loads((tmp_path / "calls.json").read_text())
    assert (call["base"], call["rounds_max"], call["pytest_arguments"]) == (
        "main",
        12,
        ["tests", "-n0", "--gpumem-max-regression=1%"],
    )
    assert call["max_regression"] == {
        "t.py::a": "1%"
    }  # a limit of a test wins over it, as in the screen
    assert call["keys"] == ["t.py::a"]
    summary = (tmp_path / "gpumem-results" / "summary.md").read_text()
    assert "green: 2 rows\ncleared by the duet: t.py::a" in summary
    assert "**2 rows: 2 PASS**" in summary
    report = (tmp_path / "gpumem-results" / "report.html").read_text()
    assert "green: 2 rows\ncleared by the duet: t.py::a" in report
    assert '<span class="chip pass">2 PASS</span>' in report
    assert "FAIL</span>" not in report


def test_the_report_draws_the_saved_runs_of_the_history_that_both_sides_share(
    run: Run, tmp_path: Path
) -> None:
    store, passing = Store(tmp_path / ".benchmarks", H100), row(name="b")
    for revision in ("ours", "ours", "another"):
        store.save([passing], revision)
    assert run("--screen-only", rows=(passing,)).exit_code == 0
    assert (
        "<figcaption>2 saved runs and this one<"
        in (tmp_path / "gpumem-results" / "report.html").read_text()
    )


def test_rows_of_the_same_code_need_no_duet(run: Run, tmp_path: Path) -> None:
    settled = tuple(
        structs.replace(one, verdict=structs.replace(one.verdict, code=Code.SAME_CODE))
        for one in (row(name="b"), row(name="c"))
    )
    run(rows=(row(Code.SLOWER), *settled), duet={"t.py::a": "PASS"})
    assert json.loads((tmp_path / "calls.json").read_text())["keys"] == ["t.py::a"]
    assert "**3 rows: 3 PASS**" in (tmp_path / "gpumem-results" / "summary.md").read_text()


def test_a_noisy_row_has_a_duet_whatever_code_it_runs(run: Run, tmp_path: Path) -> None:
    one = row(Code.NOISY)
    assert one.verdict.comparison is not None
    same = structs.replace(
        one,
        verdict=structs.replace(
            one.verdict, comparison=structs.replace(one.verdict.comparison, same_code=True)
        ),
    )
    run(rows=(same,), duet={"t.py::a": "PASS"})
    assert json.loads((tmp_path / "calls.json").read_text())["keys"] == ["t.py::a"]


def test_what_the_duet_confirms_is_red_at_its_place(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "steps.md")
    result = run("--output", "out", rows=(row(Code.LOOKS_SLOWER),), duet={"t.py::a": "FAIL"})
    assert result.exit_code == 1
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("::"))
    assert line.startswith("::error file=sub/t.py,line=7,title=gpumem%3A FAIL::FAIL t.py::a: ")
    assert "so the duet" in line
    assert (tmp_path / "steps.md").read_text() == (
        tmp_path / "out" / "summary.md"
    ).read_text() + "\n"


def test_a_summary_that_cannot_be_written_changes_no_verdict(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "nowhere/steps.md")
    result = run(rows=(row(),))
    assert (result.exit_code, result.stdout.splitlines()[0]) == (0, "gpumem gate: green: 1 row")
    assert (
        "GITHUB_STEP_SUMMARY: cannot write nowhere/steps.md: No such file or directory"
        in result.stderr
    )
    # GitHub shows nothing of a file that is too large.
    full = tmp_path / "steps.md"
    full.write_text("x" * (1 << 20))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(full))
    assert "is nearly full, nothing is added" in run(rows=(row(),)).stderr
    assert full.stat().st_size == 1 << 20


def test_a_screen_measures_everything_and_knows_failures_of_verdicts_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With -x the duet would clear the first failure, and nobody have looked at what comes after it."""
    (tmp_path / "test_them.py").write_text(
        """
import pytest

@pytest.mark.gpumem(max_latency="1 ns")
def test_slow(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)

def test_wrong(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)
    raise AssertionError("FAIL (simulated) by itself")

@pytest.fixture
def messy():
    yield
    raise ValueError

def test_torn(messy, gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0, label="a")

def test_fine(gpu_benchmark, device_buffer, gpu_kernels):
    gpu_benchmark(gpu_kernels.write, device_buffer(1 << 20), 1.0)

def test_nothing_measured():
    pass
"""
    )
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "one")
    (tmp_path / "out").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\ngpumem_save = true\naddopts = --gpumem-save\n")
    monkeypatch.setenv("GPUMEM_SAVE", "1")
    screened = gate._screen(
        Path("out"),
        "HEAD",
        ["-x", "--gpumem-device=sim", "--gpumem-budget=20ms"],
        selecting=selected(Selection({})),
        accepts=False,
    )
    assert screened.document is not None
    wrong = {"test_them.py::test_wrong", "test_them.py::test_torn"}
    errors = {row.nodeid for row in screened.document.rows if row.test_error is True}
    assert (screened.code, errors, len(screened.document.rows)) == (1, wrong, 4)
    assert {one.nodeid for one in screened.failures} == {*wrong, "test_them.py::test_slow"}
    assert screened.places["test_them.py::test_wrong"] == Place("test_them.py", 8)
    assert not list(tmp_path.rglob("*/gpumem/*.json"))


def test_a_row_without_a_baseline_is_for_the_duet_and_a_new_one_is_named(
    run: Run, tmp_path: Path
) -> None:
    alone = (row(Code.NO_BASELINE, delta=None), row(Code.NO_BASELINE, "b", delta=None))
    assert run(rows=alone, duet={"t.py::a": "FAIL", "t.py::b": "PASS"}).exit_code == 1
    assert json.loads((tmp_path / "calls.json").read_text())["keys"] == ["t.py::a", "t.py::b"]
    new = run(rows=alone, duet={"t.py::a": None, "t.py::b": "PASS"})
    assert (new.exit_code, new.stdout.splitlines()[:2]) == (
        0,
        [
            "gpumem gate: new, base does not have it: t.py::a",
            "gpumem gate: green: 2 rows, 1 of them new",
        ],
    )
    assert run("--screen-only", rows=alone).exit_code == 6


def test_nothing_flagged_needs_no_duet_and_screen_only_has_none(run: Run) -> None:
    assert run(rows=(row(),)).exit_code == 0
    assert run("--screen-only", rows=(row(Code.SLOWER),)).exit_code == 1
    assert run(rows=(row(Code.SLOWER),), code=2).exit_code == 1


def test_what_is_red_anyway_costs_no_duet(run: Run, tmp_path: Path) -> None:
    broken = row(Code.SLOWER, max_latency="1 us")
    alone = run(rows=(broken, row(name="b")))
    end = [
        "gpumem gate: red: 1 of 2 rows fails",
        "FAIL t.py::a",
        "  latency 1.000 ms, was 970.9 us: +3.00 %, max_regression 1%",
        "  said by the screen of a",
        "to repeat: gpumem duet main --test t.py::a",
        "to repair: change the code",
        "to accept, commit what this writes and gate with --accept-from-change: "
        "gpumem accept t.py::a --reason '...'",
        "2 rows: 1 FAIL, 1 PASS; 0 s on NVIDIA H100 80GB HBM3",
        "report: gpumem-results/report.html",
    ]

    def lines(text: str) -> list[str]:
        return re.sub(r"\d+ s on", "0 s on", text).splitlines()

    assert (alone.exit_code, lines(alone.stdout)) == (1, end)
    assert [line.partition(": ")[2] for line in alone.stderr.splitlines()[:3]] == [
        "step 1 of 3: collect the tests of the merge base with main",
        "step 2 of 3: measure the tests, and compare them with the history shared with main",
        "step 3 of 3: the screen flags 1 row; a duet would change nothing for it",
    ]
    beside = run(rows=(broken, row(Code.SLOWER, "b")), duet={"t.py::b": "PASS"})
    assert json.loads((tmp_path / "calls.json").read_text())["keys"] == ["t.py::b"]
    assert lines(beside.stdout) == ["gpumem gate: cleared by the duet: t.py::b", *end]
    assert (
        "the screen flags 2 rows; the duet decides 1 of them, the others fail whatever its verdict"
        in beside.stderr
    )


def test_differences_are_looked_for_of_the_worst_rows_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the worst five that fail by their figures and that base has: those of the duet, else of further processes."""
    asked, grid = list[str](), Difference("kernel", (1, 1, 1), (2, 1, 1), "copy", "grid")

    def looked_at_again(_gate: object, rows: list[Row]) -> list[Row]:
        asked.extend(one.nodeid[-1] for one in rows)
        return [structs.replace(one, differences=(grid,)) for one in rows]

    monkeypatch.setattr(gate.GateRun, "_looked_at_again", looked_at_again)
    slow = [row(Code.SLOWER, name, delta=delta / 100) for delta, name in enumerate("abcdefg", 3)]
    errs = structs.replace(row(Code.SLOWER, "e", delta=9.0), test_error=True)
    lines = (
        Difference("peak memory", 0, 16 << 20, site=Site("t.py", 3, "f", "g()", "CuPy", "device")),
    )
    known = structs.replace(row(Code.TOO_MUCH_MEMORY, "m", delta=8.0), differences=lines)
    gone = structs.replace(row(Code.SLOWER, "z", delta=7.0), nodeid="u.py::z")
    base = Selection({}, (*(one.nodeid for one in slow), known.nodeid))
    gated = gate.GateRun(
        Path(),
        "main",
        BASE,  # type: ignore[arg-type]
        base,
        (),
        1,
        Acceptances(()),
        (),
        screen_only=False,
        strict=False,
    )
    played = {"t.py::f": DuetVerdict("t.py::f", Outcome.FAIL, "slower", differences=(grid,))}
    rows = [row(name="x"), *slow, errs, known, gone]
    found = gated.with_differences(rows, played)
    assert [one.nodeid for one in found] == [one.nodeid for one in rows]
    assert asked == ["g", "e", "d"]
    assert {one.key for one in found if one.differences == (grid,)} == {
        f"t.py::{name}" for name in "gfed"
    }


def test_results_of_an_earlier_run_are_taken_away(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "gpumem-results"
    assert run(rows=()).exit_code == 6
    for name in (*gate.FILES, "mine.txt"):
        (folder / name).write_text("old")
    assert run(rows=()).exit_code == 6
    assert sorted(path.name for path in folder.iterdir()) == [
        ".gitignore",
        "mine.txt",
        "report.html",
        "results.json",
        "summary.md",
    ]
    assert "nothing was measured" in (folder / "summary.md").read_text()
    assert (folder / ".gitignore").read_text().splitlines()[-1] == "*"


@pytest.mark.parametrize("output", [".", "link", "mine", "marked"])
def test_a_folder_that_is_not_the_gates_is_refused_untouched(
    run: Run, tmp_path: Path, output: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "marked").mkdir()
    for name in (".gitignore", *gate.FILES):
        for folder in (tmp_path, tmp_path / "mine"):
            (folder / name).write_text("mine")
    # A link of somebody's to a marker of ours does not make the folder ours.
    assert run("--output", "ours", rows=()).exit_code == 6
    (tmp_path / "marked" / ".gitignore").symlink_to(tmp_path / "ours" / ".gitignore")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    result = run("--output", output, rows=(row(),))
    assert result.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"gpumem: --output: {output} holds files that no gate wrote; accepted is an empty or a new folder"
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("before", [True, False])
def test_a_base_that_git_does_not_know_touches_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    folder = tmp_path / "gpumem-results"
    if before:
        assert run(rows=()).exit_code == 6
        (folder / gate.RESULTS).write_text("old")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["gate", "nope"], prog_name="gpumem")
    assert result.exit_code == 4
    assert result.stderr.startswith("gpumem: BASE: ")
    assert folder.exists() is before
    assert not before or (folder / gate.RESULTS).read_text() == "old"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--", "--benchmark-json=x"],
            "--benchmark-json among pytest's arguments: the gate writes into gpumem-results",
        ),
        (["--", "--gpumem-save"], "a gate saves nothing into a baseline"),
        (["--max-regression", "2"], "--max-regression: '2'"),
        (["--output", "calls"], "--output"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_run(
    run: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "calls").write_text("a file")
    result = run(*arguments, rows=(row(),), code=99)
    assert result.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpumem: ")
    assert words in line
