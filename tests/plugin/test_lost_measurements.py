"""A measurement that the baseline holds and a run does not take is reported, and fails where a verdict has to be trusted."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from committing import commit
from sessions import Run, gate_result

from pytest_gpumem.cli import main

TESTS = """
import os, pytest
EARLY = os.environ.get("EARLY", "")

@pytest.fixture
def measure(gpu_benchmark, device_buffer, gpu_kernels):
    return lambda **of: gpu_benchmark(gpu_kernels.copy, device_buffer(64 << 20), device_buffer(64 << 20), **of)

def test_two(measure):
    measure(label="x")
    if "return" in EARLY: return
    measure(label="y")

def test_skips(measure):
    if EARLY == "skip": pytest.skip("no torch")
    measure()
    if EARLY == "skip late": pytest.skip("no torch")

@pytest.mark.skipif(EARLY == "xfail", reason="")
def test_other(measure):
    measure()

if "remove" not in EARLY:
    def test_removed(measure):
        measure(mode="hot")

@pytest.mark.xfail(EARLY == "xfail", reason="known", strict=False)
def test_xfails(measure):
    measure()
"""

NAMES = ("test_two[x]", "test_two[y]", "test_skips", "test_other", "test_removed", "test_xfails")


STORED: dict[str, bytes] = {}
"""Files of the baseline, once the first test has made them."""


@pytest.fixture
def baseline(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[pytest.RunResult, Any]]:
    """Runs the tests, changed, against a baseline of them. Gives the result and what is missing: statuses by name."""
    pytester.makepyfile(test_a=TESTS)
    quick = functools.partial(gpumem, "-o", "gpumem_placements=2", "-p", "no:randomly")
    if not STORED:
        assert quick("--gpumem-save").ret == 0
        STORED.update(
            (str(path.relative_to(pytester.path)), path.read_bytes())
            for path in pytester.path.glob(".benchmarks/*/gpumem/*")
        )
    for name, content in STORED.items():
        (pytester.path / name).parent.mkdir(parents=True, exist_ok=True)
        (pytester.path / name).write_bytes(content)

    def run(early: str, *arguments: str) -> tuple[pytest.RunResult, dict[str, str]]:
        monkeypatch.setenv("EARLY", early)
        result = quick("--benchmark-json=out.json", *arguments)
        return result, missing(pytester.path / "out.json")

    return run


def missing(path: Path) -> dict[str, str]:
    if not path.exists() or not path.read_text():
        return {}
    found = json.loads(path.read_text())["gpumem"]["missing"]
    path.unlink()
    return {one["key"].removeprefix("test_a.py::"): one["status"] for one in found}


@pytest.mark.parametrize(
    ("early", "lost", "how"),
    [
        ("skip", ["test_skips"], ()),
        ("skip late", ["test_skips"], ()),
        ("xfail", ["test_other", "test_xfails"], ()),
        ("return, remove", ["test_two[y]", "test_removed"], ("-n", "1")),
    ],
)
def test_what_is_lost_is_reported(
    baseline: Any, pytester: pytest.Pytester, early: str, lost: list[str], how: tuple[str, ...]
) -> None:
    result, found = baseline(early, "--gpumem-report=page.html", *how)
    assert (result.ret, found) == (0, dict.fromkeys(lost, "lost"))
    for text in (result.stdout.str(), (pytester.path / "page.html").read_text()):
        assert all(f"lost: test_a.py::{name}: " in text for name in lost)


WATCHED = """
def test_parts(gpu_memory, device_buffer):
    with gpu_memory.watch("load", max_peak="64 MiB"):
        device_buffer("32 MiB")
    with gpu_memory.watch("step"):
        device_buffer("32 MiB")
"""


def test_a_watched_part_of_a_test_that_ends_is_lost(pytester: pytest.Pytester, gpumem: Run) -> None:
    pytester.makepyfile(test_a=WATCHED)
    assert gpumem("--gpumem-save").ret == 0
    gpumem("--gpumem-strict").stdout.no_fnmatch_line("lost: *")
    pytester.makepyfile(
        test_a=WATCHED.replace('gpu_memory.watch("load"', 'gpu_memory.watch("read"')
    )
    result = gpumem("--gpumem-strict")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["lost: test_a.py::test_parts[[]load]: *"])


def test_strict_fails_by_it(baseline: Any) -> None:
    assert baseline("", "--gpumem-strict")[0].ret == 0
    assert baseline("return", "--gpumem-strict")[0].ret == pytest.ExitCode.TESTS_FAILED


def test_all_of_them_may_be_lost(baseline: Any, pytester: pytest.Pytester) -> None:
    """Where nothing is measured, results are written all the same; where nothing is collected, a strict run fails by the loss."""
    result, found = baseline("", "--benchmark-skip")
    assert (result.ret, found) == (0, dict.fromkeys(NAMES, "lost"))
    assert (
        baseline("", "--benchmark-skip", "--gpumem-strict")[0].ret == pytest.ExitCode.TESTS_FAILED
    )
    assert baseline("", "--benchmark-disable")[1] == {}
    pytester.path.joinpath("test_a.py").unlink()
    result, found = baseline("", "--gpumem-strict")
    assert (result.ret, found) == (pytest.ExitCode.TESTS_FAILED, dict.fromkeys(NAMES, "lost"))


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (("test_a.py::test_skips",), dict.fromkeys({*NAMES} - {"test_skips"}, "not run")),
        (
            ("-k", "skips"),
            {**dict.fromkeys({*NAMES} - {"test_skips"}, "not run"), "test_removed": "lost"},
        ),
        (("--deselect=test_a.py::test_removed",), {"test_removed": "not run"}),
        (
            ("--deselect=test_a.py::test_two",),
            {"test_two[x]": "not run", "test_two[y]": "not run", "test_removed": "lost"},
        ),
        (("--ignore=test_a.py", "."), dict.fromkeys(NAMES, "not run")),
    ],
    ids=["one test", "-k", "deselect the lost one", "deselect another", "ignore"],
)
def test_what_was_not_asked_for_is_not_lost(
    baseline: Any, pytester: pytest.Pytester, arguments: tuple[str, ...], found: dict[str, str]
) -> None:
    pytester.makepyfile(test_b="def test_b(): pass")
    _, said = baseline("remove", *arguments)
    assert said == found


def test_what_lf_leaves_out_is_not_lost(baseline: Any, pytester: pytest.Pytester) -> None:
    """pytest collects no file that had no failure."""
    pytester.makepyfile(test_b="def test_b(): assert False")
    baseline("", "-p", "cacheprovider")
    result, found = baseline("", "-p", "cacheprovider", "--lf")
    result.assert_outcomes(failed=1)
    assert found == dict.fromkeys(NAMES, "not run")
    result.stdout.fnmatch_lines(["not run: 6 measurements, such as *: deselected by --lf"])


def test_what_ends_is_lost_where_lf_leaves_nothing_out(
    gpumem: Run, pytester: pytest.Pytester
) -> None:
    """No test has failed, so pytest runs all."""
    pytester.makepyfile(test_a=WATCHED)
    words = "-p", "cacheprovider", "--lf", "--gpumem-strict"
    assert gpumem(*words, "--gpumem-save").ret == 0
    pytester.makepyfile(test_a=WATCHED.replace("test_parts", "test_pieces"))
    result = gpumem(*words)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["lost: test_a.py::test_parts*: its test is no longer collected"])


@pytest.mark.parametrize("how", [(), ("-n", "1")], ids=["here", "xdist"])
def test_a_test_that_an_early_end_leaves_out_is_not_lost(
    baseline: Any, pytester: pytest.Pytester, how: tuple[str, ...]
) -> None:
    (pytester.path / "test_0.py").write_text("def test_fails(): assert False")
    result, found = baseline("", "-x", *how)
    assert set(found.values()) == {"not run"}
    count = f"{len(found)} measurements"
    result.stdout.fnmatch_lines([f"not run: {count}, such as test_a.py::*: not reached"])


def test_a_row_of_another_mode_of_the_session_is_not_lost(
    baseline: Any, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpumem("--gpumem-mode=hot", "--gpumem-save").ret == 0
    assert baseline("return", "--gpumem-mode=dirty-cold")[1] == {}


def test_an_accepted_removal_is_no_loss(baseline: Any) -> None:
    removed = ["accept", "test_a.py::test_removed", "--change", "removed", "--reason", "gone"]
    assert CliRunner().invoke(main, removed).exit_code == 0
    assert baseline("remove")[1] == {}
    # A test that is skipped is not removed by an acceptance of another.
    assert baseline("remove, return")[1] == {"test_two[y]": "lost"}


def test_a_gate_is_red_by_it(
    pytester: pytest.Pytester, gpumem: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(test_a=TESTS)
    pytester.makefile(".ini", pytest="[pytest]")
    pytester.makefile(".gitignore", **{"": ".benchmarks\ngpumem-results\n__pycache__"})
    commit(pytester.path)
    assert gpumem("--gpumem-save").ret == 0

    def gate(words: tuple[str, ...] = ()) -> Result:
        quick = ("--gpumem-device=sim", "--gpumem-budget=1 ms", "-p", "no:cacheprovider", "-n0")
        return CliRunner().invoke(
            main, ["gate", "--screen-only", "--max-regression", "50%", "HEAD", "--", *quick, *words]
        )

    monkeypatch.setenv("EARLY", "return")
    red = gate()
    assert (red.exit_code, gate_result(red.stdout)) == (
        1,
        "gpumem gate: red (simulated): 1 measurement lost",
    )
    monkeypatch.setenv("EARLY", "skip")
    (pytester.path / "test_a.py").unlink()
    assert gate().exit_code == 1  # no test is collected
