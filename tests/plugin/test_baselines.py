"""Baselines from outside: what a session stores, what it compares with, and what it says of both."""

from __future__ import annotations

import json
import shlex
from datetime import datetime, timedelta, tzinfo

import pytest
from ci_project import make_three
from click.testing import CliRunner
from committing import git
from msgspec.structs import replace
from sessions import Run, row_in, stored_in

from pytest_gpumem.baselines import store as store_module
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main
from pytest_gpumem.measuring import target_kernel
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.settings import BASELINE_OF

COPY = """
import os

def test_copy(gpu_benchmark, device_buffer, gpu_kernels):
    nbytes = int(os.environ.get("NBYTES", 64 << 20))
    gpu_benchmark(gpu_kernels.copy, device_buffer(nbytes), device_buffer(nbytes), max_regression="2%")
"""


def test_nothing_of_a_fork_is_stored_and_the_run_goes_on(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY)
    monkeypatch.setenv("CI_MERGE_REQUEST_PROJECT_ID", "1")
    monkeypatch.setenv("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "10")
    monkeypatch.setenv("CI_MERGE_REQUEST_SOURCE_PROJECT_PATH", "guest/kernels")
    result = gpumem("--gpumem-save")
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK
    lines = [line for line in result.stdout.lines if line.startswith("--gpumem-save")]
    assert lines == [
        "--gpumem-save: nothing is stored of code that is not ours: a merge request from the fork guest/kernels"
    ]
    assert stored_in(pytester.path) == []


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_a_folder_that_cannot_be_written_ends_the_run_before_anything_is_measured(
    pytester: pytest.Pytester, gpumem: Run, options: tuple[str, ...]
) -> None:
    """Nobody can make a folder in /proc; root can write where permissions forbid it to others."""
    pytester.makepyfile(COPY + "    open('measured', 'w').close()\n")
    result = gpumem("--gpumem-save", "--gpumem-baseline=/proc/self/baseline", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.stderr.lines)
    assert line.startswith(
        "ERROR: gpumem: --gpumem-save: nothing can be stored in /proc/self/baseline/"
    )
    assert not (pytester.path / "measured").exists()


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_file_in_place_of_the_folder_ends_the_run_before_anything_is_measured(
    pytester: pytest.Pytester, gpumem: Run, below: str
) -> None:
    pytester.makepyfile(COPY)
    (pytester.path / "taken").write_text("mine")
    result = gpumem("--gpumem-save", f"--gpumem-baseline=taken{below}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, result.stderr.lines)
    assert "taken" in line
    assert (pytester.path / "taken").read_text() == "mine"


def test_a_changed_test_is_said(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    (path,) = pytester.path.glob("test_*.py")
    path.write_text("# another line above changes no test\n" + COPY)
    assert "changed since the baseline" not in gpumem().stdout.str()
    path.write_text(COPY + "    assert True\n")
    result = gpumem("--benchmark-json=out.json")
    result.stdout.fnmatch_lines(["changed since the baseline: the test's source (1 of 1)"])
    row = row_in(pytester.path)
    assert row["changed"] == ["the test's source"]
    assert row["verdict"]["reason"].endswith("; changed since the baseline: the test's source")


def test_a_changed_kernel_is_said(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    monkeypatch.setattr(target_kernel, "fingerprint", lambda name: "0" * 64)
    result = gpumem()
    result.stdout.fnmatch_lines(["changed since the baseline: the kernel's source (1 of 1)"])


def test_the_rows_of_an_xdist_worker_say_it_too(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    (path,) = pytester.path.glob("test_*.py")
    path.write_text(COPY + "    assert True\n")
    result = gpumem("-n", "1", "--gpumem-save")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["changed since the baseline: the test's source (1 of 1)"])
    sources = [
        json.loads(path.read_text())["content"]["rows"][0]["test_source"]
        for path in stored_in(pytester.path)
    ]
    assert len(set(sources)) == 2


def test_accepting_a_change(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the refusal advises does it, word for word."""
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    make_three(stored_in(pytester.path)[0])
    monkeypatch.setenv("NBYTES", str(80 << 20))
    refused = gpumem("--gpumem-save")
    refused.assert_outcomes(failed=1)
    (advice,) = [line for line in refused.stdout.lines if "gpumem accept" in line]
    command = shlex.split(advice.partition("gpumem accept ")[2])
    monkeypatch.chdir(pytester.path)
    accepted = CliRunner().invoke(main, ["accept", *command[:-1], "sixteen more MiB"])
    assert accepted.exit_code == 0, accepted.output
    without = gpumem()
    without.assert_outcomes(passed=1)
    without.stdout.fnmatch_lines(
        ["ACCEPTED *: sixteen more MiB); +*", "1 row (simulated): 1 ACCEPTED"]
    )
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    again = gpumem("--benchmark-json=out.json")
    again.assert_outcomes(passed=1)
    assert row_in(pytester.path)["verdict"]["comparison"]["processes"] == 1


def test_a_wrong_clock_is_reported_and_the_next_acceptance_counts(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(days=1825)

    def accept(reason: str) -> None:
        change = ["accept", path.name, "--scope", "time", "--size", "1%", "--reason", reason]
        assert CliRunner().invoke(main, change).exit_code == 0

    pytester.makepyfile(COPY)
    (path,) = pytester.path.glob("test_*.py")
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    monkeypatch.chdir(pytester.path)
    accept("by a wrong clock")
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "datetime", Ahead)
        gpumem("--gpumem-save").assert_outcomes(passed=1)
    accept("meant")
    result = gpumem("-q", "--gpumem-save")
    result.stdout.fnmatch_lines(
        ["baseline: 1 of 2 files is dated ahead of this machine's clock: *"]
    )
    result.stdout.fnmatch_lines(
        [
            "--gpumem-save: a change of *::test_copy was accepted (*: meant): its baseline is reset, *"
        ]
    )
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert row_in(pytester.path)["verdict"]["comparison"]["processes"] == 1


# Histories that no run on the simulated device takes the time to make.


def saved_with(pytester: pytest.Pytester, factors: list[float]) -> None:
    """Add processes to the only one that is stored, with its latencies times a factor each."""
    (path,) = stored_in(pytester.path)
    from pytest_gpumem.baselines.storage import Storage
    from pytest_gpumem.baselines.store import load_file

    (one,) = load_file(path, Storage(path.parent)).rows
    path.unlink()
    store = Store(path.parent.parent.parent, one.process.device)
    for factor in factors:
        placements = tuple(tuple(s * factor for s in p) for p in one.measurement.placements)
        row = Row(
            one.nodeid,
            Limits(),
            Verdict(Outcome.PASS, "", simulated=True),
            replace(one.measurement, placements=placements),
            test_source=one.test_source,
        )
        store.save([row], "abc")


def test_creep_fails_by_the_first_run(pytester: pytest.Pytester, gpumem: Run) -> None:
    """Each step was within the limit."""
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    saved_with(pytester, [0.8, 0.9, 0.98, 0.99, 1.0])
    gpumem("-o", "gpumem_baseline_window=3", "--benchmark-json=out.json").assert_outcomes(failed=1)
    verdict = row_in(pytester.path)["verdict"]
    assert (verdict["outcome"], verdict["code"], verdict["comparison"]["runs"]) == (
        "FAIL",
        "crept",
        3,
    )
    assert abs(verdict["comparison"]["change"]) < 0.02


# Ancestry


@pytest.fixture
def repository(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with the test on `main`, and `feature` checked out."""
    pytester.makepyfile(COPY)
    (pytester.path / ".gitignore").write_text("__pycache__\n.benchmarks\nout.json\n")
    git(pytester.path, "init", "-q", "-b", "main")
    git(pytester.path, "add", ".")
    git(pytester.path, "commit", "-q", "-m", "first")
    git(pytester.path, "checkout", "-q", "-b", "feature")
    return pytester


def test_only_the_history_that_is_shared_counts(
    repository: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    git(repository.path, "commit", "-q", "--allow-empty", "-m", "second")
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    assert len(stored_in(repository.path)) == 2
    monkeypatch.setenv(BASELINE_OF, "main")
    result = gpumem("--benchmark-json=out.json")
    merge_base = git(repository.path, "rev-parse", "main")[:12]
    result.stdout.fnmatch_lines(
        [
            f"*baseline: 1 process in *; 1 of 2 files do not count: 1 are not of the history of {merge_base}"
        ]
    )
    assert row_in(repository.path)["verdict"]["comparison"]["processes"] == 1
    gpumem("--benchmark-json=out.json")
    assert row_in(repository.path)["verdict"]["comparison"]["processes"] == 2


def test_outside_a_repository(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(pytester.path.parent))
    pytester.makepyfile(COPY)
    monkeypatch.setenv(BASELINE_OF, "main")
    result = gpumem()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.stderr.lines if line.strip()]
    assert line.startswith("ERROR: gpumem: 'main' is no commit of ")
