"""`--gpumem-processes auto`: what one process leaves undecided, further ones decide at the session's end."""

from __future__ import annotations

import functools
import json
import os
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest
from sessions import Run, rows_in, slower

from pytest_gpumem.plugin import repeating
from pytest_gpumem.plugin import state as session_module
from pytest_gpumem.plugin.guardian import TERMINATED
from pytest_gpumem.plugin.guarding import Termination
from pytest_gpumem.plugin.repeating import AHEAD
from pytest_gpumem.plugin.state import GpuSession
from pytest_gpumem.records.measurement import Measurement
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs.child import for_a_part
from pytest_gpumem.settings import DUET_FOLLOWS

TESTS = """
import os
import pytest

@pytest.fixture
def measure(gpu_benchmark, device_buffer, gpu_kernels):
    return lambda **of: gpu_benchmark(gpu_kernels.copy, *(device_buffer(int(os.environ.get("BYTES", 32 << 20))) for _ in "ab"), **of)

def seen(name):
    with open("processes.txt", "a") as file:
        file.write(name + "\\n")

def test_copy(measure):
    seen("copy")
    measure(max_regression=os.environ.get("LIMIT", "2%"))
    assert "_GPUMEM_FURTHER_PROCESS" not in os.environ or "BROKEN" not in os.environ, "wrong result"
    if "SKIP" in os.environ:
        pytest.skip("no torch")

def test_other(measure):
    seen("other")
    measure(max_regression="50%")
"""

QUICKLY = ("--gpumem", "--gpumem-device=sim", "--gpumem-budget=5ms")
ONCE = {"copy": 1, "other": 1}
"""Times that each test runs where nothing is measured again."""
STORED: dict[str, bytes] = {}
"""Files of a baseline of three runs, once the first test has made them."""


@pytest.fixture
def run(pytester: pytest.Pytester, session: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A session against that baseline; keywords are environment variables of the tests. The same machine code settles nothing."""
    monkeypatch.setenv("GPUMEM_NO_WHAT_RAN", "1")
    pytester.makeconftest(slower('float(os.environ.get("SLOW", 1))'))
    pytester.makepyfile(test_a=TESTS)
    quick = functools.partial(session, *QUICKLY)
    if not STORED:
        for _ in range(3):
            assert quick("--gpumem-save", "--gpumem-processes=1").ret == 0
        STORED.update(
            (str(path.relative_to(pytester.path)), path.read_bytes())
            for path in pytester.path.glob(".benchmarks/*/gpumem/*")
        )
        (pytester.path / "processes.txt").unlink()
    for name, content in STORED.items():
        (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
        (pytester.path / name).write_bytes(content)

    def in_session(*arguments: str, **variables: str) -> pytest.RunResult:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        (pytester.path / "processes.txt").unlink(missing_ok=True)
        return quick("--benchmark-json=out.json", *arguments)

    return in_session


def verdict(folder: Path, test: str = "test_copy") -> tuple[str, str | None, int]:
    """Outcome and code of a test's row, and the processes of this run behind it."""
    (row,) = (row for row in rows_in(folder) if row["nodeid"].endswith(test))
    return (
        row["verdict"]["outcome"],
        row["verdict"]["code"],
        row["verdict"]["comparison"]["measured"],
    )


def times(folder: Path) -> dict[str, int]:
    """How often each test ran, in all processes together."""
    names = (folder / "processes.txt").read_text().split()
    return {name: names.count(name) for name in sorted({*names})}


@pytest.mark.parametrize("how", [(), ("-n", "1")], ids=["here", "xdist"])
def test_an_undecided_row_passes_by_further_processes(
    pytester: pytest.Pytester, run: Run, how: tuple[str, ...]
) -> None:
    result = run("--gpumem-strict", "--gpumem-save", *how, LIMIT="0.8%")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.OK
    assert (verdict(pytester.path), verdict(pytester.path, "test_other")) == (
        ("PASS", None, 3),
        ("PASS", None, 1),
    )
    assert times(pytester.path) == {"copy": 3, "other": 1}
    # The baseline holds the processes that the verdict used.
    (new,) = (
        path
        for path in pytester.path.glob(".benchmarks/*/gpumem/*")
        if str(path.relative_to(pytester.path)) not in STORED
    )
    stored = {
        row["nodeid"]: row["measurement"] for row in json.loads(new.read_text())["content"]["rows"]
    }
    assert {name: len(one.get("further", ())) for name, one in stored.items()} == {
        "test_a.py::test_copy": 2,
        "test_a.py::test_other": 0,
    }


@pytest.mark.parametrize("named", [(), ("test_a.py", "test_b.py")], ids=["collected", "named"])
def test_further_processes_import_no_other_files(
    pytester: pytest.Pytester, run: Run, named: tuple[str, ...]
) -> None:
    (pytester.path / "test_b.py").write_text(
        "open('imports.txt', 'a').write('b')\n\ndef test_nothing(): pass\n"
    )
    run(*named, LIMIT="0.8%").assert_outcomes(passed=3)
    assert times(pytester.path) == {"copy": 3, "other": 1}
    # Two further processes decide the row; the next ones may be ready by then.
    assert (pytester.path / "imports.txt").read_text() in (
        ("bbb", "bbbb", "bbbbb") if named else ("b",)
    )


WAITS = """
import os
import select

if "_GPUMEM_FURTHER_PROCESS" in os.environ:
    os.write(os.open("ready", os.O_WRONLY), b"!")
else:
    READY = os.open("ready", os.O_RDONLY | os.O_NONBLOCK)

def test_last(gpu_benchmark):
    assert select.select([READY], [], [], 60)[0], "no process gets ready"
"""


@pytest.mark.skipif(not AHEAD, reason="one core measures, and is not shared")
def test_a_process_gets_ready_while_the_session_measures(
    pytester: pytest.Pytester, run: Run
) -> None:
    os.mkfifo(pytester.path / "ready")
    (pytester.path / "test_b.py").write_text(WAITS)
    run(LIMIT="0.8%").assert_outcomes(passed=3)
    assert times(pytester.path) == {"copy": 3, "other": 1}


def test_a_row_that_takes_many_processes_is_left_to_the_duet_that_follows(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeating, "LOOKS", (1, 3, 5))
    assert run(LIMIT="0.6%").ret == pytest.ExitCode.OK
    assert times(pytester.path)["copy"] > 3
    assert run(LIMIT="0.6%", **{DUET_FOLLOWS: "1"}).ret == pytest.ExitCode.OK
    assert times(pytester.path)["copy"] <= 3


@pytest.mark.parametrize("how", [(), ("-n", "1")], ids=["here", "xdist"])
def test_a_slow_down_that_one_process_only_suspects_fails(
    pytester: pytest.Pytester, run: Run, monkeypatch: pytest.MonkeyPatch, how: tuple[str, ...]
) -> None:
    read: list[str] = []
    if how:
        monkeypatch.setattr(
            session_module, "read_controls", lambda *_, **__: read.append("in the controller")
        )
    result = run("--junitxml=junit.xml", "--benchmark-autosave", *how, SLOW="1.06")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert (verdict(pytester.path), times(pytester.path)) == (
        ("FAIL", "slower", 3),
        {"copy": 3, "other": 1},
    )
    assert [row["failed"] for row in rows_in(pytester.path)] == [True, False]
    (suite,) = ElementTree.parse(pytester.path / "junit.xml").iter("testsuite")
    assert [suite.get(name) for name in ("tests", "failures", "errors")] == ["2", "1", "0"]
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert {name: len(case.findall("failure")) for name, case in cases.items()} == {
        "test_copy": 1,
        "test_other": 0,
    }
    assert len(suite.findall("testcase")) == 2
    properties = {one.get("name"): one.get("value") for one in cases["test_copy"].iter("property")}
    assert (properties["gpumem_verdict"], json.loads(properties["gpumem"] or "")["verdict"]) == (
        "FAIL",
        "FAIL",
    )
    assert read == []
    # pytest-benchmark stores what passed alone; under xdist it stores nothing.
    saved = [
        one["name"]
        for path in pytester.path.glob(".benchmarks/*/0*.json")
        for one in json.loads(path.read_text())["benchmarks"]
    ]
    assert saved == ([] if how else ["test_other"])


def test_a_launch_that_moves_more_bytes_is_measured_again_until_it_fails(
    pytester: pytest.Pytester, run: Run
) -> None:
    assert run("-k", "copy", BYTES=str(round(1.084 * (32 << 20)) // 1024 * 1024)).ret == 1
    outcome, code, measured = verdict(pytester.path)
    assert (outcome, code, measured >= 3) == ("FAIL", "slower", True)


@pytest.mark.parametrize(
    ("arguments", "variables", "code"),
    [
        (("--gpumem-processes=1",), {"SLOW": "1.06"}, "looks slower"),
        (
            (),
            {"LIMIT": "0.2%"},
            "noisy",
        ),  # as close to the limit, more processes would not decide it
    ],
    ids=["a number", "too close"],
)
def test_what_further_processes_cannot_decide_is_not_measured_again(
    pytester: pytest.Pytester,
    run: Run,
    arguments: tuple[str, ...],
    variables: dict[str, str],
    code: str,
) -> None:
    assert run(*arguments, **variables).ret == pytest.ExitCode.OK
    assert verdict(pytester.path) == ("UNDECIDED", code, 1)
    assert times(pytester.path)["copy"] == 1
    assert run("--gpumem-strict", *arguments, **variables).ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    ("how", "ended"),
    [((), {"passed": 1}), (("--gpumem-strict",), {"failed": 1})],
    ids=["plain", "strict"],
)
def test_a_row_that_stays_undecided_fails_a_strict_run_alone(
    pytester: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    how: tuple[str, ...],
    ended: dict[str, int],
) -> None:
    """The first process alone is slow, so that nothing is beyond doubt."""
    pytester.makeconftest(slower('1 if "_GPUMEM_FURTHER_PROCESS" in os.environ else 1.06'))
    monkeypatch.setattr(repeating, "LOOKS", (1, 3))
    result = run("-k", "copy", "--junitxml=junit.xml", *how)
    result.assert_outcomes(**ended, deselected=1)
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if how else pytest.ExitCode.OK)
    assert (verdict(pytester.path)[::2], times(pytester.path)) == (("UNDECIDED", 3), {"copy": 3})
    (suite,) = ElementTree.parse(pytester.path / "junit.xml").iter("testsuite")
    assert (suite.get("tests"), len(suite.findall("testcase/failure"))) == ("1", len(how))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (pytest.exit.Exception("enough"), pytest.ExitCode.INTERRUPTED),
        (Termination("SIGTERM"), TERMINATED),
        (ValueError("a bug"), pytest.ExitCode.INTERNAL_ERROR),
    ],
    ids=["exit", "SIGTERM", "error"],
)
def test_whatever_ends_the_further_processes_the_results_are_written(
    pytester: pytest.Pytester,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def broken(*_: object, **__: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
        raise error

    monkeypatch.setattr(repeating, "repeat", broken)
    result = run("--junitxml=junit.xml", "--gpumem-save", LIMIT="0.8%")
    assert result.ret == code
    assert verdict(pytester.path) == ("UNDECIDED", "noisy", 1)
    properties = {
        one.get("name"): one.get("value")
        for one in ElementTree.parse(pytester.path / "junit.xml").iter("property")
    }
    assert "gpumem_verdict" in properties
    result.stdout.fnmatch_lines(["--gpumem-save: the session was interrupted, nothing is stored"])


def test_a_failure_in_a_further_process_is_the_tests(pytester: pytest.Pytester, run: Run) -> None:
    result = run("--gpumem-save", LIMIT="0.8%", BROKEN="1")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "wrong result" in result.stdout.str()
    assert times(pytester.path) == {"copy": 2, "other": 1}
    assert [row["failed"] for row in rows_in(pytester.path)] == [True, False]


def test_a_test_that_skipped_is_not_measured_again(pytester: pytest.Pytester, run: Run) -> None:
    run(LIMIT="0.8%", SKIP="1").assert_outcomes(passed=1, skipped=1)
    assert times(pytester.path) == ONCE


def test_nothing_is_measured_again_where_the_run_was_cut_short(
    pytester: pytest.Pytester, run: Run
) -> None:
    (pytester.path / "test_b.py").write_text("def test_fails():\n    assert False\n")
    run("-x", LIMIT="0.8%").assert_outcomes(passed=2, failed=1)
    assert times(pytester.path) == ONCE
    run("--collect-only", LIMIT="0.8%")
    assert not (pytester.path / "processes.txt").exists()


def test_a_process_of_a_duet_measures_once(pytester: pytest.Pytester, run: Run) -> None:
    """Pairs decide. A process that commands run gets these variables."""
    run(**for_a_part({}), LIMIT="0.8%").assert_outcomes(passed=2)
    assert (verdict(pytester.path), times(pytester.path)) == (("UNDECIDED", "noisy", 1), ONCE)


@pytest.mark.parametrize(
    "chosen", [(), ("-k", "copy"), ("-n1",), ("-n1", "-k", "copy")], ids=" ".join
)
def test_rows_are_judged_among_all_of_the_baseline(
    run: Run, monkeypatch: pytest.MonkeyPatch, chosen: tuple[str, ...]
) -> None:
    """Whatever the session runs, and in which process: other runners may judge the rest."""
    if "-n1" in chosen:
        pytest.importorskip("xdist")
    sizes = list[int]()

    judged = GpuSession.judged

    def noted(gpu: GpuSession, row: Row, siblings: Mapping[str, Measurement]) -> Row:
        sizes.append(gpu.family.size)
        return judged(gpu, row, siblings)

    monkeypatch.setattr(GpuSession, "judged", noted)
    run(*chosen, LIMIT="0.8%")
    assert set(sizes) == {2}


def test_the_first_three_saves_take_three_processes_by_themselves(
    pytester: pytest.Pytester, run: Run
) -> None:
    for name in STORED:
        (pytester.path / name).unlink()
    result = run("--gpumem-save")
    result.assert_outcomes(passed=2)
    assert times(pytester.path) == {"copy": 3, "other": 3}
    result.stdout.fnmatch_lines(
        ["gpumem: 2 rows whose baseline begins, measured again in fresh processes, * at most"]
    )
    (new,) = pytester.path.glob(".benchmarks/*/gpumem/*")
    assert [
        1 + len(row["measurement"].get("further", ()))
        for row in json.loads(new.read_text())["content"]["rows"]
    ] == [3, 3]
    for _ in range(2):
        run("--gpumem-save", LIMIT="50%")
        assert times(pytester.path) == {"copy": 3, "other": 3}
    # From then on a save takes what its verdict takes.
    run("--gpumem-save", LIMIT="50%")
    assert times(pytester.path) == {"copy": 1, "other": 1}
