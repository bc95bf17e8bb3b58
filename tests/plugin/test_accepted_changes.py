"""Accepted changes in sessions: what a file of `.gpumem/accepted` covers, and how a saved run takes it over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ci_project import make_three
from committing import git
from sessions import Run, row_in, stored_in

from pytest_gpumem.baselines.accepted import FOLDER, Acceptance, AcceptedChange, Scope, write
from pytest_gpumem.settings import BASELINE_OF

TEST = "test_it.py::test_copy"
COPY = """
import os
import pytest

@pytest.mark.gpumem(max_copied_bytes="base")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    nbytes = int(os.environ.get("NBYTES", 64)) << 20
    gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes), max_regression="2%")
"""
Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs the test with so many MiB; its row. The baseline has three runs of 64 MiB."""
    pytester.makepyfile(test_it=COPY)
    assert gpumem("--gpumem-save").ret == 0
    make_three(stored_in(pytester.path)[0])

    def run(nbytes: int, *arguments: str) -> dict[str, Any]:
        monkeypatch.setenv("NBYTES", str(nbytes))
        gpumem("--benchmark-json=out.json", *arguments)
        return row_in(pytester.path)

    return run


def accept(folder: Path, *changes: AcceptedChange, reason: str = "checks bounds") -> Path:
    return folder / write(folder, Acceptance(TEST, reason, "ada", changes))


def slow_down(folder: Path, size: str) -> Path:
    return accept(folder, AcceptedChange(TEST, Scope.TIME, size))


def outcomes(row: dict[str, Any]) -> tuple[str, bool]:
    return row["verdict"]["outcome"], row["failed"]


def test_a_saved_run_takes_a_slow_down_over_once(
    pytester: pytest.Pytester, measure: Measure
) -> None:
    assert outcomes(measure(80)) == ("FAIL", True)
    path = slow_down(pytester.path, "30%")
    row = measure(80)
    assert outcomes(row) == ("ACCEPTED", False)
    assert row["verdict"]["accepted"] == ["max_regression"]
    assert row["verdict"]["reason"].startswith("max_regression accepted (ada: checks bounds); +")
    # Until a run is saved nothing changes.
    assert outcomes(measure(80)) == ("ACCEPTED", False)
    stored = len(stored_in(pytester.path))
    assert outcomes(measure(80, "--gpumem-save")) == ("ACCEPTED", False)
    assert len(stored_in(pytester.path)) == stored + 1
    newest = json.loads(
        max(stored_in(pytester.path), key=lambda one: one.stat().st_mtime_ns).read_text()
    )["content"]
    (reset,) = newest["epochs"]
    assert (reset["key"], reset["reason"], reset["who"]) == (TEST, "checks bounds", "ada")
    assert reset["accepted"] == [json.loads(path.read_text())["sha256"]]
    # From now on the file is inert: neither a later run nor its removal undoes it, and the same slow-down once more is a FAIL.
    for _ in range(2):
        assert measure(80, "--gpumem-save")["verdict"]["outcome"] in ("PASS", "UNDECIDED")
    assert outcomes(measure(100)) == ("FAIL", True)
    path.unlink()
    assert measure(80, "--gpumem-save")["verdict"]["outcome"] in ("PASS", "UNDECIDED")
    assert outcomes(measure(100)) == ("FAIL", True)


def test_a_larger_slow_down_fails_and_is_not_saved(
    pytester: pytest.Pytester, measure: Measure
) -> None:
    slow_down(pytester.path, "10%")
    stored = len(stored_in(pytester.path))
    assert outcomes(measure(80, "--gpumem-save")) == ("FAIL", True)
    assert len(stored_in(pytester.path)) == stored
    # It waits for a run within its size.
    assert measure(69, "--gpumem-save")["verdict"]["outcome"] in ("ACCEPTED", "UNDECIDED")
    assert len(stored_in(pytester.path)) == stored + 1


def test_a_test_that_fails_by_itself_is_not_accepted(
    pytester: pytest.Pytester, measure: Measure
) -> None:
    slow_down(pytester.path, "30%")
    pytester.makepyfile(test_it=COPY + "    assert False\n")
    stored = len(stored_in(pytester.path))
    assert measure(80, "--gpumem-save")["failed"] is True
    assert len(stored_in(pytester.path)) == stored


def test_accepted_copies_leave_the_limit_on_the_time(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_it=COPY.replace("gpu_kernels.copy", "gpu_kernels.memcpy"))
    assert gpumem("--gpumem-save").ret == 0
    make_three(stored_in(pytester.path)[0])
    monkeypatch.setenv("NBYTES", "80")
    gpumem("--benchmark-json=out.json")
    row = row_in(pytester.path)
    failing = {one["limit"] for one in row["verdict"]["limits"] if one["outcome"] == "FAIL"}
    assert failing == {"max_regression", "max_copied_bytes"}
    accept(pytester.path, AcceptedChange(TEST, Scope.KERNELS, "80 MiB", "max_copied_bytes"))
    gpumem("--benchmark-json=out.json")
    verdict = row_in(pytester.path)["verdict"]
    assert (verdict["outcome"], verdict["code"], verdict["accepted"]) == (
        "FAIL",
        "slower",
        ["max_copied_bytes"],
    )
    assert [one["limit"] for one in verdict["limits"]] == ["max_regression"]


def test_a_change_of_the_merge_base_has_no_history_and_one_of_the_change_no_effect(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a named history: its gate sends a row without one to the duet, and counts what the change adds itself."""

    def commit(name: str) -> None:
        git(pytester.path, "add", ".")
        git(pytester.path, "commit", "-qm", name)

    def against_main(*arguments: str) -> pytest.RunResult:
        monkeypatch.setenv(BASELINE_OF, "main")
        return gpumem(*arguments)

    def verdict() -> tuple[str, str]:
        against_main("--benchmark-json=out.json")
        found = row_in(pytester.path)["verdict"]
        return found["outcome"], found["reason"]

    pytester.makepyfile(test_it=COPY)
    pytester.makefile(".ini", pytest="[pytest]")
    (pytester.path / ".gitignore").write_text(".benchmarks\nout.json\n__pycache__\n")
    git(pytester.path, "init", "-q", "-b", "main")
    commit("base")
    assert gpumem("--gpumem-save").ret == 0
    make_three(stored_in(pytester.path)[0])
    git(pytester.path, "checkout", "-qb", "change")
    monkeypatch.setenv("NBYTES", "80")
    assert verdict()[0] == "FAIL"
    path = slow_down(pytester.path, "30%")
    assert verdict()[0] == "FAIL"
    commit("accept")
    assert verdict()[0] == "FAIL"
    git(pytester.path, "branch", "-qf", "main", "change")
    outcome, reason = verdict()
    assert outcome == "NEW"
    assert "a change of it was accepted (ada: checks bounds), and no run was saved since" in reason
    # A saved run takes it over: compared as usual.
    assert against_main("--gpumem-save").ret == 0
    assert verdict()[0] in ("PASS", "UNDECIDED")
    # Under another name an old one would count anew.
    path.rename(path.with_name("renamed.json"))
    refused = against_main()
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, refused.stderr.lines)
    assert line.startswith(
        f"ERROR: gpumem: {FOLDER / 'renamed.json'}: its name does not fit its content; "
    )


def test_an_edited_file_ends_the_session(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(test_it=COPY)
    path = slow_down(pytester.path, "10%")
    path.write_text(path.read_text().replace("10%", "900%"))
    result = gpumem()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.stderr.lines)
    assert line.startswith(
        f"ERROR: gpumem: {FOLDER / path.name}: $.sha256: does not fit the content, which was edited"
    )


def test_workers_accept_too(pytester: pytest.Pytester, measure: Measure) -> None:
    slow_down(pytester.path, "30%")
    assert outcomes(measure(80, "-n", "1", "--gpumem-save")) == ("ACCEPTED", False)
    assert measure(80)["verdict"]["outcome"] in ("PASS", "UNDECIDED")
