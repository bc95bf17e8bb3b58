"""Explanations made again from evidence that was taken on a GPU: whatever `explain_proof.py --keep` has left in tests/data/explain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_gpumem.explain.command import explanations
from pytest_gpumem.explain.evidence import load
from pytest_gpumem.verdicts.causes import UNEXPLAINED

KEPT = Path(__file__).parents[2] / "data" / "explain"
LARGEST = 200 * 1024
CASES = sorted(folder for folder in KEPT.iterdir() if folder.is_dir())


def test_the_folder_holds_cases_and_nothing_else() -> None:
    for folder in CASES:
        assert sorted(path.name for path in folder.iterdir()) == ["base.json", "expected.json", "head.json"]
        assert all(path.stat().st_size <= LARGEST for path in folder.iterdir())
    assert [path.name for path in KEPT.iterdir() if path.is_file()] == ["README.md"]


@pytest.mark.parametrize("folder", [pytest.param(folder, id=folder.name) for folder in CASES])
def test_the_rules_say_without_a_gpu_what_they_said_on_it(folder: Path) -> None:
    expected = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    (found,) = explanations(*(load(str(folder / f"{side}.json")) for side in ("base", "head"))).values()
    planted = expected["planted"]
    if planted == []:
        assert found.causes == ()
    elif planted is not None and expected["right"]:
        assert found.first in planted
    else:
        assert found.first == expected["first"]
    if found.first is not None:
        told = sum(cause.seconds for cause in found.causes) + found.unexplained
        assert told == pytest.approx(found.slow_down.seconds)
        assert found.first == UNEXPLAINED or found.causes[0].rule == found.first
