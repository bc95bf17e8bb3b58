"""What `gpumem explain` refuses before anything is measured, and what it says once that both sides have in common."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from causes_evidence import measurement
from click.testing import CliRunner
from known_devices import H100

from pytest_gpumem.cli import main
from pytest_gpumem.commands import explain
from pytest_gpumem.explain.evidence import SideEvidence


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Calls that would have measured; each gives two sides that a missing tool left a note on."""
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = []
    side = SideEvidence("base", H100, {"a": measurement()}, {"a": ("a", "")}, notes=("ncu was not found",))

    def stand_in(*given: Any) -> tuple[SideEvidence, SideEvidence]:
        calls.append(given)
        return side, replace(side, name="head", notes=("ncu was not found", "nsys wrote no report"))

    monkeypatch.setattr(explain, "_measured", stand_in)
    return calls


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--keep", "file/deep"], r"--keep: file/deep: there is no folder .*file"),
        (["--json", "nowhere/why.json"], r"--json: nowhere/why.json: there is no folder"),
        (["--ncu"], r"--ncu: GPUMEM_NCU='no-ncu' is no program; accepted is the path of Nsight Compute's command line, ncu"),
        (["--nsys"], r"--nsys: GPUMEM_NSYS='no-nsys' is no program"),
    ],
)
def test_what_would_fail_after_measuring_is_refused_before(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.setenv("GPUMEM_NCU", "no-ncu")
    monkeypatch.setenv("GPUMEM_NSYS", "no-nsys")
    Path("file").touch()
    done = CliRunner().invoke(main, ["explain", "--base", "main", *arguments, "test_a.py::test_a"])
    assert done.exit_code == 4
    assert measured == []
    (line,) = done.stderr.splitlines()
    assert re.search(said, line), line


def test_a_note_on_both_sides_is_said_once(measured: list[Any]) -> None:
    done = CliRunner().invoke(main, ["explain", "--base", "main", "--keep", "new/deep", "test_a.py::test_a"])
    assert done.exit_code == 0, done.output
    assert len(measured) == 1
    assert done.stdout.count("ncu was not found") == 1
    assert "note: base and head: ncu was not found" in done.stdout
    assert "note: head: nsys wrote no report" in done.stdout
    assert sorted(path.name for path in Path("new/deep").iterdir()) == ["base.json", "head.json"]
