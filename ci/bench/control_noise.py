"""How far readings of the L2 control agree, and why.

In fresh processes, one after another, L2 is read as `measuring.controls` does, over several sets of arrays. Each set is allocated anew in
every round, behind unrelated allocations of random size, and read four ways:

    fresh    one reading, as the product takes it
    again    a second one at once: it has the same arrays, and the same SMs have the blocks that are left over
    awake    a third one after a thousand flushes: other SMs may have them
    each     every array by itself: the median and the lower quartile over the arrays, and how far the arrays differ

On an H100, arrays whose blocks are no whole number an SM read one of three values up to 7 % apart, each for as long as no other kernel ran
between; the arrays themselves differed by 0.2 %. The product's own readings, which it prints first, let a read of DRAM come between.

    python ci/bench/control_noise.py --json ci/records/nvidia-h200/control_noise.json

The record is written after every process. Exits with 1 if a worker failed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import one_after_another, runs_within, serve
from held_samples import awake
from record_file import chosen_device, device_of, head, write_record
from triad_bench import prepared

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.opening import Chosen
from pytest_gpumem.devices.protocol import Device, Launch, Stream
from pytest_gpumem.kernels.controls import whole_waves
from pytest_gpumem.measuring import controls
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.units import MiB

PROCESSES, ROUNDS = 3, 6
UNRELATED = 64 * MiB
"""Most bytes of an unrelated allocation, made before the arrays."""
SETS = {
    "shipped": (controls.L2_PART, controls.L2_ARRAYS, controls.L2_PASSES, True),
    "uneven": (8, 32, 16, False),
    "uneven, half the size": (16, 64, 16, False),
    "uneven, twice the size": (4, 16, 16, False),
    "even, twice the size": (4, 16, 16, True),
    "even, four times the passes": (controls.L2_PART, controls.L2_ARRAYS, 64, True),
}
"""L2 over the size of one array, the arrays, the passes of a launch, and whether every SM reads as much."""
FLUSHES = 1000
WAYS = ("fresh", "again", "awake", "median of each", "lower quartile of each")
AHEAD = 2
WORKER_SECONDS = 200.0


class Readings:
    """One process's device, and the readings that it takes."""

    def __init__(self, device: Device, seed: int) -> None:
        self._device, self._random = device, np.random.default_rng(seed)
        self._stream = device.streams.create()
        self._flush = Flush(device, "clean-cold")

    def answer(self, rounds: int) -> dict[str, Any]:
        """Every way of every set, by set: one entry a round. And the product's own readings, with the clock after each."""
        self._flush(self._stream)
        self._device.streams.synchronize()
        awake(self._device, self._stream, self._flush)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in SETS}
        product = []
        for _ in range(rounds):
            read = controls.read_controls(self._device, latency=False)
            product.append({"l2": read.l2, "dram": read.dram, "sm_clock_hz": self._device.conditions().sm_clock_hz})
            for name in self._random.permutation(list(SETS)):
                found[str(name)].append(self._one(*SETS[str(name)]))
        return {"product": product, "sets": found}

    def _one(self, part: int, arrays: int, passes: int, even: bool) -> dict[str, Any]:
        device, stream, facts = self._device, self._stream, self._device.facts
        arena = Arena(device, seed=0)
        try:
            arena.allocate(int(self._random.integers(1, UNRELATED)), MemoryKind.DEVICE)
            nbytes = whole_waves(facts, facts.l2_bytes // part) if even else facts.l2_bytes // part
            launches = [controls._launch(device, arena, nbytes, passes) for _ in range(arrays)]
            for launch in launches:
                device.kernels.launch(launch, stream)
            device.streams.synchronize()
            device.memory.settle()
            found: dict[str, Any] = {way: self._read(launches, stream) for way in ("fresh", "again")}
            for _ in range(FLUSHES):
                self._flush(stream)
            device.streams.synchronize()
            found["awake"] = self._read(launches, stream)
            each = [controls.middle_mean(controls.readings(device, [stream], [launch], 9)) for launch in launches]
            return found | {"each": each}
        finally:
            arena.close()

    def _read(self, launches: Sequence[Launch], stream: Stream) -> float:
        return controls._reading(self._device, stream, launches)


def summary(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each set: standard deviations of logarithms, of each way within processes, against "fresh" on the same arrays, over arrays."""
    found = []
    for name in runs[0]["sets"]:
        rounds = [_with_each(run["sets"][name]) for run in runs]
        every = [one for own in rounds for one in own]
        found.append(
            {
                "set": name,
                "seconds": statistics.fmean(one["fresh"] for one in every),
                "within": {way: _within([[math.log(one[way]) for one in own] for own in rounds]) for way in WAYS},
                "same arrays": {way: statistics.stdev(math.log(one[way] / one["fresh"]) for one in every) for way in ("again", "awake")},
                "moved": {way: statistics.fmean(math.log(one[way] / one["fresh"]) for one in every) for way in ("again", "awake")},
                "over arrays": statistics.fmean(statistics.stdev(math.log(x) for x in one["each"]) for one in every),
            }
        )
    return found


def _with_each(rounds: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        one | {"median of each": statistics.median(one["each"]), "lower quartile of each": float(np.quantile(one["each"], 0.25))}
        for one in rounds
    ]


def _within(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation around each group's own mean."""
    squares = sum((x - statistics.fmean(group)) ** 2 for group in groups for x in group)
    return math.sqrt(squares / sum(len(group) - 1 for group in groups))


def table(record: dict[str, Any]) -> str:
    """The summary as text; figures in per cent."""
    runs = [run for run in record["runs"] if run["error"] is None]
    lines = [head(record), ""]
    for kind in ("dram", "l2"):
        logs = [[math.log(one[kind]) for one in run["product"]] for run in runs]
        consecutive = [abs(b - a) for own in logs for a, b in pairwise(own)]
        lines.append(f"product, {kind}: sd {_within(logs):.3%}, median of |consecutive| {statistics.median(consecutive):.3%}")
    clocks = sorted({one["sm_clock_hz"] for run in runs for one in run["product"]}, key=str)
    lines += [f"clocks after a reading: {clocks}", ""]
    lines.append(
        f"{'sd in per cent':<24}{'us':>7}" + "".join(f"{way:>24}" for way in (*WAYS, "again - fresh", "awake - fresh", "over arrays"))
    )
    for one in summary(runs):
        figures = [*one["within"].values(), *one["same arrays"].values(), one["over arrays"]]
        lines.append(f"{one['set']:<24}{1e6 * one['seconds']:>7.2f}" + "".join(f"{100 * x:>24.3f}" for x in figures))
        lines.append(f"{'  moved':<31}" + "".join(f"{100 * x:>+24.3f}" for x in one["moved"].values()))
    return "\n".join(lines)


def answer(chosen: Chosen, job: dict[str, Any]) -> dict[str, Any]:
    device = chosen.open()
    with device.current():
        return Readings(device, job["process"]).answer(job["rounds"])


def main() -> int:
    assert __doc__ is not None
    if sys.argv[1:2] == ["worker"]:
        job = json.loads(sys.argv[2])
        serve(lambda: prepared(job["device"]), lambda chosen: answer(chosen, job))
        return 1  # it was never let go
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"fresh processes (default {PROCESSES})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of every set, at least 2 (default {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim (default cuda)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no process that would end after this long")
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error(f"--rounds {asked.rounds}: at least 2")
    facts = chosen_device(parser, asked.device).facts
    record: dict[str, Any] = {
        "kind": "control_noise",
        "device": device_of(facts),
        "sets": SETS,
        "runs": [],
    }
    jobs = ({"process": number, "device": asked.device, "rounds": asked.rounds} for number in range(1, asked.processes + 1))
    workers = one_after_another(
        jobs, lambda job: [sys.executable, str(Path(__file__).resolve()), "worker", json.dumps(job)], ahead=AHEAD, timeout=WORKER_SECONDS
    )
    for run in runs_within(asked.processes, asked.seconds, workers):
        record["runs"].append(run)
        record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if asked.json:
            write_record(asked.json, record)
    if all(run["error"] is not None for run in record["runs"]):
        return 1
    print(table(record))
    return 1 if any(run["error"] is not None for run in record["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
