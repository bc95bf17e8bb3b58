"""`gpumem accept`: what it takes from the last gate, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from committing import git
from flagged_rows import row
from known_devices import H100
from measurements import measurement
from msgspec.structs import replace

from pytest_gpumem.baselines.accepted import (
    FOLDER,
    AcceptedChange,
    Scope,
    acceptances,
    without_accepted,
)
from pytest_gpumem.cli import main
from pytest_gpumem.judging.verdict import known
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.row import ITS_TEST_FAILED, LOST, LimitResult, Omission, Row
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
    """Writes the results of a gate; `duet`: by row key, outcome and change."""

    def write(
        *rows: Row,
        missing: Sequence[Omission] = (),
        duet: dict[str, tuple[str | None, float]] | None = None,
    ) -> None:
        folder = tmp_path / "gpumem-results"
        folder.mkdir(exist_ok=True)
        (folder / "results.json").write_text(
            json.dumps({"gpumem": document(H100, rows, {"baseline_of": "main"}, missing)})
        )
        if duet is not None:
            verdicts = [
                {"key": key, "outcome": outcome, "paired": {"change": change}}
                for key, (outcome, change) in duet.items()
            ]
            (folder / "duet.json").write_text(json.dumps({"verdicts": verdicts}))

    return write


def test_what_the_last_gate_flagged(accept: Accept, results: Write, tmp_path: Path) -> None:
    results(slower(), slower("test_other"), row(name="test_fine"))
    result = accept(TRIAD, "--reason", " checks bounds ")
    assert result.exit_code == 0, result.output
    (made,) = acceptances(tmp_path)
    assert (made.test, made.reason, made.who, made.base) == (TRIAD, "checks bounds", "ada", None)
    assert made.changes == (AcceptedChange(TRIAD, Scope.TIME, "8.41%"),)
    first, last = result.stdout.splitlines()
    assert first == f"{TRIAD}: accepted time up to 8.41%; wrote {FOLDER / made.file_name}"
    assert last.startswith("commit it with the change: ")
    assert [
        one.outcome
        for one in without_accepted(
            slower(), known(slower()), [made], comparison=slower().verdict.comparison
        )
    ] == [Outcome.ACCEPTED]


def test_a_file_for_each_test_of_a_selection(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    results(slower(), slower("test_triad", "warm"), slower("test_other"), row(name="test_fine"))
    assert accept("t.py", f"{TRIAD}[warm]", "--reason", "why").exit_code == 0
    assert {
        made.test: [change.row for change in made.changes] for made in acceptances(tmp_path)
    } == {
        TRIAD: [TRIAD, f"{TRIAD}[warm]"],
        "t.py::test_other": ["t.py::test_other"],
    }


def test_one_row_of_a_test(accept: Accept, results: Write, tmp_path: Path) -> None:
    results(slower(), slower("test_triad", "warm"))
    assert accept(f"{TRIAD}[warm]", "--reason", "why").exit_code == 0
    assert [change.row for made in acceptances(tmp_path) for change in made.changes] == [
        f"{TRIAD}[warm]"
    ]


def test_a_duet_says_how_much_slower(accept: Accept, results: Write, tmp_path: Path) -> None:
    cleared = row(name="test_cleared")
    results(
        slower(),
        slower("test_screen"),
        cleared,
        duet={TRIAD: ("FAIL", 0.0712), cleared.key: ("PASS", 0.001)},
    )
    assert accept("t.py", "--reason", "why").exit_code == 0
    assert {made.test: made.changes[0].size for made in acceptances(tmp_path)} == {
        TRIAD: "7.12%",
        "t.py::test_screen": "8.41%",
    }
    refused = accept(cleared.key, "--reason", "why")
    assert (refused.exit_code, refused.stderr) == (
        4,
        f"gpumem: {cleared.key}: gpumem-results/results.json flags nothing of it\n",
    )


def test_a_lost_measurement_is_accepted_as_removed(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    results(
        slower(), missing=[Omission("t.py::test_old", "", LOST, "its test is no longer collected")]
    )
    result = accept("t.py::test_old", "--reason", "test_triad has its place")
    assert result.exit_code == 0, result.output
    (made,) = acceptances(tmp_path)
    assert made.changes == (AcceptedChange("t.py::test_old", Scope.REMOVED),)
    assert "accepted that t.py::test_old is removed" in result.stdout


def test_only_one_scope_of_what_was_flagged(accept: Accept, results: Write, tmp_path: Path) -> None:
    copies = LimitResult("max_waits", Outcome.FAIL)
    results(
        slower("test_triad", "", copies, max_waits="base"),
        missing=[Omission("t.py::test_triad", "cold", LOST, "gone")],
    )
    assert accept(TRIAD, "--scope", "time", "--reason", "why").exit_code == 0
    assert [change.scope for made in acceptances(tmp_path) for change in made.changes] == [
        Scope.TIME
    ]
    refused = accept(TRIAD, "--scope", "memory", "--reason", "why")
    assert (refused.exit_code, refused.stderr) == (
        4,
        f"gpumem: {TRIAD}: gpumem-results/results.json flags nothing of it in this scope\n",
    )


def test_sizes_that_are_given_need_no_results(accept: Accept, tmp_path: Path) -> None:
    scopes = [
        "--scope",
        "time",
        "--size",
        "10%",
        "--scope",
        "memory",
        "--size",
        "96 MiB",
        "--scope",
        "removed",
    ]
    scopes += [
        "--scope",
        "kernels",
        "--size",
        "max_copies=3",
        "--scope",
        "limit",
        "--size",
        "max_regression=none",
    ]
    result = accept(TRIAD, *scopes, "--reason", "why")
    assert result.exit_code == 0, result.output
    (made,) = acceptances(tmp_path)
    assert made.changes == (
        AcceptedChange(TRIAD, Scope.TIME, "10%"),
        AcceptedChange(TRIAD, Scope.MEMORY, "96 MiB"),
        AcceptedChange(TRIAD, Scope.REMOVED),
        AcceptedChange(TRIAD, Scope.KERNELS, "3", "max_copies"),
        AcceptedChange(TRIAD, Scope.LIMIT, "none", "max_regression"),
    )


def test_a_looser_limit_has_the_old_one_beside_it(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    results(slower())
    result = accept(TRIAD, "--scope", "limit", "--size", "max_regression=10%", "--reason", "why")
    assert f"{TRIAD}: accepted max_regression 1% -> 10%; wrote " in result.stdout
    (made,) = acceptances(tmp_path)
    assert made.changes == (AcceptedChange(TRIAD, Scope.LIMIT, "10%", "max_regression", "1%"),)


def test_who(accept: Accept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTOR", "octo")
    assert accept(TRIAD, "--scope", "removed", "--reason", "why").exit_code == 0
    assert [made.who for made in acceptances(tmp_path)] == ["octo"]


def test_a_file_of_the_same_change_is_replaced_and_a_merged_one_stays(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    def commit(name: str) -> None:
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)

    git(tmp_path, "init", "-q", "-b", "main")
    (tmp_path / ".gitignore").write_text("gpumem-results\n")
    assert accept(TRIAD, "--scope", "time", "--size", "5%", "--reason", "merged").exit_code == 0
    commit("base")
    git(tmp_path, "checkout", "-qb", "change")
    results(slower())
    accept(TRIAD, "--scope", "time", "--size", "6%", "--reason", "first")
    commit("change")
    result = accept(TRIAD, "--reason", "second")
    assert result.exit_code == 0, result.output
    assert {made.reason for made in acceptances(tmp_path)} == {"merged", "second"}
    (replaced,) = (line for line in result.stdout.splitlines() if line.startswith("  in place of "))
    assert "t-py-test-triad-" in replaced
    assert len({made.base for made in acceptances(tmp_path)}) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TRIAD], "Missing option '--reason'"),
        (["--reason", "why"], "Missing argument 'TEST...'"),
        ([TRIAD, "--reason", "  "], "--reason: it is empty"),
        (
            ["t.py::test_trid", "--reason", "why"],
            f"no row of gpumem-results/results.json belongs to it (did you mean {TRIAD}?)",
        ),
        (["t", "--reason", "why"], "t: no row of gpumem-results/results.json belongs to it"),
        (
            ["t.py::test_fine", "--reason", "why"],
            "t.py::test_fine: gpumem-results/results.json flags nothing of it",
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
            ["t.py::test_aborted", "--reason", "why"],
            "t.py::test_aborted: the test itself failed, which nobody can accept",
        ),
        (
            [TRIAD, "--reason", "why", "--results", "nowhere.json"],
            "nowhere.json: No such file or directory",
        ),
        (
            [TRIAD, "--reason", "why", "--scope", "time", "--size", "1%", "--size", "2%"],
            "--size: 2 for 1 scope with a size; give one for each --scope",
        ),
        (
            [TRIAD, "--reason", "why", "--size", "10%"],
            "--size: no --scope says of what '10%' is the size; give a --scope before it",
        ),
        (
            ["t.py::test_trid", "--reason", "why", "--scope", "time", "--size", "1%"],
            f"t.py::test_trid: no row of gpumem-results/results.json belongs to it (did you mean {TRIAD}?)",
        ),
        (
            ["t.py::test_trid", "--reason", "why", "--scope", "removed"],
            "t.py::test_trid: no row of gpumem-results/results.json belongs to it",
        ),
        ([TRIAD, "--reason", "why", "--scope", "time", "--size", "0.1"], "--size: '0.1' "),
        (
            [TRIAD, "--reason", "why", "--scope", "kernels", "--size", "3"],
            "--size: '3'; of the scope kernels it names a limit",
        ),
        (
            [TRIAD, "--reason", "why", "--scope", "kernels", "--size", "max_latency=3"],
            "--size: 'max_latency'; the scope kernels takes one of",
        ),
        (
            [TRIAD, "--reason", "why", "--scope", "limit"],
            "--size: the scope limit takes the new value of the limit: max_regression=5%, ",
        ),
        (
            [TRIAD, "--reason", "why", "--scope", "speed"],
            "Invalid value for '--scope': 'speed' is not one of 'time', ",
        ),
    ],
)
def test_mistakes_write_nothing(
    accept: Accept, results: Write, tmp_path: Path, arguments: list[str], words: str
) -> None:
    late = replace(row(Outcome.FAIL, "test_late"), limits=replace(row().limits, max_latency="1 us"))
    late = replace(
        late, verdict=replace(late.verdict, limits=(LimitResult("max_latency", Outcome.FAIL),))
    )
    crashed = row(Outcome.FAIL, "test_crashed")
    crashed = replace(crashed, measurement=None, verdict=replace(crashed.verdict, limits=()))
    aborted = [Omission("t.py::test_aborted", "", LOST, ITS_TEST_FAILED)]
    results(
        slower(),
        row(name="test_fine"),
        late,
        crashed,
        replace(slower("test_wrong"), test_error=True),
        missing=aborted,
    )
    result = accept(*arguments)
    assert result.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert words in line
    assert not (tmp_path / FOLDER).exists()


def test_no_gate_was_run(accept: Accept) -> None:
    result = accept(TRIAD, "--reason", "why")
    instead = "run gpumem gate, or give --results, or --scope and --size"
    assert (result.exit_code, result.stderr) == (
        4,
        f"gpumem: there is no gpumem-results/results.json, which says what changed; {instead}\n",
    )


def test_a_file_that_cannot_be_used_is_named(accept: Accept, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "bad.json").write_text("{")
    result = accept(TRIAD, "--scope", "removed", "--reason", "why")
    assert result.exit_code == 4
    assert result.stderr.startswith(f"gpumem: {FOLDER / 'bad.json'}: not JSON")


def test_a_measurement_of_another_way_is_accepted(
    accept: Accept, results: Write, tmp_path: Path
) -> None:
    differently = row(Code.MEASURED_DIFFERENTLY, "test_triad", None)
    results_of = (LimitResult("max_regression", Outcome.UNDECIDED, Code.MEASURED_DIFFERENTLY),)
    results(
        replace(
            differently,
            verdict=replace(differently.verdict, limits=results_of),
            measurement=measurement(),
        )
    )
    assert accept(TRIAD, "--reason", "another window").exit_code == 0
    assert [change.size for made in acceptances(tmp_path) for change in made.changes] == ["0%"]
