"""The proof of what a limit promises: its targets, its table, and one call on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import limit_proof
import pytest
import renew_tables
from limit_proof import PLANTED, TRIAD

pytestmark = pytest.mark.usefixtures("quick_processes")


def row(
    outcome: str = "PASS", change: float = 0.001, key: str = PLANTED, processes: int = 1
) -> dict[str, Any]:
    bounds = {"change": change, "low": change - 0.002, "high": change + 0.002}
    return {
        "key": key,
        "outcome": outcome,
        "code": None,
        "processes": processes,
        "latency": 1.2e-4,
        **bounds,
    }


def run(
    *rows: dict[str, Any], more: float = 0.0, code: int = 0, wall: float = 20.0, again: float = 8.0
) -> dict[str, Any]:
    return {"more": more, "exit": code, "wall": wall, "again": again, "rows": list(rows)}


def duet(more: float, outcome: str, wall: float) -> dict[str, Any]:
    return {
        "more": more,
        "exit": 0,
        "wall": wall,
        "outcome": outcome,
        "pairs": 9,
        "change": more / 100,
    }


def gated(
    changes: str, wall: float, pairs: dict[str, Any] | None = None, *, code: int = 0
) -> dict[str, Any]:
    played = {"seconds": 5.0, "processes": 16, "pairs": pairs} if pairs else None
    return {**run(row(), wall=wall, code=code), "changes": changes, "duet": played}


def record() -> dict[str, Any]:
    """Every target met, some of them only just."""
    unchanged = [row(), row(key=TRIAD, processes=3)] * 4 + [
        row(),
        row("UNDECIDED", key=TRIAD, processes=12),
    ]
    parts = {
        "save": [run(row(), row(key=TRIAD))] * 3,
        "unchanged": [run(*unchanged)],
        "bytes": [run(row("FAIL", 0.0148, processes=3), more=1.5, code=1)] * 5,
        "gross": [run(row("FAIL", 0.49), more=50.0, code=1, again=15.0)],
        "five": [run(row("PASS", 0.031), more=3.2), run(row("FAIL", 0.068), more=7.0, code=1)],
        "duet": [duet(0.0, "PASS", 20.0), duet(1.5, "FAIL", 31.0)],
        "gate": [
            gated("comment", 24.0),
            gated("kernel", 18.0, {PLANTED: ["PASS", 8]}),
            gated("wait", 90.0, {PLANTED: ["FAIL", 11]}, code=1),
        ],
    }
    return {
        "kind": "limit_proof",
        "simulated": False,
        "device": {"key": "h200", "name": "H200", "driver": "580"},
        "libraries": {"cupy": "14.2.0", "torch": None, "triton": None},
        "left_out": ["test_torch.py::test_softmax"],
        "budget": "300ms",
        "ended": "2026-01-01T00:00:00",
        "parts": parts,
    }


def missed(changed: dict[str, Any]) -> list[str]:
    return [f"{one.part}: {one.text}" for one in limit_proof.targets(changed) if one.met is False]


def test_a_record_that_meets_its_targets_just() -> None:
    found = limit_proof.targets(record())
    assert {one.part for one in found} == set(limit_proof.PARTS)
    assert all(one.met for one in found)
    text = renew_tables.bench_table(record())
    assert max(map(len, text.splitlines())) <= 100
    assert "MISSED" not in text
    assert "torch not installed" in text
    assert "test_torch.py::test_softmax" in text


@pytest.mark.parametrize(
    ("part", "entries", "expected"),
    [
        ("save", [run(row())] * 2, ["save: 3 runs accepted"]),
        ("save", [run(row(), code=1)] * 3, ["save: 3 runs accepted"]),
        ("unchanged", [run(*[row()] * 99, row("FAIL"), code=1)], ["unchanged: unchanged at 1 %: no FAIL"]),
        ("unchanged", [run(*[row()] * 89, *[row("UNDECIDED")] * 11)], ["unchanged: unchanged at 1 %: 90% PASS"]),
        ("bytes", [*[run(row("FAIL", 0.015), more=1.5)] * 5, run(row("UNDECIDED", 0.014), more=1.5)], ["bytes: +1.5 % at 1 %: FAIL"]),
        ("bytes", [run(row("FAIL", 0.015), more=1.5)] * 4, ["bytes: +1.5 % at 1 %: FAIL"]),
        ("bytes", [run(row("FAIL", key=TRIAD), more=1.5)] * 5, ["bytes: +1.5 % at 1 %: FAIL"]),
        ("gross", [run(row("FAIL", 0.5), more=50.0, again=15.1)], ["gross: measures again for 15 s or less"]),
        ("five", [run(row("FAIL", 0.03), more=3.2), run(row("PASS", 0.07), more=7.0)],
         ["five: +3.2 % at 5 %: PASS", "five: +7 % at 5 %: FAIL"]),
        ("five", [run(row("PASS", 0.03), more=3.2)], ["five: +7 % at 5 %: FAIL"]),
        ("duet", [duet(0.0, "PASS", 60.1), duet(1.5, "UNDECIDED", 30.0)],
         ["duet: unchanged: 60 s or less", "duet: +1.5 % at 1 %: FAIL"]),
        ("duet", [duet(0.0, "PASS", 20.0), {"error": f"git ended\n{'last words ' * 20}"}],
         ["duet: runs to its end", "duet: +1.5 % at 1 %: FAIL"]),
        ("gate", [gated("comment", 24.1, code=1)],
         ["gate: one comment changed: exit 0", "gate: one comment: 2 runs or less"]),
        ("gate", [run(row(), wall=24.1)], ["gate: one comment: 2 runs or less"]),
        ("gate", [gated("kernel", 18.1), gated("wait", 18.0)],
         ["gate: one wait changed: exit 1", "gate: one kernel: 1.5 runs or less"]),
    ],
)  # fmt: skip
def test_a_missed_target_is_named(
    part: str, entries: list[dict[str, Any]], expected: list[str]
) -> None:
    changed = record()
    changed["parts"][part] = entries
    assert missed(changed) == expected
    text = limit_proof.table(changed)
    assert text.count("MISSED") == len(expected)
    assert max(map(len, text.splitlines())) <= 100


def test_a_part_that_was_not_run_is_no_missed_target() -> None:
    changed = record()
    del changed["parts"]["duet"]
    assert [one.part for one in limit_proof.targets(changed) if one.met is None] == ["duet"]
    assert missed(changed) == []


def test_the_project_has_fifteen_tests() -> None:
    modules = {
        name: text
        for name, text in vars(limit_proof).items()
        if name.startswith(("TEST_", "OWN_", "CONFTEST"))
    }
    for name, text in modules.items():
        compile(text, name, "exec")
    foreign = "".join(text for name, text in modules.items() if name.startswith("TEST_"))
    assert len(set(limit_proof.ROWS)) == 15
    assert all(f"def {key.partition('::')[2]}(" in foreign for key in limit_proof.ROWS)


def test_a_call_adds_to_the_record_and_keeps_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limit_proof, "SAVES", 1)
    path, folder = tmp_path / "record.json", tmp_path / "kept"
    given = [
        "--device",
        "sim",
        "--budget",
        "5ms",
        "--runs",
        "1",
        "--json",
        str(path),
        "--folder",
        str(folder),
    ]
    one_process = ["--", "--gpumem-processes=1"]
    limit_proof.main([*given, "--only", "save", *one_process])
    limit_proof.main([*given, "--only", "unchanged", *one_process])
    text = capsys.readouterr().out
    found = json.loads(path.read_text())
    assert {part: len(entries) for part, entries in found["parts"].items()} == {
        "save": 1,
        "unchanged": 1,
    }
    assert (found["simulated"], found["left_out"]) == (True, [])
    for entry in found["parts"]["unchanged"]:
        assert entry["exit"] == 0
        assert entry["wall"] > 0
        assert [one["key"] for one in entry["rows"]] == [TRIAD]
        assert all(one["change"] is not None and one["low"] < one["high"] for one in entry["rows"])
    assert str(tmp_path) not in path.read_text()
    assert "1 runs of" in text
    assert "SIMULATED" in text


def test_a_part_that_breaks_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        limit_proof.PARTS, "save", lambda proof: iter([proof.git("no-such-command")])
    )
    monkeypatch.setitem(limit_proof.PARTS, "duet", lambda proof: iter([duet(0.0, "PASS", 1.0)]))
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**record(), "simulated": True, "budget": "5ms", "parts": {}}))
    given = [
        "--device",
        "sim",
        "--budget",
        "5ms",
        "--json",
        str(path),
        "--folder",
        str(tmp_path / "kept"),
    ]
    assert limit_proof.main([*given, "--only", "save", "duet"]) == 1
    parts = json.loads(path.read_text())["parts"]
    assert "no-such-command" in parts["save"][0]["error"]
    assert parts["duet"] == [duet(0.0, "PASS", 1.0)]
    assert "MISSED" in capsys.readouterr().out
