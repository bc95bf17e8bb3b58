"""The proof of `gpumem bisect`: what its table says, and which records break a promise."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import bisect_proof

ONE: dict[str, Any] = {
    "seed": 0, "commits": 16, "planted": {"5": 3.0}, "exit": 0, "seconds": 60.0, "found": 5, "another": False, "duets": 2, "processes": 40,
    "skipped": [], "left_behind": 0, "change": {"change": 0.0302}, "device": {"name": "NVIDIA H100", "driver": "580"},
}  # fmt: skip
RECORD: dict[str, Any] = {
    "kind": "bisect_proof",
    "simulated": False,
    "ended": "2026-11-22T12:00:00",
    "parts": {
        "statistics": [
            {
                "noise": "normal",
                "spread": 0.0012,
                "case": "one",
                "ends": {"right": 98, "undecided": 2},
                "pairs": 67,
            }
        ],
        "counted": [ONE],
        "none": [{**ONE, "planted": {}, "found": None, "change": None, "exit": 1}],
        "two": [{**ONE, "planted": {"5": 3.0, "9": 6.0}, "another": True}],
    },
}


def changed(part: str, **fields: Any) -> dict[str, Any]:
    record = copy.deepcopy(RECORD)
    record["parts"][part][0].update(fields)
    return record


def test_each_promise_can_be_broken() -> None:
    assert bisect_proof.wrong(RECORD) == []
    for part, fields in (
        ("statistics", {"ends": {"right": 90, "wrong": 10}}),
        ("counted", {"found": 6}),
        ("counted", {"found": None, "exit": 6}),
        ("counted", {"error": "no end within 100 s"}),
        ("counted", {"left_behind": 1}),
        ("none", {"exit": 0, "found": 3}),
        ("two", {"another": False}),
    ):
        assert len(bisect_proof.wrong(changed(part, **fields))) == 1, (part, fields)
    # Some wrong ones are promised.
    assert bisect_proof.wrong(changed("statistics", ends={"right": 199, "wrong": 1})) == []


def test_simulated_searches_end_as_planted() -> None:
    for case, end in (("none", "nothing"), ("one", "right"), ("two equal", "right")):
        ends, pairs = bisect_proof.drawn_searches(("normal", 0.0012, case, 0, 4))
        assert ends == {end: 4}
        assert len(pairs) == 4


def test_the_change_is_never_beside_a_commit_that_cannot_be_measured(monkeypatch: Any) -> None:
    asked: list[dict[str, Any]] = []

    def search(_folder: Path, _options: Any, **given: Any) -> dict[str, Any]:
        asked.append(given)
        return {}

    monkeypatch.setattr(bisect_proof, "search", search)
    options = type("Options", (), {"commits": 16})
    for seed in range(50):
        bisect_proof.searches("trouble", seed, options, None)  # type: ignore[arg-type]
    for one in asked:
        (place,) = one["more"]
        assert one["broken"]
        assert not {0, 16, place, place - 1} & one["broken"].keys()
