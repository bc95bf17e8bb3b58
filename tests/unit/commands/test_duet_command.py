"""`gpumem duet` from its arguments to its exit code, with processes that are made up."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from processes import Players, row, sides

from pytest_gpumem.cli import main
from pytest_gpumem.records.row import Row
from pytest_gpumem.runs import experiment, worktree
from pytest_gpumem.runs.processes import BASE, HEAD, Turn
from pytest_gpumem.runs.worktree import Side

A = "test_x.py::test_a"
Run = Callable[..., Result]


def noisy(turn: Turn, _attempt: int) -> list[Row]:
    """3 % slower, and noise that hides it from a few pairs."""
    noise = np.random.default_rng([turn.round, turn.side == HEAD]).normal(0, 0.02)
    return [row(A, float(25e-6 * np.exp(noise)) * (1.03 if turn.side == HEAD else 1))]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls the command; the verdicts stand in `duet.json`, journals in the folder `journals`."""

    @contextmanager
    def two_sides(*_: object) -> Iterator[tuple[Side, Side]]:
        yield sides()[BASE], sides()[HEAD]

    class Processes(Players):
        def __init__(self, *_: object, **__: object) -> None:
            super().__init__(noisy)

        def close(self) -> None:
            pass

    monkeypatch.chdir(tmp_path)
    (tmp_path / "journals").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "journals"))
    monkeypatch.setattr(worktree, "two_sides", two_sides)
    monkeypatch.setattr(experiment, "Processes", Processes)
    return lambda *arguments: CliRunner().invoke(
        main, ["duet", "--json=duet.json", *arguments, "main"], prog_name="gpumem"
    )


def document(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "duet.json").read_text())
    return found


def test_an_undecided_duet_goes_on_from_its_journal(run: Run, tmp_path: Path) -> None:
    first = run("--rounds-max=12")
    assert first.exit_code == 0, first.output
    assert "the same command with --rounds-max 24" in first.stdout
    verdict = document(tmp_path)["verdicts"][0]
    assert (verdict["outcome"], verdict["paired"]["pairs"]) == ("UNDECIDED", 12)
    more = run("--rounds-max=17")
    (verdict,), resumed = document(tmp_path)["verdicts"], document(tmp_path)["resumed"]
    assert (more.exit_code, verdict["outcome"], verdict["paired"]["pairs"], resumed) == (
        0,
        "UNDECIDED",
        17,
        24,
    )
    assert len([*(tmp_path / "journals").iterdir()]) == 1
    last = run("--rounds-max=217")
    (verdict,), resumed = document(tmp_path)["verdicts"], document(tmp_path)["resumed"]
    assert (last.exit_code, verdict["outcome"], resumed) == (1, "FAIL", 34)
    # Nothing is open any more, and nothing to go on with.
    assert "the same command with" not in last.stdout
    assert [*(tmp_path / "journals").iterdir()] == []
