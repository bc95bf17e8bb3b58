"""`gpumem baseline`: what it lists, copies and removes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from known_devices import H100
from measurements import passing
from msgspec.structs import replace

from pytest_gpumem.baselines.accepted import Acceptance, Acceptances, AcceptedChange, Scope
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.cli import main

Command = Callable[..., Result]
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
TEST = "tests/test_a.py::test_copy"


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in a folder with three runs of a test, of which the last takes over an accepted change, and a run of another card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUMEM_BASELINE", raising=False)
    folder = tmp_path / ".benchmarks"
    for revision in ("one", "two"):
        Store(folder, H100).save([passing(TEST)], revision)
    change = Acceptances(
        [Acceptance(TEST, "checks bounds", "ada", (AcceptedChange(TEST, Scope.TIME, "9%"),))]
    )
    Store(folder, H100).save([passing(TEST)], "three", accepted=change)
    Store(folder, A100).save([passing("tests/test_b.py::test_other")], "one")
    return lambda *arguments: CliRunner().invoke(main, ["baseline", *arguments])


def test_list(baseline: Command) -> None:
    found = json.loads(baseline("list", "--json", "-").output)
    of_h100 = [one for one in found if one["gpu"] == H100.key]
    assert [(one["revision"], len(one["rows"]), len(one["resets"])) for one in of_h100] == [
        *(("one", 1, 0), ("two", 1, 0), ("three", 1, 1))
    ]
    assert of_h100[2]["resets"] == [{"row": TEST, "who": "ada", "reason": "checks bounds"}]
    text = baseline("list").output
    assert H100.key in text
    assert A100.key in text
    assert "accepted by ada: checks bounds (1 row)" in text


def test_the_rows_of_a_test(baseline: Command) -> None:
    found = json.loads(baseline("list", "--test", "tests/test_a.py", "--json", "-").output)
    assert [(one["revision"], one.get("latency_s"), one.get("accepted_by")) for one in found] == [
        *(("one", 1e-3, None), ("two", 1e-3, None), ("three", 1e-3, "ada"))
    ]
    text = baseline("list", "--test", TEST).output
    assert text.count("1.000 ms") == 3
    assert A100.key not in text
    both = json.loads(
        baseline("list", "--test", "tests/test_b.py", "--test", TEST, "--json", "-").output
    )
    assert {one["row"] for one in both} == {TEST, "tests/test_b.py::test_other"}
    none = baseline("list", "--test", TEST, "--test", "tests/test_a.py::test_cpy")
    assert (none.exit_code, none.stdout) == (4, "")
    assert (
        none.stderr
        == f"gpumem: --test: tests/test_a.py::test_cpy: no row in .benchmarks belongs to it (did you mean {TEST}?)\n"
    )


def test_push_and_prune(baseline: Command, tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    assert (
        f"{H100.key}: 3 files copied from .benchmarks to {there}"
        in baseline("push", ".benchmarks", there).output
    )
    assert f"{H100.key}: 0 files" in baseline("push", ".benchmarks", there).output
    assert "2 of 3 files would be removed" in baseline("prune", "--keep", "1", "--dry-run").output
    assert Store(Path(there), H100).load().processes == 3
    assert "2 of 3 files removed" in baseline("prune", "--keep", "1", "--baseline", there).output
    assert Store(Path(there), H100).load().rows == Store(tmp_path / ".benchmarks", H100).load().rows
    (path,) = Store(Path(there), A100).folder.iterdir()
    path.unlink()
    assert (
        f"{A100.key}: 1 file copied from .benchmarks to {there}"
        in baseline("push", ".benchmarks", there).output
    )


@pytest.mark.parametrize("command", ["list", "prune", "list --test tests/a.py"])
def test_nothing_there(baseline: Command, command: str) -> None:
    result = baseline(*command.split(), "--baseline", "empty")
    assert result.exit_code == 4
    assert result.stderr.splitlines() == [
        "gpumem: there are no baselines in empty; give their place with --baseline"
    ]


def test_nothing_to_copy(baseline: Command) -> None:
    result = baseline("push", "empty", ".benchmarks")
    assert (result.exit_code, result.stderr) == (4, "gpumem: there are no baselines in empty\n")


def test_a_damaged_file_is_not_copied(baseline: Command, tmp_path: Path) -> None:
    path = next(iter(sorted(Store(tmp_path / ".benchmarks", H100).folder.iterdir())))
    path.write_bytes(path.read_bytes()[:-20])
    result = baseline("push", ".benchmarks", "there")
    assert result.exit_code == 4
    assert path.name in result.stderr
    assert not list((tmp_path / "there").rglob(path.name))
