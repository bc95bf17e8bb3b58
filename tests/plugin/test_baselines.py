"""Baselines from outside: what a session stores, what it compares with, and what it says of both."""

from __future__ import annotations

import json
import shlex

import pytest
from ci_project import make_three
from click.testing import CliRunner
from committing import commit, git
from sessions import Run, row_in, slower, stored_in

from pytest_gpumem.baselines.store import digest
from pytest_gpumem.cli import main
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


def test_a_folder_below_home_or_beside_the_ini_file(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(COPY)
    monkeypatch.setenv("HOME", str(pytester.path / "home"))
    gpumem("--gpumem-save", "--gpumem-baseline=~/kept").assert_outcomes(passed=1)
    assert len(list((pytester.path / "home" / "kept").glob("*/gpumem/*.json"))) == 1
    below = pytester.mkdir("below")
    ini = pytester.path / "pytest.ini"
    ini.write_text("[pytest]\ngpumem_baseline = kept\n")
    monkeypatch.chdir(below)
    gpumem("--gpumem-save", "..").assert_outcomes(passed=1)
    assert len(list((pytester.path / "kept").glob("*/gpumem/*.json"))) == 1


def test_accepting_a_change(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failure advises does it, word for word."""
    pytester.makepyfile(COPY)
    pytester.makeconftest(slower('float(os.environ.get("FACTOR", 1))'))
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    make_three(stored_in(pytester.path)[0])
    monkeypatch.setenv("FACTOR", "1.3")
    monkeypatch.setenv("COLUMNS", "400")
    refused = gpumem("--gpumem-save")
    refused.assert_outcomes(failed=1)
    (advice,) = [line for line in refused.stdout.lines if "gpumem accept" in line]
    command = shlex.split(advice.partition("gpumem accept ")[2])
    monkeypatch.chdir(pytester.path)
    accepted = CliRunner().invoke(main, ["accept", *command[:-1], "checks bounds"])
    assert accepted.exit_code == 0, accepted.output
    without = gpumem("--benchmark-json=out.json")
    without.assert_outcomes(passed=1)
    assert row_in(pytester.path)["verdict"]["outcome"] == "NEW"
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    gpumem("--benchmark-json=out.json").assert_outcomes(passed=1)
    assert row_in(pytester.path)["verdict"]["comparison"]["processes"] == 1


# Histories that no run on the simulated device takes the time to make.


def on_days(pytester: pytest.Pytester, factors: list[float]) -> None:
    """Replace the only stored run by one a day, with its latencies times a factor each."""
    (path,) = stored_in(pytester.path)
    file = json.loads(path.read_text())
    path.unlink()
    for day, factor in enumerate(factors):
        content = json.loads(json.dumps(file["content"]))
        content["id"] += str(day)
        content["utc"] = f"2026-01-{day + 1:02}T10:00:00+00:00"
        for row in content["rows"]:
            placements = row["measurement"]["placements"]
            row["measurement"]["placements"] = [[s * factor for s in p] for p in placements]
        text = json.dumps({**file, "content": content, "sha256": digest(content)})
        path.with_name(f"day-{day:02}.json").write_text(text)


def test_a_full_reference_takes_no_unchanged_run(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    on_days(pytester, [1.0] * 12)
    result = gpumem("--gpumem-save")
    result.stdout.fnmatch_lines(
        [
            "--gpumem-save: nothing is stored: the reference of 1 row is full, and nothing became "
            "faster"
        ]
    )
    assert len(stored_in(pytester.path)) == 12


def test_a_gain_enters_and_three_days_of_it_are_the_new_reference(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    on_days(pytester, [1.2] * 12 + [1.0] * 2)
    result = gpumem("--gpumem-save", "--benchmark-json=out.json")
    result.stdout.fnmatch_lines(["--gpumem-save: 1 of 1 row stored in *"])
    assert row_in(pytester.path)["verdict"]["comparison"]["processes"] == 12
    gpumem("--benchmark-json=out.json")
    comparison = row_in(pytester.path)["verdict"]["comparison"]
    assert (comparison["processes"], comparison["days"]) == (3, 3)
    assert abs(comparison["change"]) < 0.02


def test_another_way_of_measuring_begins_a_new_reference(
    pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(COPY)
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    result = gpumem("--gpumem-mode=hot", "--benchmark-json=out.json")
    assert "gpumem gate BASE compares them" in result.stdout.str()
    reason = row_in(pytester.path)["verdict"]["reason"]
    assert "mode clean-cold → hot, sampler blocked → graph, so a new reference begins" in reason


# Revisions


def test_a_shallow_clone_is_said(pytester: pytest.Pytester, gpumem: Run) -> None:
    origin = pytester.path / "origin"
    origin.mkdir()
    (origin / "test_it.py").write_text(COPY)
    for name in ("first", "second"):
        commit(origin, name)
    git(pytester.path, "clone", "-q", "--depth", "1", origin.as_uri(), "clone")
    result = gpumem("--gpumem-save", f"--rootdir={pytester.path / 'clone'}", "clone")
    result.stdout.fnmatch_lines(["warning: this clone is shallow: *; git fetch --unshallow, *"])


# Ancestry


@pytest.fixture
def repository(pytester: pytest.Pytester) -> pytest.Pytester:
    """A repository with the test on `main`, and `feature` checked out."""
    pytester.makepyfile(COPY)
    (pytester.path / ".gitignore").write_text("__pycache__\n.benchmarks\nout.json\n")
    commit(pytester.path)
    git(pytester.path, "checkout", "-q", "-b", "feature")
    return pytester


def test_a_folder_that_git_does_not_trust_is_said(
    repository: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose user does not own the checkout."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setenv("HOME", str(repository.path))  # no setting that trusts it
    result = gpumem("--gpumem-save")
    result.stdout.fnmatch_lines(
        [
            "warning: git does not trust * (dubious ownership): *; git config "
            "--global --add safe.directory *"
        ]
    )
    (path,) = stored_in(repository.path)
    assert json.loads(path.read_text())["content"].get("revision") is None


def test_only_the_history_that_is_shared_counts(
    repository: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    git(repository.path, "commit", "-q", "--allow-empty", "-m", "second")
    result = gpumem("--gpumem-save")
    first = git(repository.path, "rev-parse", "HEAD~1")[:10]
    result.stdout.fnmatch_lines([f"*baseline: 1 process in *, the newest of {first}"])
    assert len(stored_in(repository.path)) == 2
    (repository.path / "conftest.py").write_text("")
    git(repository.path, "add", "conftest.py")
    gpumem("--gpumem-save").stdout.fnmatch_lines(
        ["*stored in * with uncommitted changes: no gate*"]
    )
    git(repository.path, "reset", "-q", "--hard")
    max(stored_in(repository.path), key=lambda path: path.stat().st_mtime).unlink()
    monkeypatch.setenv(BASELINE_OF, "main")
    result = gpumem("--benchmark-json=out.json")
    merge_base = git(repository.path, "rev-parse", "main")[:12]
    result.stdout.fnmatch_lines(
        [f"*baseline: 1 process in *; 1 of 2 files do not count: of no commit up to {merge_base}"]
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
    assert line == f"ERROR: gpumem: {pytester.path} is in no git repository"
