"""`--gpumem-record` and `gpumem history`: every run is kept, whatever its verdicts, and no baseline has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from s3_server import BUCKET, Server
from sessions import TRIAD, Run

from pytest_gpumem.cli import main

SUITE = f"""
import pytest
{TRIAD}

@pytest.mark.gpumem(max_latency="1 ns")
def test_too_slow(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)

def test_wrong(gpu_benchmark, device_buffer, gpu_kernels):
    a, b, c = (device_buffer(1 << 20, "f4") for _ in range(3))
    gpu_benchmark(gpu_kernels.triad, a, b, c, 3.0)
    assert False
"""


@pytest.fixture(autouse=True)
def _places(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path / "cache"))
    monkeypatch.setenv("COLUMNS", "400")


def files(folder: Path, subfolder: str) -> int:
    return len(list(folder.glob(f"*/{subfolder}/*.json")))


def test_a_run_is_kept_whatever_its_verdicts(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(SUITE)
    result = gpumem("--gpumem-record=kept", "--gpumem-baseline=kept")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["--gpumem-record: 2 of 3 rows recorded in *kept/*/recorded/*.json"])
    assert (files(pytester.path / "kept", "recorded"), files(pytester.path / "kept", "gpumem")) == (1, 0)
    gpumem("--gpumem-baseline=kept").stdout.fnmatch_lines(["*baseline: none in *kept*"])


def test_a_session_that_saves_and_records_is_one_run(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    for _ in range(2):
        gpumem("--gpumem-record=kept", "--gpumem-save", "--gpumem-baseline=kept").assert_outcomes(passed=1)
    gpumem("--gpumem-baseline=kept").stdout.fnmatch_lines(["*baseline: 2 processes in *"])
    result = CliRunner().invoke(main, ["history", str(pytester.path / "kept")])
    assert result.exit_code == 0, result.output
    assert "2 runs of 1 test; " in result.output


@pytest.mark.parametrize("arguments", [("-n2",), ("--gpumem-processes=2",)])
def test_several_processes_are_one_run(pytester: pytest.Pytester, gpumem: Run, arguments: tuple[str, ...]) -> None:
    pytester.makepyfile(TRIAD)
    gpumem("--gpumem-record=kept", *arguments).assert_outcomes(passed=1)
    assert files(pytester.path / "kept", "recorded") == 1


def test_a_place_that_cannot_be_written_stops_the_session_before_it_measures(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(TRIAD)
    pytester.makefile(".txt", kept="a file")
    result = gpumem("--gpumem-record=kept.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: gpumem: --gpumem-record: nothing can be stored in *kept.txt*"])


def test_a_store_that_refuses_a_record_fails_the_session_and_loses_nothing(
    s3_store: Server, pytester: pytest.Pytester, gpumem: Run
) -> None:
    pytester.makepyfile(TRIAD)
    url = f"s3://{BUCKET}/{pytester.path.name}"
    s3_store.fail("status", status=403, method="PUT")
    result = gpumem(f"--gpumem-record={url}", "--benchmark-json=out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"--gpumem-record: {url}: permission denied*gpumem baseline push {url} --baseline *"])
    assert (pytester.path / "out.json").exists()
    s3_store.heal()
    line = next(line for line in result.outlines if line.startswith("--gpumem-record"))
    sent = CliRunner().invoke(main, ["baseline", *line.partition("gpumem baseline ")[2].split()])
    assert sent.exit_code == 0, sent.output
    found = CliRunner().invoke(main, ["history", url])
    assert "1 run of 1 test; " in found.output, found.output


def test_nothing_is_recorded_of_a_fork(pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makepyfile(TRIAD)
    monkeypatch.setenv("CI_MERGE_REQUEST_PROJECT_ID", "1")
    monkeypatch.setenv("CI_MERGE_REQUEST_SOURCE_PROJECT_ID", "2")
    result = gpumem("--gpumem-record=kept")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["--gpumem-record: nothing is recorded of code that is not ours: *"])
    assert not (pytester.path / "kept").exists()
