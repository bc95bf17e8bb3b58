"""What one process of an experiment is told, and the record of its run, from scripts that stand in for pytest."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from known_devices import H100
from measurements import measurement

from pytest_gpumem.outcomes import Outcome, UserError
from pytest_gpumem.plugin.experiment_process import selected
from pytest_gpumem.records.limits import Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.schema import document
from pytest_gpumem.runs import processes
from pytest_gpumem.runs.processes import HEAD, Processes, ProcessRecord
from pytest_gpumem.runs.worktree import Side

START = """
import json, os, socket, sys
job = json.loads(sys.argv[-1])
lines = socket.socket(fileno=job["socket"]).makefile("rw")

def say(**words):
    lines.write(json.dumps(words) + "\\n")
    lines.flush()
"""
READY = "request = json.loads(lines.readline())\nsay(pid=7)\n"
Made = Callable[[str], Processes]
Played = Callable[..., ProcessRecord]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """Makes an experiment whose side is this program."""

    def make(program: str) -> Processes:
        script = tmp_path / "stand_in.py"
        script.write_text(START + program)
        # No pytest misbehaves like this.
        monkeypatch.setattr(processes, "SCRIPT", script)
        side = Side("working tree", "same", tmp_path, tmp_path, sys.executable)
        return Processes({HEAD: side}, [], os.environ)

    return make


@pytest.fixture
def played(made: Made) -> Played:
    """Runs a process of such an experiment, and ends it."""

    def play(program: str, tests: list[str] | None = None, **named: Any) -> ProcessRecord:
        with closing(made(program)) as experiment:
            return experiment.run(HEAD, tests, **named)

    return play


def outcome(nodeid: str, outcome: str, why: str) -> str:
    return f"say(nodeid={nodeid!r}, outcome={outcome!r}, why={why!r}, text='all of ' + {why!r})\n"


def test_a_process_gets_its_tests_and_its_rows_are_read(played: Played) -> None:
    taken = measurement(placements=((1e-4, 2e-4, 4e-4), (3e-4, 3e-4, 3e-4)))
    measured = Row("t.py::test_a", Limits(), Verdict(Outcome.MEASURED, "no limit"), taken)
    text = json.dumps(document(H100, [measured], {"budget": 1.0}))
    program = READY + "assert request == ['t.py::test_a']\nsay(finished='t.py::test_a')\n"
    program += f"say(results=json.loads({text!r}))\nsay(exit=0, strays=[])"
    done = played(program, ["t.py::test_a"], pair=3, attempt=2)
    assert (done.side, done.pair, done.attempt, done.pid) == (HEAD, 3, 2, 7)
    assert done.name == "head (working tree)"
    assert (done.error, done.failed_as_a_whole, done.outcomes, done.texts) == (None, None, {}, {})
    assert done.finished == {"t.py::test_a"}
    assert (done.device, done.settings, list(done.rows)) == (
        H100,
        {"budget": 1.0},
        [measured.key],
    )
    (stored,) = done.rows.values()
    assert stored.measurement is not None
    assert stored.measurement.placements == ((1e-4, 2e-4, 4e-4), (3e-4, 3e-4, 3e-4))


def test_the_first_failure_of_a_test_is_the_one_that_counts(played: Played) -> None:
    program = (
        READY
        + outcome("a", "skipped", "later")
        + outcome("a", "failed", "wrong")
        + outcome("a", "failed", "teardown")
    )
    program += outcome("b", "skipped", "no GPU") + "say(finished='a')\nsay(exit=1, strays=[])"
    done = played(program)
    assert done.outcomes == {"a": ("failed", "wrong"), "b": ("skipped", "no GPU")}
    assert (done.error, done.failed_as_a_whole) == (None, None)
    assert done.failure_of("a") == "head (working tree): a\nall of wrong"
    assert done.failure_of("b") is None


def test_a_session_that_fails_without_a_failed_test_has_last_words(played: Played) -> None:
    done = played(
        READY
        + outcome("b", "skipped", "no GPU")
        + "print('the folder is gone', flush=True)\nsay(exit=1, strays=[])"
    )
    assert (done.failed_as_a_whole, done.error) == ("the folder is gone", None)
    assert (
        played(READY + "print('fine', flush=True)\nsay(exit=0, strays=[])").failed_as_a_whole
        is None
    )


@pytest.mark.parametrize(
    ("end", "error"),
    [
        (
            "print('noise')\nprint('ERROR: no room', flush=True)\nos._exit(7)",
            "ended with exit code 7: ERROR: no room",
        ),
        ("os.kill(os.getpid(), 9)", "ended by SIGKILL: it printed nothing"),
    ],
)
def test_a_session_that_breaks_off_is_an_error_of_the_tests_that_it_did_not_report(
    played: Played, end: str, error: str
) -> None:
    done = played(READY + "say(finished='a')\n" + end)
    assert done.error == error
    assert done.failed_as_a_whole is None
    assert (done.device, done.rows) == (None, {})
    assert done.failure_of("a") is None
    assert done.failure_of("b") == f"head (working tree) {error}, before it reported this test"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            READY + "say(exit=0, strays=['m from /base'])",
            r"ran code of the other side: m from /base; --base-python names",
        ),
        (
            READY + "say(results={})\nsay(exit=0, strays=[])",
            "wrote results of another version of this plugin: ",
        ),
    ],
)
def test_what_cannot_be_compared_ends_the_experiment(
    played: Played, program: str, message: str
) -> None:
    with pytest.raises(UserError, match=rf"^head \(working tree\):? {message}"):
        played(program)


def test_a_process_that_hangs_is_ended_and_the_next_is_not_forked(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "if job['forks']:\n    lines.readline()\nsay(exit=5, strays=[])"
    with closing(made(READY + hangs)) as experiment:
        with monkeypatch.context() as patch:
            patch.setattr(processes, "WORK_SECONDS", 0.01)  # in place of an hour
            first = experiment.run(HEAD, None)
        assert first.error == "ended by SIGKILL: it printed nothing"
        assert experiment.run(HEAD, None).error is None


T = "test_x.py::TestIt::test_p"


@pytest.mark.parametrize(
    ("name", "selects"),
    [
        ("test_x.py::TestIt", [f"{T}[0]", f"{T}[1]", f"{T}ast"]),
        (f"{T}[1]", [f"{T}[1]"]),
        ("../test_x.py::TestIt::test_p", [f"{T}[0]", f"{T}[1]"]),
        ("test_y.py", ["test_y.py::test_p"]),
    ],
)
def test_a_name_is_that_of_all_tests_that_pytest_would_take_it_for(
    tmp_path: Path, name: str, selects: list[str]
) -> None:
    names = [f"{T}[0]", f"{T}[1]", f"{T}ast", "test_y.py::test_p"]
    items: Any = [SimpleNamespace(nodeid=one, path=tmp_path / one.split("::")[0]) for one in names]
    chosen = selected(items, [name], tmp_path / "below" if ".." in name else tmp_path)
    assert [item.nodeid for item in chosen] == selects
