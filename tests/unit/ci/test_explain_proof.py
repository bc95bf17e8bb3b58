"""The proof of explain: what counts as named, and what is enough."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Any

import explain_planted
import explain_proof
import pytest
from explain_proof import COUNTED, WATCHED, judged, rows, verdict

from pytest_gpumem.explain.causes import RULES
from pytest_gpumem.records.row import UNEXPLAINED


def explanation(name: str, first: str | None, *causes: str) -> dict[str, Any]:
    return {
        "key": f"test_planted.py::{name}",
        "first": first,
        "slow_down": {"share": 0.25},
        "base_seconds": 1e-3,
        "head_seconds": 1.25e-3,
        "causes": [
            {"rule": rule, "share": 0.9, "up_to": True, "sentence": f"{rule} moved"}
            for rule in causes
        ],
        "unexplained": {"share": 0.1},
        "not_looked_at": [],
    }


def test_every_planted_test_is_there_and_every_rule_that_it_names() -> None:
    for name, planted in {**COUNTED, **WATCHED}.items():
        assert callable(getattr(explain_planted, name))
        assert set(planted) <= {rule.name for rule in RULES}
    there = {name for name in vars(explain_planted) if name.startswith("test_")}
    assert there == {*COUNTED, *WATCHED}
    assert sum(bool(planted) for planted in {**COUNTED, **WATCHED}.values()) == 8
    assert explain_proof.UNEXPLAINED == UNEXPLAINED


@pytest.mark.parametrize(
    ("first", "causes", "planted", "right"),
    [
        ("pageable", ("pageable", "more copies"), ("pageable",), True),
        ("more copies", ("more copies", "pageable"), ("pageable",), False),
        (None, (), (), True),
        (UNEXPLAINED, (), (), True),
        (UNEXPLAINED, ("occupancy",), (), False),
    ],
)
def test_what_counts_as_named(
    first: str | None, causes: tuple[str, ...], planted: Any, right: bool
) -> None:
    assert judged(explanation("test_it", first, *causes), planted) is right


def test_one_miss_is_allowed_among_those_that_can_be_named() -> None:
    planted: dict[str, Any] = {"a": ("pageable",), "b": ("pageable",), "c": ()}
    right = [*(explanation(name, "pageable", "pageable") for name in "ab"), explanation("c", None)]
    assert verdict(rows(right, planted)) == (
        "2 of 2 planted causes named first, 1 of 1 unchanged pairs blamed on nothing",
        True,
    )
    right[0]["first"] = "more copies"
    assert verdict(rows(right, planted))[1]
    right[1]["first"] = "more copies"
    assert not verdict(rows(right, planted))[1]
    assert not verdict(rows(right[2:3], planted))[1]  # what was not measured was not named
    assert not verdict([])[1]


def test_what_was_said_is_kept_without_the_folder_that_it_was_said_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = f"base: folder {tmp_path / 'base'}; head: folder {tmp_path / 'head'}; GPU"
    monkeypatch.setattr(
        subprocess, "run", lambda *given, **named: subprocess.CompletedProcess(given, 0, said)
    )
    asked = argparse.Namespace(pairs=1, device="sim", budget="1 s")
    found = explain_proof.explain(tmp_path, ["test_planted.py::test_a"], asked, counters=False)
    assert found["text"] == "base: folder base; head: folder head; GPU"
    assert os.fspath(tmp_path) not in str(found)
