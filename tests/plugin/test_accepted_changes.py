"""Accepted changes in sessions: with its file, a test has a new reference, and without it the old one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ci_project import make_three
from click.testing import CliRunner
from committing import commit, git
from sessions import Run, row_in, slower, stored_in

from pytest_gpumem.baselines.acceptances import FOLDER, Acceptance, AcceptedChange, Figure, write
from pytest_gpumem.cli import main
from pytest_gpumem.settings import BASELINE_OF

TEST = "test_it.py::test_copy"
COPY = """
import os
import pytest

@pytest.mark.gpumem(max_regression="2%", max_peak_regression="0 B", max_copies="base")
def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    extra = device_buffer(int(os.environ.get("EXTRA", 64)) << 20)
    gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20))
"""
Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> Measure:
    """Runs the test, which takes a multiple of its time; its row. Three runs are saved."""
    pytester.makepyfile(test_it=COPY)
    pytester.makeconftest(slower('float(os.environ.get("FACTOR", 1))'))
    (pytester.path / ".gitignore").write_text(".benchmarks\nout.json\n__pycache__\n")
    commit(pytester.path)
    assert gpumem("--gpumem-save").ret == 0
    make_three(stored_in(pytester.path)[0])
    monkeypatch.chdir(pytester.path)

    def run(factor: float, *arguments: str) -> dict[str, Any]:
        monkeypatch.setenv("FACTOR", str(factor))
        gpumem("--benchmark-json=out.json", *arguments)
        return row_in(pytester.path)

    return run


def accept(folder: Path, figure: Figure, up_to: str | None = None, base: str = "abc") -> Path:
    changes = (AcceptedChange(TEST, figure, up_to),)
    return folder / write(folder, Acceptance(TEST, "checks bounds", "ada", changes, base))


def outcome(row: dict[str, Any]) -> str:
    assert row["failed"] is (row["verdict"]["outcome"] == "FAIL")
    return str(row["verdict"]["outcome"])


def limits(row: dict[str, Any]) -> dict[str, str]:
    """By limit, the results that are no PASS."""
    return {result["limit"]: result["outcome"] for result in row["verdict"]["limits"]}


def test_an_accepted_limit_is_not_in_place_of_that_of_the_test(
    pytester: pytest.Pytester, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test has it: an acceptance says that it may be looser than before."""
    accept(pytester.path, "limit", "max_peak_regression=none")
    monkeypatch.setenv("EXTRA", "96")
    assert limits(measure(1.0))["max_peak_regression"] == "FAIL"


def test_the_life_of_an_acceptance(pytester: pytest.Pytester, measure: Measure) -> None:
    """Accepted, merged, saved, and reverted."""
    assert outcome(measure(1.3)) == "FAIL"
    command = ["accept", TEST, "--change", "time=31%", "--reason", "checks bounds"]
    assert CliRunner().invoke(main, command).exit_code == 0
    (path,) = (pytester.path / FOLDER).iterdir()
    row = measure(1.3)
    assert outcome(row) == "NEW"
    assert "a change of its time was accepted (" in row["verdict"]["reason"]
    assert "max_peak_regression" not in limits(row)
    git(pytester.path, "add", ".")
    git(pytester.path, "commit", "-qm", "accepted")
    stored = len(stored_in(pytester.path))
    # Nothing is saved until a run says so, and what is saved is the new reference.
    assert outcome(measure(1.3)) == "NEW"
    assert outcome(measure(1.3, "--gpumem-save")) == "NEW"
    assert len(stored_in(pytester.path)) == stored + 1
    assert outcome(measure(1.3)) in ("PASS", "UNDECIDED")
    assert outcome(measure(1.7)) == "FAIL"
    # Other words change nothing.
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "reason": "checks all bounds"}))
    assert outcome(measure(1.3)) in ("PASS", "UNDECIDED")
    # A revert returns to the runs before.
    path.unlink()
    assert outcome(measure(1.3)) == "FAIL"
    assert outcome(measure(1.0)) == "PASS"


def test_accepted_memory_leaves_the_limit_on_the_time(
    pytester: pytest.Pytester, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXTRA", "80")
    assert limits(measure(1.3)) == {"max_regression": "FAIL", "max_peak_regression": "FAIL"}
    accept(pytester.path, "memory", "208 MiB")
    assert limits(measure(1.3)) == {"max_regression": "FAIL", "max_peak_regression": "NEW"}
    assert limits(measure(1.0, "--gpumem-save")) == {"max_peak_regression": "NEW"}
    assert outcome(measure(1.0)) == "PASS"
    monkeypatch.setenv("EXTRA", "96")
    assert limits(measure(1.0)) == {"max_peak_regression": "FAIL"}


def test_an_accepted_count_holds_in_place_of_the_base(
    pytester: pytest.Pytester, measure: Measure
) -> None:
    copied = COPY.replace("gpu_kernels.copy", "gpu_kernels.memcpy").replace("test_copy", "test_m")
    pytester.makepyfile(test_it=copied)
    accept(pytester.path, "limit", "max_copies=0")
    row = measure(1.0)  # another test, which nobody accepted
    assert row["limits"]["max_copies"] == "base"
    (pytester.path / FOLDER).joinpath("mine.json").write_text(
        json.dumps(
            {
                "test": "test_it.py::test_m",
                "reason": "by hand",
                "who": "ada",
                "changes": [
                    {"row": "test_it.py::test_m", "figure": "limit", "up_to": "max_copies=0"}
                ],
            }
        )
    )
    row = measure(1.0)
    assert row["limits"]["max_copies"] == "0"
    assert limits(row)["max_copies"] == "FAIL"


def test_a_removed_test_is_not_expected(
    pytester: pytest.Pytester, measure: Measure, gpumem: Run
) -> None:
    pytester.makepyfile(test_it=COPY.replace("test_copy", "test_other"))
    lost = gpumem("--gpumem-strict")
    lost.stdout.fnmatch_lines([f"lost: {TEST}: *"])
    accept(pytester.path, "removed")
    assert TEST not in gpumem("--gpumem-strict").stdout.str()


def test_against_a_named_history_the_change_has_no_reference_and_a_removal_is_said(
    pytester: pytest.Pytester, measure: Measure, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gate sends a row without one to the duet, and counts what the change adds itself."""
    monkeypatch.setenv(BASELINE_OF, "main")
    assert outcome(measure(1.3)) == "FAIL"
    path = accept(pytester.path, "time", "31%")
    monkeypatch.setenv(BASELINE_OF, "main")
    assert outcome(measure(1.3)) == "NEW"
    path.unlink()
    pytester.makepyfile(test_it=COPY.replace("test_copy", "test_other"))
    accept(pytester.path, "removed")
    monkeypatch.setenv(BASELINE_OF, "main")
    gpumem().stdout.fnmatch_lines([f"lost: {TEST}: *"])  # it does not count by itself


def test_a_file_that_cannot_be_used_ends_the_session(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(test_it=COPY)
    path = accept(pytester.path, "time", "10%")
    path.write_text(path.read_text().replace("10%", "a lot"))
    result = gpumem()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.stderr.lines)
    assert line.startswith(f"ERROR: gpumem: {FOLDER / path.name}: $.changes[0].up_to: 'a lot' ")


def test_workers_have_the_new_reference_too(pytester: pytest.Pytester, measure: Measure) -> None:
    accept(pytester.path, "time", "31%")
    assert outcome(measure(1.3, "-n", "1", "--gpumem-save")) == "NEW"
    assert outcome(measure(1.3)) in ("PASS", "UNDECIDED")
