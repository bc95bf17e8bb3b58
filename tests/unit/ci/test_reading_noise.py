"""What readings contain besides the kernel: the summary finds what a made record hides, and the script runs on the simulated device."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reading_noise

from pytest_gpumem.devices.opening import Chosen, choose
from pytest_gpumem.measuring.conductor import Conductor
from pytest_gpumem.ranges import Ranges

NS = 1e-9
STREAMS, PLACES = reading_noise.STREAMS, 32


def run(random: np.random.Generator, overhead: float, *, follows: str = "position") -> dict[str, Any]:
    """A process whose launches all take `overhead` longer, its triads 15 ns by drawing; streams differ by 30 ns, placements by 80."""
    streams, places, slots = random.normal(0, 30 * NS, STREAMS), random.normal(0, 80 * NS, PLACES), random.normal(0, 200 * NS, PLACES)
    streams, places, slots = streams - streams.mean(), places - places.mean(), slots - slots.mean()
    rest = 4e-6 + overhead + random.normal(0, 15 * NS)
    triad = rest + places[:, None] + streams[None, :]
    both = []
    for _ in range(2):
        order = random.permutation(PLACES)
        seen = slots if follows == "position" else places[order]
        both.append({"order": order.tolist(), "readings": (rest + 350 * NS + streams[0] + seen).tolist()})
    kinds = [f"{kind}, {state}" for kind in reading_noise.KINDS for state in reading_noise.STATES]
    return {
        "error": None,
        "overhead": {kind: (1e-6 + (overhead if "nothing" not in kind else 0) + streams).tolist() for kind in kinds},
        "triad": {"2": triad.tolist()},
        "graphs": {"2": both},
        "together": {"2": {"positions": [5.0e-6] + [5.6e-6] * 7, "alone": 5.0e-6}},
    }


def record(*, follows: str = "position", processes: int = 14) -> dict[str, Any]:
    random = np.random.default_rng(3)
    runs = [run(random, random.normal(0, 60 * NS), follows=follows) for _ in range(processes)]
    device = {"name": "NVIDIA H200", "simulated": False, "driver": "580"}
    return {"device": device, "ended": "2026-11-21T00:00:00", "mib": [2], "placements": PLACES, "rounds": 6, "runs": runs}


def test_subtracting_the_own_launch_overhead_leaves_what_is_not_overhead() -> None:
    (found,) = reading_noise.triads(record())
    by = {one["kind"]: one for one in found["corrected"]}
    assert by["16 bytes, hot"]["left"] < 25 * NS < found["processes"]
    assert by["16 bytes, hot"]["correlation"] > 0.9
    assert by["16 bytes, hot"]["low"] < by["16 bytes, hot"]["correlation"] < by["16 bytes, hot"]["high"]
    assert by["nothing, cold"]["left"] == pytest.approx(found["processes"])


@pytest.mark.parametrize("follows", ["position", "placement"])
def test_a_graphs_readings_follow_the_position_or_the_placement(follows: str) -> None:
    (found,) = reading_noise.graphs(record(follows=follows))
    other = {"position": "placement", "placement": "position"}[follows]
    assert found[f"by_{follows}"] == pytest.approx(1)
    assert abs(found[f"by_{other}"]) < 0.2
    assert found["alone_by_placement"] == pytest.approx(1)
    assert found["above"] == pytest.approx(350 * NS, abs=1e-15)
    assert found["deviation"] == pytest.approx((200 if follows == "position" else 80) * NS, rel=0.15)
    assert found["alone_deviation"] == pytest.approx(80 * NS, rel=0.15)


def test_the_launch_on_a_full_grid_is_the_one_that_a_measurement_takes_its_overhead_from(monkeypatch: pytest.MonkeyPatch) -> None:
    device = choose("sim").open()
    seen: list[tuple[Any, ...]] = []
    launch = device.kernels.launch

    def watched(one: Any, stream: Any) -> None:
        seen.append((one.kernel.name, one.shape, one.call.arrays))
        launch(one, stream)

    monkeypatch.setattr(device.kernels, "launch", watched)
    conductor = Conductor(device, Ranges(), profiled=False)
    conductor.floors()
    conductor.close()
    timed = seen[-1]
    seen.clear()
    job = {"process": 2, "device": "sim", "mib": [1], "placements": 8, "rounds": 1}
    reading_noise.answer(Chosen(device.facts, lambda: device), job)
    assert timed in seen


def test_the_table_gives_nanoseconds() -> None:
    text = reading_noise.table(record())
    assert "+0   +600" in text
    assert text.count("idle grid, hot *") == 2
    assert "triad, 2 MiB" in text
    assert text.startswith("NVIDIA H200, driver 580, 2026-11-21")


def test_the_script_runs_on_the_simulated_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "noise.json"
    options = ["--processes", "4", "--mib", "1", "--placements", "8", "--rounds", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["x", "--device", "sim", *options])
    assert reading_noise.main() == 0
    held = json.loads(file.read_text())
    assert held["kind"] == "reading_noise"
    assert [one["process"] for one in held["runs"]] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.startswith("SIMULATED")
    assert said.rstrip() == reading_noise.table(held)
