"""Sessions whose baseline is behind a URL: an S3-compatible server on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest
from s3_server import BUCKET, Server
from sessions import TRIAD, Run

URL = f"s3://{BUCKET}/sessions"


@pytest.fixture
def server(s3_store: Server, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("GPUMEM_BASELINE", f"{URL}/{pytester.path.name}")
    monkeypatch.setenv("COLUMNS", "400")
    pytester.makepyfile(TRIAD)
    return s3_store


def test_save_and_compare(server: Server, pytester: pytest.Pytester, gpumem: Run) -> None:
    url = f"{URL}/{pytester.path.name}"
    result = gpumem("--gpumem-save")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [f"*baseline: none in {url}*", f"--gpumem-save: 1 of 1 row stored in {url}"]
    )
    gpumem().stdout.fnmatch_lines([f"*baseline: 1 process in {url}"])


def test_workers_read_the_copy_of_the_controller(server: Server, gpumem: Run) -> None:
    gpumem("--gpumem-save").assert_outcomes(passed=1)
    result = gpumem("-n2", "--gpumem-max-regression", "50%", "-v")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*baseline: 1 process in s3://*"])
    result.stdout.no_fnmatch_line("*NEW*")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "s3://*: permission denied*"),
        (("--gpumem-baseline=ftpx://host/path",), "ftpx://host/path: *ftpx*"),
    ],
)
def test_one_error_before_anything_is_measured(
    server: Server, pytester: pytest.Pytester, gpumem: Run, arguments: tuple[str, ...], words: str
) -> None:
    pytester.makepyfile("raise AssertionError('collected')")
    server.fail("status", status=403)
    result = gpumem(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in result.stderr.lines if line.strip()]
    result.stderr.fnmatch_lines([f"ERROR: gpumem: {words}"])
    assert "collected" not in line


def test_a_run_that_cannot_be_sent_fails_the_session_and_is_kept(
    server: Server, gpumem: Run
) -> None:
    server.fail("status", status=403, method="PUT")
    result = gpumem("--gpumem-save")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "--gpumem-save: s3://*: permission denied*; it is kept on this machine: copy * into the store"
        ]
    )
    (line,) = (line for line in result.outlines if "it is kept on this machine: copy " in line)
    folder = Path(line.partition("copy ")[2].removesuffix(" into the store"))
    assert len(list(folder.glob("*/gpumem/*.json"))) == 1
