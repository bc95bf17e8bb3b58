"""`gpumem accept`: what it takes from the last gate, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from committing import commit, git
from flagged_rows import row
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.acceptances import FOLDER, Acceptance, AcceptedChange, acceptances
from pytest_gpumem.cli import main
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import (
    LOST,
    LimitResult,
    Omission,
    PairedChange,
    Row,
)
from pytest_gpumem.records.schema import document

Accept = Callable[..., Result]
Write = Callable[..., None]
SLOWER = LimitResult("max_regression", Outcome.FAIL, Code.SLOWER)
TRIAD = "t.py::test_triad"


def slower(name: str = "test_triad", label: str = "", *more: LimitResult, **limits: Any) -> Row:
    found = row(Code.SLOWER, name, 0.0841, label, **limits)
    return replace(found, verdict=replace(found.verdict, limits=(SLOWER, *more)))


@pytest.fixture
def accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accept:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_ACTOR", "GITLAB_USER_LOGIN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    return lambda *arguments: CliRunner().invoke(main, ["accept", *arguments])


@pytest.fixture
def results(tmp_path: Path) -> Write:
    """Writes the results of a gate."""

    def write(*rows: Row, missing: Sequence[Omission] = ()) -> None:
        folder = tmp_path / "gpumem-results"
        folder.mkdir(exist_ok=True)
        plain = {"gpumem": document(H100, rows, {"baseline_of": "main"}, missing)}
        (folder / "results.json").write_text(json.dumps(plain))

    return write


def written(folder: Path) -> list[Acceptance]:
    return list(acceptances(folder).files.values())


def test_what_the_last_gate_found(accept: Accept, results: Write, tmp_path: Path) -> None:
    results(slower(), slower("test_other"), row(name="test_fine"))
    result = accept(TRIAD, "--reason", " checks bounds ")
    assert result.exit_code == 0, result.output
    ((name, made),) = acceptances(tmp_path).files.items()
    assert (made.test, made.reason, made.who) == (TRIAD, "checks bounds", "ada")
    assert (made.base, made.gpu) == (None, H100.key)
    assert datetime.fromisoformat(made.utc).tzinfo is not None
    assert made.changes == (AcceptedChange(TRIAD, "time", "9.5%"),)
    first, last = result.stdout.splitlines()
    assert first == f"{TRIAD}: accepted time up to 9.5%; wrote {FOLDER / name}"
    assert last.startswith("commit it with the change: ")


def test_a_file_for_each_test_of_a_selection(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    results(slower(), slower("test_triad", "warm"), slower("test_other"), row(name="test_fine"))
    assert accept("t.py", f"{TRIAD}[warm]", "--reason", "why").exit_code == 0
    rows = {made.test: [change.row for change in made.changes] for made in written(tmp_path)}
    assert rows == {
        TRIAD: [TRIAD, f"{TRIAD}[warm]"],
        "t.py::test_other": ["t.py::test_other"],
    }


def test_a_duet_says_how_much_slower(accept: Accept, results: Write, tmp_path: Path) -> None:
    paired = replace(slower().verdict, paired=PairedChange(0.0712, 0.07, 0.08, 5))
    results(replace(slower(), verdict=paired), slower("test_screen"), row(name="test_fine"))
    assert accept("t.py", "--reason", "why").exit_code == 0
    assert {made.test: made.changes[0].up_to for made in written(tmp_path)} == {
        TRIAD: "8.2%",
        "t.py::test_screen": "9.5%",
    }


def test_a_lost_measurement_is_accepted_as_removed(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    gone = Omission("t.py::test_old", "", LOST, "its test is no longer collected")
    results(slower(), missing=[gone])
    result = accept("t.py::test_old", "--reason", "test_triad has its place")
    assert result.exit_code == 0, result.output
    (made,) = written(tmp_path)
    assert made.changes == (AcceptedChange("t.py::test_old", "removed"),)


def test_a_renamed_test(accept: Accept, tmp_path: Path) -> None:
    result = accept(TRIAD, "--renamed-from", "t.py::test_old", "--reason", "a clearer name")
    assert result.exit_code == 0, result.output
    assert f"{TRIAD}: accepted renamed from t.py::test_old; wrote " in result.stdout
    (made,) = written(tmp_path)
    assert made.changes == (AcceptedChange(TRIAD, "renamed", "t.py::test_old"),)
    why = acceptances(tmp_path).why_gone("t.py::test_old[warm]")
    assert why is not None
    assert why.startswith(f"renamed to {TRIAD} (")


def test_another_way_of_measuring(accept: Accept, results: Write, tmp_path: Path) -> None:
    differently = row(Code.MEASURED_DIFFERENTLY, "test_triad", None)
    result = LimitResult("max_regression", Outcome.UNDECIDED, Code.MEASURED_DIFFERENTLY)
    verdict = replace(differently.verdict, limits=(result,))
    results(replace(differently, verdict=verdict, measurement=measurement()))
    called = accept(TRIAD, "--reason", "another window")
    assert called.exit_code == 0
    assert called.stdout.startswith(f"{TRIAD}: accepted another way of measuring; wrote ")
    (made,) = written(tmp_path)
    assert made.changes == (AcceptedChange(TRIAD, "measured"),)


def test_changes_that_are_given_need_no_results(accept: Accept, tmp_path: Path) -> None:
    given = ("time=10%", "memory=96 MiB", "removed", "max_copies=3", "max_regression=none")
    options = [word for change in given for word in ("--change", change)]
    result = accept(TRIAD, *options, "--reason", "why")
    assert result.exit_code == 0, result.output
    (made,) = written(tmp_path)
    assert made.gpu is None
    assert made.changes == (
        AcceptedChange(TRIAD, "time", "10%"),
        AcceptedChange(TRIAD, "memory", "96 MiB"),
        AcceptedChange(TRIAD, "removed"),
        AcceptedChange(TRIAD, "limit", "max_copies=3"),
        AcceptedChange(TRIAD, "limit", "max_regression=none"),
    )


def test_a_later_file_replaces_the_earlier_ones_which_stay(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    (tmp_path / ".gitignore").write_text("gpumem-results\n")
    assert accept(TRIAD, "--change", "time=5%", "--reason", "merged").exit_code == 0
    commit(tmp_path)
    git(tmp_path, "checkout", "-qb", "change")
    results(slower())
    accept(TRIAD, "--change", "time=6%", "--reason", "first")
    commit(tmp_path, "change")
    result = accept(TRIAD, "--reason", "second")
    assert result.exit_code == 0, result.output
    assert {made.reason for made in written(tmp_path)} == {"merged", "first", "second"}
    newest = acceptances(tmp_path).of(TRIAD, "time")
    assert newest is not None
    assert newest[1].up_to == "9.5%"
    assert len({made.base for made in written(tmp_path)}) == 2


def test_mistakes_write_nothing(accept: Accept, results: Write, tmp_path: Path) -> None:
    for arguments, words in [
        ([TRIAD], "Missing option '--reason'"),
        ([TRIAD, "--reason", "  "], "--reason: it is empty"),
        (
            ["t.py::test_trid", "--reason", "why"],
            f"no row of gpumem-results/results.json belongs to it (did you mean {TRIAD}?)",
        ),
        (
            ["t.py::test_fine", "--reason", "why"],
            "t.py::test_fine: gpumem-results/results.json finds it neither slower nor lost: nothing to accept",
        ),
        (
            ["t.py::test_late", "--reason", "why"],
            "t.py::test_late: max_latency of the test does not hold; change the limit in the test",
        ),
        (
            ["t.py::test_wrong", "--reason", "why"],
            "t.py::test_wrong: the test itself failed, which nobody can accept",
        ),
        (
            ["t.py::test_crashed", "--reason", "why"],
            "t.py::test_crashed: the test itself failed, which nobody can accept",
        ),
        (
            ["t.py::test_fine", "--reason", "why", "--renamed-from", "t.py::test_trid"],
            "--renamed-from t.py::test_trid: no row of gpumem-results/results.json belongs to it "
            f"(did you mean {TRIAD}?)",
        ),
        (
            [TRIAD, "t.py::test_fine", "--reason", "why", "--renamed-from", "t.py::test_old"],
            "--renamed-from: one TEST at a time has another name",
        ),
        ([TRIAD, "--reason", "why", "--change", "max_latency=3"], "'max_latency=3': '3' "),
        ([TRIAD, "--reason", "why", "--change", "time=0%"], "'time=0%': '0%' allows nothing"),
        (
            [TRIAD, "--reason", "why", "--change", "max_copies=3"],
            f"{TRIAD} has no limit max_copies: nothing to accept",
        ),
    ]:
        late = replace(
            row(Outcome.FAIL, "test_late"), limits=replace(row().limits, max_latency="1 us")
        )
        late = replace(
            late, verdict=replace(late.verdict, limits=(LimitResult("max_latency", Outcome.FAIL),))
        )
        crashed = row(Outcome.FAIL, "test_crashed")
        crashed = replace(crashed, measurement=None, verdict=replace(crashed.verdict, limits=()))
        aborted = [Omission("t.py::test_aborted", "", LOST, "its test failed", how="failed")]
        results(
            slower(),
            row(name="test_fine"),
            late,
            crashed,
            replace(slower("test_wrong"), test_error=True),
            missing=aborted,
        )
        result = accept(*arguments)
        assert result.exit_code == 4, arguments
        (line,) = result.stderr.splitlines()
        assert words in line, arguments
        assert not (tmp_path / FOLDER).exists(), arguments


def test_no_gate_was_run(accept: Accept) -> None:
    result = accept(TRIAD, "--reason", "why")
    instead = "run gpumem gate, or give --results, --change or --renamed-from"
    assert (result.exit_code, result.stderr) == (
        4,
        f"gpumem: there is no gpumem-results/results.json, which says what changed; {instead}\n",
    )
