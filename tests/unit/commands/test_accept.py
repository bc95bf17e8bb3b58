"""`gpumem accept`: which rows it selects, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from known_devices import H100
from measurements import passing
from msgspec.structs import replace

from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main
from pytest_gpumem.records.device import DeviceFacts

Accept = Callable[..., Result]
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
TESTS = ("tests/test_a.py::test_copy[1]", "tests/test_a.py::test_copy[2]", "tests/test_a.py::TestB::test_copy", "tests/test_ab.py::test_c")


def save(folder: Path, facts: DeviceFacts, tests: tuple[str, ...], label: str = "") -> None:
    Store(folder, facts).save([passing(test, label=label) for test in tests], "abc")


@pytest.fixture
def accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Accept:
    monkeypatch.chdir(tmp_path)
    for name in ("GITHUB_EVENT_NAME", "GITHUB_ACTOR", "GITLAB_USER_LOGIN", "CI_MERGE_REQUEST_PROJECT_ID", "GPUMEM_BASELINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    save(tmp_path / ".benchmarks", H100, TESTS)
    save(tmp_path / ".benchmarks", H100, TESTS[:1], "warm")
    save(tmp_path / ".benchmarks", A100, TESTS[:1])
    return lambda *arguments: CliRunner().invoke(main, ["accept", *arguments])


def resets(folder: Path, facts: DeviceFacts = H100) -> dict[str, tuple[str, str]]:
    return {key: (reset.reason, reset.who) for key, reset in Store(folder, facts).load().resets.items()}


@pytest.mark.parametrize(
    ("tests", "rows"),
    [
        ([TESTS[1]], [TESTS[1]]),
        ([TESTS[0]], [TESTS[0], f"{TESTS[0]}[warm]"]),
        ([f"{TESTS[0]}[warm]"], [f"{TESTS[0]}[warm]"]),
        (["tests/test_a.py::test_copy"], [TESTS[0], f"{TESTS[0]}[warm]", TESTS[1]]),
        (["tests/test_a.py"], [TESTS[0], f"{TESTS[0]}[warm]", TESTS[1], TESTS[2]]),
        (["tests/test_a.py::TestB", TESTS[3]], [TESTS[2], TESTS[3]]),
        (["tests/"], [TESTS[0], f"{TESTS[0]}[warm]", TESTS[1], TESTS[2], TESTS[3]]),
    ],
)
def test_what_a_node_id_selects(accept: Accept, tmp_path: Path, tests: list[str], rows: list[str]) -> None:
    result = accept(*tests, "--reason", " checks bounds ", "--who", "ada", "--gpu", H100.key)
    assert result.exit_code == 0, result.output
    assert resets(tmp_path / ".benchmarks") == dict.fromkeys(rows, ("checks bounds", "ada"))
    assert resets(tmp_path / ".benchmarks", A100) == {}


def test_all_gpus_that_hold_the_test(accept: Accept, tmp_path: Path) -> None:
    result = accept(TESTS[0], "--reason", "why", "--who", "ada")
    assert resets(tmp_path / ".benchmarks", A100) == {TESTS[0]: ("why", "ada")}
    assert len(resets(tmp_path / ".benchmarks")) == 2
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{A100.key}: reset the baseline of {TESTS[0]}; wrote ")
    assert lines[-1] == "run pytest --gpumem --gpumem-save to start the new baseline"


def test_where_the_baseline_is(accept: Accept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "kept", H100, ("a.py::test",))
    monkeypatch.setenv("GPUMEM_BASELINE", "kept")
    assert accept("a.py::test", "--reason", "why").exit_code == 0
    assert accept(TESTS[0], "--baseline", ".benchmarks", "--reason", "why").exit_code == 0


def test_who(accept: Accept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "grace")
    accept(TESTS[3], "--reason", "why")
    assert resets(tmp_path / ".benchmarks")[TESTS[3]] == ("why", "grace")
    monkeypatch.setenv("GITHUB_ACTOR", "octo")
    accept(TESTS[3], "--reason", "why")
    assert resets(tmp_path / ".benchmarks")[TESTS[3]] == ("why", "octo")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([TESTS[0]], "Missing option '--reason'"),
        (["--reason", "why"], "Missing argument 'TEST...'"),
        ([TESTS[0], "--reason", "  "], "--reason: it is empty"),
        (["tests/test_a.py::test_cpy[1]", "--reason", "why"], f"no row in .benchmarks belongs to it (did you mean {TESTS[0]}?)"),
        (["tests/test_a", "--reason", "why"], "tests/test_a: no row in .benchmarks belongs to it"),
        ([TESTS[0], "nowhere", "--reason", "why"], "nowhere: no row in .benchmarks belongs to it"),
        ([TESTS[0], "--reason", "why", "--baseline", "empty"], "there are no baselines in empty; give their place with --baseline"),
        (
            [TESTS[0], "--reason", "why", "--gpu", "T4"],
            f"--gpu: there is no baseline of 'T4' in .benchmarks; there are {A100.key}, {H100.key}",
        ),
    ],
)
def test_mistakes_write_nothing(accept: Accept, tmp_path: Path, arguments: list[str], words: str) -> None:
    result = accept(*arguments)
    assert result.exit_code == 4
    (line,) = result.stderr.splitlines()
    assert words in line
    assert len(list(tmp_path.rglob("*.json"))) == 3


def test_a_file_that_cannot_be_used_is_named(accept: Accept, tmp_path: Path) -> None:
    bad = tmp_path / ".benchmarks" / H100.key / "gpumem" / "bad.json"
    bad.write_text("{")
    result = accept(TESTS[0], "--reason", "why")
    assert result.exit_code == 4
    assert result.stderr.startswith("gpumem: .benchmarks/")
    assert "bad.json: not JSON" in result.stderr
    assert len(list(tmp_path.rglob("*.json"))) == 4


def test_a_fork_accepts_nothing(accept: Accept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"pull_request": {"base": {"repo": {"full_name": "a/b"}}, "head": {"repo": {"full_name": "c/b"}}}}
    (tmp_path / "event").write_text(json.dumps(event))
    monkeypatch.setenv("GITHUB_EVENT_NAME", "pull_request")
    monkeypatch.setenv("GITHUB_EVENT_PATH", str(tmp_path / "event"))
    result = accept(TESTS[0], "--reason", "why")
    assert (result.exit_code, result.stderr) == (
        4,
        "gpumem: cannot accept the code of a fork: a pull_request event from the fork c/b\n",
    )
    assert len(list(tmp_path.rglob("*.json"))) == 3
