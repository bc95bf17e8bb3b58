"""The script of the host link: the estimate, its claims, its table, and all of it on the simulated device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import host_link
import pytest
import renew_tables

from pytest_gpumem.devices.simulated import content
from pytest_gpumem.units import MiB


def record(**parts: Any) -> dict[str, Any]:
    device = {"name": "NVIDIA H200", "simulated": False, "driver": "580", "uuid": "GPU-1", "link": "PCIe Gen5 x16"}
    return {"kind": "host_link", "device": device, "bytes": 256 * MiB, "ended": "2026-11-21T00:00:00", **parts}


def each_way(rate: float = 55e9, over: float = 0.01) -> dict[str, Any]:
    pinned = 256 * MiB / rate
    row = {"pinned": pinned, "loop": pinned / (1 + over), "registered": pinned, "pageable": 4 * pinned}
    return {"host to device": row, "device to host": dict(row), "both at once": 1.1 * pinned}


def holding(**parts: Any) -> list[bool | None]:
    return [one["holds"] for one in host_link.claims(record(**parts))]


@pytest.mark.parametrize(("rate", "over", "holds"), [(55e9, 0.01, True), (53.9e9, 0.01, False), (55e9, 0.03, False), (55e9, -0.03, False)])
def test_pinned_rates_and_the_bare_loop_are_claimed(rate: float, over: float, holds: bool) -> None:
    assert all(one is not False for one in holding(each_way=each_way(rate, over))) is holds


@pytest.mark.parametrize(("best", "holds"), [(1.09, True), (1.11, False)])
def test_the_best_number_of_streams_is_held_against_the_bound(best: float, holds: bool) -> None:
    rows = [{"streams": 1, "chunks": 1, "seconds": 3.0}, {"streams": 8, "chunks": 32, "seconds": best}]
    part = {"rounds": 9, "parts": {"in": 1.0, "kernel": 1.0, "out": 1.0}, "in_turn": 3.0, "bound": 1.0, "rows": rows}
    assert holding(staged_in=part) == [holds]
    assert host_link.estimate(part, 4) == pytest.approx(1.5)


def test_peers_are_claimed_where_access_is_direct() -> None:
    seconds = {"staged, to the other": 256 * MiB / 38e9, "direct, to the other": 256 * MiB / 396e9}
    assert holding(peers=seconds) == [None, True]
    assert holding(peers={**seconds, "direct, from the other": 256 * MiB / 300e9}) == [None, True, False]


def test_it_runs_on_the_simulated_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "host_link.json"
    monkeypatch.setattr(host_link, "PLAN", host_link.Plan(placements=2, budget=0.002))
    for name, value in {"STREAMS": (2,), "CHUNKS_PER_STREAM": (1, 2), "LOOP": 5}.items():
        monkeypatch.setattr(host_link, name, value)
    monkeypatch.setattr(content, "BACKED_BYTES", 4096)  # what is computed decides no time here
    monkeypatch.setattr(sys, "argv", ["host_link.py", "--device", "sim:h200", "--mib", "16", "--json", str(file)])
    assert host_link.main() == 0
    run = json.loads(file.read_text())
    shown = capsys.readouterr().out.rstrip()
    assert shown == renew_tables.bench_table(run)
    assert shown.startswith("SIMULATED NVIDIA H200, PCIe Gen5 x16")
    assert {one["holds"] for one in run["claims"]} == {None}
