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

from pytest_gpumem.baselines.store import Store, reset
from pytest_gpumem.cli import main

Command = Callable[..., Result]
A100 = replace(H100, name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
TEST = "tests/test_a.py::test_copy"


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in a folder with three runs of a test, a change that was accepted after the second, and a run of another card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUMEM_BASELINE", raising=False)
    folder = tmp_path / ".benchmarks"
    for revision in ("one", "two"):
        Store(folder, H100).save([passing(TEST)], revision)
    reset(folder, H100.key, [TEST], "checks bounds", "ada", "two")
    Store(folder, H100).save([passing(TEST)], "three")
    Store(folder, A100).save([passing("tests/test_b.py::test_other")], "one")
    return lambda *arguments: CliRunner().invoke(main, ["baseline", *arguments])


def test_list(baseline: Command) -> None:
    found = json.loads(baseline("list", "--json", "-", "--gpu", H100.key).output)
    assert [(one["revision"], len(one["rows"]), len(one["resets"])) for one in found] == [
        *(("one", 1, 0), ("two", 1, 0), ("two", 0, 1), ("three", 1, 0))
    ]
    assert found[2]["resets"] == [{"row": TEST, "who": "ada", "reason": "checks bounds"}]
    text = baseline("list").output
    assert H100.key in text
    assert A100.key in text
    assert "accepted by ada: checks bounds (1 row)" in text


def test_show(baseline: Command) -> None:
    found = json.loads(baseline("show", "tests/test_a.py", "--json", "-").output)
    assert [(one["revision"], one.get("latency_s"), one.get("accepted_by")) for one in found] == [
        *(("one", 1e-3, None), ("two", 1e-3, None), ("two", None, "ada"), ("three", 1e-3, None))
    ]
    text = baseline("show", TEST).output
    assert text.count("1.000 ms") == 3
    assert A100.key not in text
    assert baseline("show", "tests/nowhere.py").exit_code == 4


def test_push_pull_and_prune(baseline: Command, tmp_path: Path) -> None:
    there = str(tmp_path / "there")
    assert f"{H100.key}: 4 files copied from .benchmarks to {there}" in baseline("push", there).output
    assert f"{H100.key}: 0 files" in baseline("push", there).output
    assert "1 of 4 files would be removed" not in baseline("prune", "--keep", "1", "--dry-run", "--gpu", A100.key).output
    assert "2 of 4 files would be removed" in baseline("prune", "--keep", "1", "--dry-run").output
    assert Store(Path(there), H100).load().processes == 3
    assert "2 of 4 files removed" in baseline("prune", "--keep", "1", "--baseline", there).output
    assert Store(Path(there), H100).load().rows == Store(tmp_path / ".benchmarks", H100).load().rows
    (path,) = Store(Path(there), A100).folder.iterdir()
    path.unlink()
    assert f"{A100.key}: 1 file copied" in baseline("pull", ".benchmarks", "--baseline", there).output


@pytest.mark.parametrize("command", ["list", "prune", "push there", "show tests/a.py"])
def test_nothing_there(baseline: Command, command: str) -> None:
    result = baseline(*command.split(), "--baseline", "empty")
    assert result.exit_code == 4
    assert result.stderr.splitlines() == ["gpumem: there are no baselines in empty; give their place with --baseline"]


def test_a_damaged_file_is_not_copied(baseline: Command, tmp_path: Path) -> None:
    path = next(iter(sorted(Store(tmp_path / ".benchmarks", H100).folder.iterdir())))
    path.write_bytes(path.read_bytes()[:-20])
    result = baseline("push", "there")
    assert result.exit_code == 4
    assert path.name in result.stderr
    assert not list((tmp_path / "there").rglob(path.name))
