"""What the proof of the duet on a GPU says of its record."""

from __future__ import annotations

import copy
from typing import Any

import duet_proof


def duet(outcome: str | None, resumed: int = 0) -> dict[str, Any]:
    paired = None if outcome is None else {"change": 0.0102, "low": 0.009, "high": 0.011, "pairs": 12}
    verdict = {"outcome": outcome, "paired": paired, "sentence": "because"}
    return {"verdicts": [verdict], "processes": [{"seconds": 0.9}, {"seconds": 1.1}], "resumed": resumed}


RECORD: dict[str, Any] = {
    "simulated": False,
    "device": {"name": "H200", "driver": "1"},
    "ended": "2026-01-01T00:00:00",
    "cases": [
        {"mib": 32, "slower": 0.0, "wall": 30.0, "duet": duet("PASS")},
        {"mib": 2, "slower": 1.0, "wall": 90.0, "duet": duet("FAIL")},
    ],
    "killed": {"killed_after": 9},
    "resumed": {"duet": duet("PASS", 9)},
}


def test_a_record_as_it_should_be() -> None:
    text = duet_proof.table(RECORD)
    assert text.startswith("H200, driver 1, 2026-01-01")
    assert "  32 MiB      +0.0 %          PASS     +1.020  +0.900  +1.100     12    30.0         1.00" in text
    assert "killed after 9 processes and called again: 9 of 2 taken from the journal, PASS" in text
    assert text.endswith("every verdict is as it should be")


def test_a_record_has_no_folder_of_the_machine() -> None:
    document = {"kind": "gpumem duet", "arguments": {"folder": "/tmp/x"}, "base": {"what": "folder /tmp/x"}, "head": {}, "exit": 0}
    assert duet_proof.kept(document) == {"kind": "gpumem duet", "exit": 0}


def test_what_is_wrong_is_said() -> None:
    record = copy.deepcopy(RECORD)
    record["simulated"] = True
    record["cases"][0] |= {"wall": 61.0, "duet": duet(None)}
    record["cases"][1]["duet"] = duet("PASS")
    record["resumed"]["duet"]["resumed"] = 3
    assert duet_proof.wrong(record) == [
        "32 MiB, +0 %: None, not PASS: because",
        "2 MiB, +1 %: PASS, not FAIL: because",
        "32 MiB: the PASS took 61.0 s, more than 60 s",
        "after the kill 3 processes were taken from the journal",
    ]
    text = duet_proof.table(record)
    assert text.startswith("SIMULATED H200")
    assert text.count("WRONG") == 4
