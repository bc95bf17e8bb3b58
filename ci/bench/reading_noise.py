"""What a reading between two events contains besides the kernel, and what of it differs between processes.

Fresh processes, one at a time, each with a triad on 32 random placements of its arrays, for arrays of 2 and of 32 MiB:

- Launch overhead: two events with nothing between them, with a launch that writes 16 bytes, and with the same launch on a grid of two
  blocks an SM; hot and after the flush, on eight streams. Then the triads, clean-cold, every placement on every stream, one sample behind
  one hold. How far do processes, streams and placements differ, and how much of the difference between processes goes when a process's
  own launch overhead is subtracted?
- Position in a graph: the same placements captured in two graphs, each in a random order. Do readings follow the placement or the position?
- Several samples behind one hold against one behind one hold.

    python ci/bench/reading_noise.py --json ci/records/nvidia-h200/reading_noise.json

The record is written after every process. Exits with 1 if a worker failed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import asdict
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import one_after_another, runs_within, serve
from held_samples import HeldSamples, Work, awake
from record_file import chosen_device, device_of, write_record
from triad_bench import SCALAR, prepared
from whole_mib import whole_mib

from pytest_gpumem.devices.kinds import MemoryKind
from pytest_gpumem.devices.opening import Chosen
from pytest_gpumem.devices.protocol import Allocation, Device, Launch, Stream
from pytest_gpumem.kernels.stream import VECTOR_BYTES
from pytest_gpumem.measuring import controls
from pytest_gpumem.measuring.bound import BoundKernel, Kernels
from pytest_gpumem.measuring.flush import Flush
from pytest_gpumem.memory.buffers import Arena
from pytest_gpumem.units import MiB

PROCESSES = 14
MIB = (2, 32)
STREAMS = 8
PLACEMENTS = 32
ROUNDS = 6
"""Samples of a triad on each stream and placement."""
OVERHEAD_SAMPLES = 6
"""Samples of each kind of launch overhead on each stream, in each round."""
REPLAYS = 13
"""Of each graph; the first is left out."""
TOGETHER = 8
"""Samples behind one hold."""
UNRELATED_MIB = 512
"""Most MiB of an unrelated allocation, which every other process makes first."""
KINDS = ("nothing", "16 bytes", "idle grid")
"""Between the events: no launch; one that writes 16 bytes; one of a full grid that does nothing."""
WRITTEN_PLACES = 16
"""Places of the 16 bytes, each with readings of its own."""
STATES = ("hot", "cold")
SUBTRACTED = "idle grid, hot"
"""What a measurement gives as its `overhead`, and a comparison takes out."""
CONFIDENCE = 0.95
AHEAD = 3
WORKER_SECONDS = 120.0

Job = dict[str, Any]


class Noise:
    """One process's device, kernels and placements, and the samples that it takes."""

    def __init__(self, device: Device, job: Job) -> None:
        self._device, self._job = device, job
        self._random = np.random.default_rng(job["process"])
        # Kept to the end: memory that is freed would be scrubbed beside the samples.
        self._unrelated = [
            device.memory.allocate(int(self._random.uniform(0.5, UNRELATED_MIB) * MiB), MemoryKind.DEVICE)
            for _ in range(int(self._random.integers(1, 4)) if job["process"] % 2 else 0)
        ]
        self._arena = Arena(device, seed=job["process"])
        self._flush = Flush(device, "clean-cold")
        self._streams = [device.streams.create() for _ in range(STREAMS)]
        self._samples = HeldSamples(device, TOGETHER)
        kernels = Kernels(device)
        written = self._arena.buffer(VECTOR_BYTES, "f4")
        smallest = _launch(kernels.write, written, 1.0)
        self._overheads: dict[str, Work | None] = {
            "nothing": None,
            "16 bytes": self._launching(smallest),
            "idle grid": self._launching(controls.idle_launch(device.facts, written.allocation)),
        }
        places = self._arena.scatter([VECTOR_BYTES] * WRITTEN_PLACES, device.entropy(job["process"]))
        self._written = [self._launching(replace(smallest, arrays={"a": place})) for place in places]
        self._triads = self._placed(kernels.triad)

    def _launching(self, launch: Launch) -> Work:
        return lambda stream: self._device.kernels.launch(launch, stream)

    def _placed(self, triad: BoundKernel) -> dict[int, list[Work]]:
        """The triad on every placement, by MiB of each array; the arrays hold random numbers."""
        device, places = self._device, self._job["placements"]
        sizes = [mib * MiB for mib in self._job["mib"] for _ in range(3 * places)]
        memory = iter(self._arena.scatter(sizes, device.entropy(self._job["process"])))
        found: dict[int, list[Work]] = {}
        for mib in self._job["mib"]:
            arrays = [self._arena.buffer(mib * MiB, "f4") for _ in range(3)]
            model = _launch(triad, *arrays, SCALAR)
            found[mib] = []
            for _ in range(places):
                place: dict[str, Allocation] = {name: next(memory) for name in model.arrays}
                for array, allocation in enumerate(place.values()):
                    device.content.fill_random(allocation, "f4", array, self._arena.stream)
                found[mib].append(self._launching(Launch(model.kernel, model.call, model.shape, place)))
        return found

    def answer(self) -> dict[str, Any]:
        """All readings of this process, in seconds."""
        device, stream = self._device, self._streams[0]
        everything = [work for work in self._overheads.values() if work is not None] + self._written
        everything += [work for works in self._triads.values() for work in works]
        for work in (self._flush, *everything):  # the first launch of a kernel loads it: nothing may be held then
            work(stream)
        device.streams.synchronize()
        awake(device, stream, self._flush)
        for one in self._streams:  # the first samples of a stream are slow
            for _ in range(3):
                self._samples.take(one, self._flush, everything[:1])
        readings = self._blocked()
        written = {"written": self._by_place()}
        return readings | written | {"graphs": self._by_mib(self._graphs), "together": self._by_mib(self._together)}

    def _by_place(self) -> list[float]:
        """Readings of the 16 bytes written at each place, hot, on one stream; the places take turns."""
        readings: list[list[float]] = [[] for _ in self._written]
        for _ in range(self._job["rounds"] * OVERHEAD_SAMPLES):
            for place in self._random.permutation(len(self._written)):
                readings[place] += self._samples.take(self._streams[0], None, [self._written[place]])
        return [middle_mean(taken) for taken in readings]

    def _by_mib(self, what: Callable[[list[Work]], Any]) -> dict[str, Any]:
        return {str(mib): what(works) for mib, works in self._triads.items()}

    def _blocked(self) -> dict[str, Any]:
        """One sample behind one hold: every kind of overhead on every stream, every placement on every stream."""
        job = self._job
        overheads: dict[tuple[str, str, int], list[float]] = {}
        triads: dict[tuple[int, int, int], list[float]] = {}
        for _ in range(job["rounds"]):
            for s in self._random.permutation(STREAMS):
                for mib, works in self._triads.items():
                    for place in self._random.permutation(len(works)):
                        taken = self._samples.take(self._streams[s], self._flush, [works[place]])
                        triads.setdefault((mib, int(place), int(s)), []).extend(taken)
                for state, before in zip(STATES, (None, self._flush), strict=True):
                    for kind, work in self._overheads.items():
                        for _ in range(OVERHEAD_SAMPLES):
                            overheads.setdefault((kind, state, int(s)), []).extend(self._samples.take(self._streams[s], before, [work]))
        return {
            "overhead": {f"{k}, {c}": [middle_mean(overheads[k, c, s]) for s in range(STREAMS)] for k in KINDS for c in STATES},
            "triad": {
                str(mib): [[middle_mean(triads[mib, place, s]) for s in range(STREAMS)] for place in range(len(works))]
                for mib, works in self._triads.items()
            },
        }

    def _graphs(self, works: list[Work]) -> list[dict[str, Any]]:
        """Two graphs of all placements: which placement each position has, and what it read."""
        device, stream, found = self._device, self._streams[0], []
        for _ in range(2):
            order = [int(place) for place in self._random.permutation(len(works))]
            pairs = [(device.streams.event(), device.streams.event()) for _ in order]
            graph = device.graphs.capture(stream, partial(self._queue, [works[place] for place in order], pairs, stream))
            replays: list[list[float]] = []
            for _ in range(REPLAYS):
                device.graphs.replay(graph, stream)
                device.streams.synchronize(stream)
                replays.append([device.streams.elapsed(*pair) for pair in pairs])
            readings = [middle_mean([replay[position] for replay in replays[1:]]) for position in range(len(order))]
            found.append({"order": order, "readings": readings})
        return found

    def _queue(self, works: list[Work], pairs: list[tuple[Any, Any]], stream: Stream) -> None:
        for work, (start, end) in zip(works, pairs, strict=True):
            self._flush(stream)
            self._device.streams.record(start, stream)
            work(stream)
            self._device.streams.record(end, stream)

    def _together(self, works: list[Work]) -> dict[str, Any]:
        """Samples behind one hold by their position, and alone behind one, of the same placements in turn on one stream."""
        stream, together, alone = self._streams[0], [list[float]() for _ in range(TOGETHER)], list[float]()
        for _ in range(self._job["rounds"]):
            order = [works[place] for place in self._random.permutation(len(works))]
            for first in range(0, len(order), TOGETHER):
                for position, seconds in enumerate(self._samples.take(stream, self._flush, order[first : first + TOGETHER])):
                    together[position].append(seconds)
            for work in order:
                alone += self._samples.take(stream, self._flush, [work])
        return {"positions": [middle_mean(taken) for taken in together], "alone": middle_mean(alone)}

    def close(self) -> None:
        """Free everything."""
        self._flush.close()
        self._arena.close()
        for allocation in self._unrelated:
            self._device.memory.free(allocation)
        self._device.close()


def _launch(kernel: BoundKernel, *arguments: Any) -> Launch:
    return kernel.launch(*kernel.arguments(arguments, {}))


def middle_mean(readings: Sequence[float]) -> float:
    """What stands for readings, in seconds, to 0.01 ns."""
    return round(controls.middle_mean(readings), 11)


def answer(chosen: Chosen, job: Job) -> dict[str, Any]:
    """A worker's readings, and the conditions before and after them."""
    device = chosen.open()
    noise = Noise(device, job)
    try:
        before, readings = device.conditions(), noise.answer()
        return readings | {"conditions": [asdict(before), asdict(device.conditions())]}
    finally:
        noise.close()


# Summary: pure functions of a record


def _answered(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [run for run in record["runs"] if run["error"] is None]


def _kinds(record: dict[str, Any]) -> list[str]:
    return list(_answered(record)[0]["overhead"])


def written(record: dict[str, Any]) -> float | None:
    """Standard deviation in seconds, within a process, of readings of 16 bytes written at different places; None if none were taken."""
    readings = [run["written"] for run in _answered(record) if "written" in run]
    return _within(np.array(readings)) if readings else None


def overheads(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each kind of launch overhead: mean in seconds, standard deviation between processes' means over all streams, and between the
    streams of a process (the root of the mean variance)."""
    found = []
    for kind in _kinds(record):
        readings = np.array([run["overhead"][kind] for run in _answered(record)])
        found.append(
            {"kind": kind, "mean": float(readings.mean()), "processes": _deviation(readings.mean(1)), "streams": _within(readings)}
        )
    return found


def triads(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each size: mean in seconds, and standard deviations between processes, streams and placements.

    `processes` is that of the means over all streams and placements, with its chi-square interval; `by_streams` the same for the first 1,
    2, 4 and 8 streams; `streams` and `placements` are those within a process, of the means over everything else. `corrected` says for each
    kind of launch overhead how it correlates between processes with the triad, with Fisher's interval, and what deviation is left once
    each process's own overhead is subtracted.
    """
    found = []
    for mib in record["mib"]:
        readings = np.array([run["triad"][str(mib)] for run in _answered(record)])
        means = readings.mean((1, 2))
        deviation = _deviation(means)
        low, high = (
            deviation * math.sqrt((len(means) - 1) / stats.chi2.ppf(p, len(means) - 1))
            for p in ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)
        )
        corrected = []
        for kind in _kinds(record):
            own = np.array([run["overhead"][kind] for run in _answered(record)]).mean(1)
            corrected.append({"kind": kind, **correlation(means, own), "left": _deviation(means - own)})
        found.append(
            {
                "mib": mib,
                "mean": float(means.mean()),
                "processes": deviation,
                "interval": [low, high],
                "by_streams": {str(n): _deviation(readings[:, :, :n].mean((1, 2))) for n in (1, 2, 4, 8)},
                "streams": _within(readings.mean(1)),
                "placements": _within(readings.mean(2)),
                "corrected": corrected,
            }
        )
    return found


def graphs(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each size what readings in a graph follow; means over processes, None where nothing varies.

    `by_placement` and `by_position` are the correlations of the readings of the two graphs, `alone_by_placement` that of blocked readings
    on one half of the streams with those on the other half. `deviation` and `alone_deviation` are the standard deviations of a graph's
    readings and of the placements' blocked ones on the same stream, `above` what a graph's readings lie above those, in seconds.
    """
    found = []
    for mib in record["mib"]:
        each: dict[str, list[float | None]] = {}
        for run in _answered(record):
            blocked, both = np.array(run["triad"][str(mib)]), run["graphs"][str(mib)]
            positions = [np.array(graph["readings"]) for graph in both]
            places = [_placed(graph) for graph in both]
            one = {
                "by_placement": correlation(*places)["correlation"],
                "by_position": correlation(*positions)["correlation"],
                "alone_by_placement": correlation(blocked[:, ::2].mean(1), blocked[:, 1::2].mean(1))["correlation"],
                "deviation": float(np.mean([_deviation(readings) for readings in positions])),
                "alone_deviation": _deviation(blocked[:, 0]),
                "above": float(np.mean(positions) - blocked[:, 0].mean()),
            }
            for name, value in one.items():
                each.setdefault(name, []).append(value)
        found.append({"mib": mib} | {name: _mean(values) for name, values in each.items()})
    return found


def _placed(graph: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A graph's readings by placement instead of by position."""
    readings = np.empty(len(graph["order"]))
    readings[graph["order"]] = graph["readings"]
    return readings


def together(record: dict[str, Any]) -> list[dict[str, Any]]:
    """For each size: what samples behind one hold lie above one alone behind one, in seconds: by position, and the mean over all but the
    first position; means over processes."""
    found = []
    for mib in record["mib"]:
        runs = [run["together"][str(mib)] for run in _answered(record)]
        above = np.array([np.array(run["positions"]) - run["alone"] for run in runs]).mean(0)
        found.append({"mib": mib, "positions": [float(x) for x in above], "above": float(above[1:].mean())})
    return found


def correlation(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> dict[str, float | None]:
    """Pearson's correlation with Fisher's 95 % interval; None where one of the two does not vary."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return {"correlation": None, "low": None, "high": None}
    r = float(np.clip(np.corrcoef(first, second)[0, 1], -1, 1))
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) / math.sqrt(len(first) - 3)
    bounded = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r)))
    return {"correlation": r, "low": math.tanh(bounded - reach), "high": math.tanh(bounded + reach)}


def _deviation(values: np.ndarray[Any, Any]) -> float:
    return float(values.std(ddof=1))


def _within(readings: np.ndarray[Any, Any]) -> float:
    """Root of the mean over processes of the variance within one."""
    return float(math.sqrt(readings.var(axis=1, ddof=1).mean()))


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def table(record: dict[str, Any]) -> str:
    """The record as text; times in nanoseconds."""
    device = record["device"]
    simulated = "SIMULATED " if device["simulated"] else ""
    said = [f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}", ""]
    count = len(_answered(record))
    if count < 4:
        return "\n".join([*said, f"{count} processes answered: at least 4 are needed"])
    said += [
        f"{count} processes, {STREAMS} streams, {record['placements']} placements; ns, standard deviations between ...",
        "",
        f"{'':<28}{'mean':>9}{'processes':>11}{'streams':>9}{'placements':>12}",
    ]
    for one in overheads(record):
        said.append(f"{_marked(one['kind']):<28}{_ns(one['mean']):>9}{_ns(one['processes']):>11}{_ns(one['streams']):>9}")
    if (by_place := written(record)) is not None:
        said.append(f"{'16 bytes, by where they lie':<57}{_ns(by_place):>12}")
    for one in triads(record):
        figures = f"{_ns(one['mean']):>9}{_ns(one['processes']):>11}{_ns(one['streams']):>9}{_ns(one['placements']):>12}"
        said.append(f"{'triad, ' + str(one['mib']) + ' MiB':<28}{figures}")
    for one in triads(record):
        low, high = one["interval"]
        streams = ", ".join(f"{n}: {_ns(deviation)}" for n, deviation in one["by_streams"].items())
        said += [
            "",
            f"triad, {one['mib']} MiB: {_ns(one['processes'])} ns between processes ({_ns(low)} to {_ns(high)}); first streams {streams}",
            f"  {'launch overhead subtracted':<28}{'correlation':<24}{'sd left':>8}",
        ]
        for by in one["corrected"]:
            correlated = "-" if by["correlation"] is None else f"{by['correlation']:.2f} ({by['low']:.2f} to {by['high']:.2f})"
            said.append(f"  {_marked(by['kind']):<28}{correlated:<24}{_ns(by['left']):>8}")
    said += ["", "* what comparisons take out"]
    said += ["", f"{'':<10}{'correlation of two graphs':>27}{'of halves alone':>18}{'sd, ns':>16}{'graph - alone, ns':>20}"]
    said.append(f"{'':<10}{'by placement':>14}{'by position':>13}{'by placement':>18}{'graph':>9}{'alone':>7}")
    for one in graphs(record):
        names = ("by_placement", "by_position", "alone_by_placement")
        shares = ["-" if one[name] is None else f"{one[name]:.2f}" for name in names]
        deviations = f"{_ns(one['deviation']):>9}{_ns(one['alone_deviation']):>7}"
        said.append(
            f"{str(one['mib']) + ' MiB':<10}{shares[0]:>14}{shares[1]:>13}{shares[2]:>18}{deviations}{_ns(one['above'], sign=True):>20}"
        )
    said += ["", f"{TOGETHER} samples behind one hold, each less one alone behind one, ns by position"]
    for one in together(record):
        positions = " ".join(f"{_ns(x, sign=True):>6}" for x in one["positions"])
        said.append(f"{str(one['mib']) + ' MiB':<14}{positions}; {_ns(one['above'], sign=True)} from the second on")
    return "\n".join(said)


def _marked(kind: str) -> str:
    return f"{kind} *" if kind == SUBTRACTED else kind


def _ns(seconds: float, *, sign: bool = False) -> str:
    return f"{seconds * 1e9:{'+' if sign else ''}.0f}"


def jobs(asked: argparse.Namespace) -> Iterator[Job]:
    """One for each process."""
    for number in range(1, asked.processes + 1):
        shared = {"mib": list(asked.mib), "placements": asked.placements, "rounds": asked.rounds}
        yield {"process": number, "device": asked.device, **shared}


def main() -> int:
    assert __doc__ is not None
    if sys.argv[1:2] == ["worker"]:
        job = json.loads(sys.argv[2])
        serve(lambda: prepared(job["device"]), lambda chosen: answer(chosen, job))
        return 1  # it was never let go
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES, help=f"fresh processes, at least 4 (default {PROCESSES})")
    parser.add_argument("--mib", type=whole_mib, default=MIB, help="MiB of each array (default 2,32)")
    parser.add_argument("--placements", type=int, default=PLACEMENTS, help=f"at least 8 (default {PLACEMENTS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"samples on each stream and placement (default {ROUNDS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim (default cuda)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no process that would end after this long")
    asked = parser.parse_args()
    for name, least in (("processes", 4), ("placements", TOGETHER), ("rounds", 1)):
        if getattr(asked, name) < least:
            parser.error(f"--{name} {getattr(asked, name)}: at least {least}")
    facts = chosen_device(parser, asked.device).facts
    record: dict[str, Any] = {
        "kind": "reading_noise",
        "device": device_of(facts),
        "mib": list(asked.mib),
        "placements": asked.placements,
        "rounds": asked.rounds,
        "runs": [],
    }
    workers = one_after_another(
        jobs(asked),
        lambda job: [sys.executable, str(Path(__file__).resolve()), "worker", json.dumps(job)],
        ahead=AHEAD,
        timeout=WORKER_SECONDS,
    )
    for run in runs_within(asked.processes, asked.seconds, workers):
        record["runs"].append(run)
        record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        if asked.json:
            write_record(asked.json, record)
    if not record["runs"]:
        parser.error(f"--seconds {asked.seconds:g}: no process was run")
    print(table(record))
    return 1 if any(run["error"] is not None for run in record["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
