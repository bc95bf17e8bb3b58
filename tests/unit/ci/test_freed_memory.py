"""What freeing memory does to the next samples: which are slow, until when, and the rate that follows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import freed_memory
import pytest

GIB = 2**30


def trial(after: list[float], nbytes: int = GIB, number: int = 1) -> dict[str, Any]:
    """A free of `nbytes` after samples of 100, then one sample each millisecond."""
    return {"round": number, "bytes": nbytes, "before": [100.0] * 9, "since": [0.001 * i for i in range(len(after))], "after": after}


def test_scrubbing_lasts_until_the_last_slow_sample_has_ended() -> None:
    found = freed_memory.effect(trial([110.0, 112.0, 108.0, 100.0, 104.0, 100.0]))
    assert found["slow"] == 3
    assert found["longer"] == pytest.approx(0.10)
    assert found["ends"] == pytest.approx(0.003)
    assert found["rate"] == pytest.approx(GIB / 0.003)


def test_the_limit_is_the_least_over_sizes_of_the_median_over_frees() -> None:
    lasting = {milliseconds: [110.0] * milliseconds + [100.0] for milliseconds in (2, 4, 5, 40)}
    large = [freed_memory.effect(trial(lasting[ms], 10 * GIB)) for ms in (4, 5, 40)]
    small = [freed_memory.effect(trial(lasting[2], 4 * GIB)) for _ in range(3)]
    assert freed_memory.limit(large + small) == pytest.approx(2 * GIB / 0.001)
    assert freed_memory.limit(large) == pytest.approx(10 * GIB / 0.005)


def record(scrub_rate: float | None) -> dict[str, Any]:
    return {
        "device": {"name": "NVIDIA H200", "simulated": False, "driver": "580"},
        "ended": "2026-11-21T00:00:00",
        "triad_bytes": 256 * 2**20,
        "rounds": 2,
        "scrub_rate": scrub_rate,
        "trials": [trial([110.0, 110.0, 100.0, 100.0], number=1), trial([110.0, 110.0, 110.0, 100.0], number=2)],
    }


def test_the_constant_is_held_against_the_limit() -> None:
    assert freed_memory.holds(record(350e9)) is True
    assert freed_memory.holds(record(360e9)) is False
    assert freed_memory.holds(record(None)) is None
    text = freed_memory.table(record(360e9))
    assert "SCRUB_RATE must be below 358 GB/s; it is 360 GB/s, which DOES NOT HOLD" in text
    assert "1.00 GiB  2, 3" in text


def test_the_script_runs_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "freed.json"
    arguments = ["x", "--device", "sim", "--rounds", "2", "--gib", "0.25,1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert freed_memory.main() == 0
    held = json.loads(file.read_text())
    assert held["kind"] == "freed_memory"
    assert [one["bytes"] for one in held["trials"]] == [GIB // 4, GIB] * 2
    assert all(one["since"][-1] >= 0.05 and len(one["before"]) == freed_memory.BEFORE for one in held["trials"])
    said = capsys.readouterr().out
    assert said.startswith("SIMULATED")
    assert "no limit for SCRUB_RATE" in said
    assert said.rstrip() == freed_memory.table(held)
