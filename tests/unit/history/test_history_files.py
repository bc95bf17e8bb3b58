"""The files that `gpumem history` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from histories import CARD, one_slower, runs, series

from pytest_gpumem.cli import main
from pytest_gpumem.history import query
from pytest_gpumem.history.data import History


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is asked for is the history of one test that became slower."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(query, "history", lambda where, **chosen: one_slower())


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["history", "store", "--since", "2026-11-01", *arguments])


def test_every_file_is_written_and_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    names = {"html": "a.html", "csv": "a.csv", "parquet": "a.parquet", "openmetrics": "a.txt", "bmf": "a.json"}
    result = run(*(f"--{option}={name}" for option, name in names.items()))
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-5:] == [f"wrote {name}" for name in names.values()]
    assert "Slower or larger since 2026-11-01" in Path("a.html").read_text()
    assert len(Path("a.csv").read_text().splitlines()) == 41
    assert Path("a.parquet").read_bytes()[:4] == b"PAR1"
    assert Path("a.txt").read_text().endswith("# EOF\n")
    assert list(json.loads(Path("a.json").read_text())) == [f"tests/test_a.py::test_copy @ {CARD}"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names.values())


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(query, "history")
    result = run("--csv", "nowhere/a.csv")
    assert result.exit_code == 4
    assert "--csv: nowhere/a.csv: there is no folder" in result.stderr


def test_without_pyarrow_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run("--parquet", "a.parquet")
    assert result.exit_code == 4
    assert result.stderr == "gpumem: Parquet needs pyarrow; pip install 'pytest-gpumem[parquet]' brings it\n"
    assert not Path("a.parquet").exists()


def test_the_table_of_simulated_runs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = one_slower()
    history = History(tuple(runs(40, simulated=True)), slower.series, slower.changes)
    monkeypatch.setattr(query, "history", lambda where, **chosen: history)
    assert "(simulated)" in run().stdout
    monkeypatch.setattr(query, "history", lambda where, **chosen: History(tuple(runs(2)), (series("t", [1.0, 1.0]),), ()))
    assert "(simulated)" not in run().stdout
