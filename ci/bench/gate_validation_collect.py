"""The raw data of the gate's validation: fresh processes, one after another on each card, each with a measurement of every row.

Seconds are kept in whole tenths of a nanosecond. A row is `{"m": [...], "s": [...]}`: the median of each placement, and of all its samples
count, standard deviation, mean, least, lower quartile, median, upper quartile, as pytest-benchmark gives them. After the first median, all
but count and standard deviation are what they are above it, which is shorter.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fresh_processes import one_after_another
from gate_simulation import CONTROL, CONTROL_SPREAD, LARGE, MIDDLE, OVERHEAD, OVERHEAD_SPREAD, SMALL
from gate_validation_rows import ARRAYS, ROWS, SLOW_MODE, Row, work_of
from record_file import taken_at

UNIT = 1e-10
"""Seconds of what is kept as a whole number."""
STATS = ("rounds", "stddev", "mean", "min", "q1", "median", "q3")
WORKER_SECONDS = 180.0
AHEAD = 3
"""Processes that get ready while one measures."""

Process = dict[str, Any]
Card = dict[str, Any]


@dataclass(frozen=True)
class Stop:
    """When to measure no more."""

    seconds: float
    """Since the beginning, for all."""
    processes: int
    """At most, on each card."""
    begun: float
    """`time.monotonic()` at the beginning."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Somebody wants it to end."""

    def now(self, done: int, each: float) -> bool:
        """Whether another process that took `each` seconds would end too late, or there are enough."""
        return (
            self.asked.is_set()
            or done >= self.processes
            or time.monotonic() - self.begun + each > self.seconds
        )


def units(seconds: float) -> int:
    """Whole tenths of a nanosecond."""
    return round(seconds / UNIT)


def packed(medians: list[float]) -> list[int]:
    """Seconds, the first and what the others are above it."""
    whole = [units(seconds) for seconds in medians]
    return [whole[0], *(one - whole[0] for one in whole[1:])]


def unpacked(values: list[int]) -> tuple[float, ...]:
    """Seconds, of what `packed` gave."""
    return tuple((one + (values[0] if index else 0)) * UNIT for index, one in enumerate(values))


def packed_stats(stats: Mapping[str, float], first: int) -> list[int]:
    """Seconds of what `STATS` names, beside a row whose first median is `first`."""
    return [
        int(stats["rounds"]),
        units(stats["stddev"]),
        *(units(stats[one]) - first for one in STATS[2:]),
    ]


def unpacked_stats(row: Mapping[str, list[int]]) -> dict[str, float]:
    """By name, of a row as the record keeps it; in tenths of a nanosecond."""
    return {
        name: value + (row["m"][0] if index > 1 else 0)
        for index, (name, value) in enumerate(zip(STATS, row["s"], strict=True))
    }


def job(number: int, seed: int, rows: Sequence[Row]) -> dict[str, Any]:
    """What a process measures: all rows in a drawn order, and which of them are in their slower mode."""
    random = np.random.default_rng([seed, number])
    order = [rows[index].name for index in random.permutation(len(rows))]
    slow = [row.name for row in rows if row.bimodal and random.random() < SLOW_MODE]
    return {"number": number, "rows": order, "slow": slow}


# On a device


def measured(
    device: str,
    folder: Path,
    seed: int,
    stop: Stop,
    tell: Callable[[str], object],
    rows: Sequence[Row],
    slopes: Mapping[str, float],
) -> Card:
    """Run processes on one card until it is time to stop.

    Args:
        device: as `--gpumem-device`.
        folder: an empty one for what the processes write.
        seed: of the rows' order and of modes.
        stop: when.
        tell: takes a line for what went wrong.
        rows: what every process measures.
        slopes: by row, how latency grows with work.
    """
    (folder / "pytest.ini").write_text("[pytest]\n")

    def jobs() -> Iterator[dict[str, Any]]:
        for number in range(stop.processes):
            yield job(number, seed, rows) | {
                "device": device,
                "results": str(folder / f"{number}.json"),
                "slopes": slopes,
            }

    def command(one: dict[str, Any]) -> list[str]:
        return [
            sys.executable,
            str(Path(__file__).with_name("gate_validation_worker.py")),
            json.dumps(one),
        ]

    card: Card = {"taken_at": taken_at(), "slopes": slopes, "failed": [], "processes": []}
    reading: list[Future[tuple[Process, dict[str, Any]]]] = []
    longest, done = 0.0, 0
    with (
        ThreadPoolExecutor(1) as pool,
        closing(
            one_after_another(jobs(), command, ahead=AHEAD, timeout=WORKER_SECONDS)
        ) as outcomes,
    ):
        for outcome in outcomes:
            done += 1
            number = outcome.job["number"]
            if (
                outcome.answer is None
                or outcome.answer["exit"] not in (0, 1)
                or not Path(outcome.job["results"]).exists()
            ):
                why = outcome.error or f"pytest ended with {outcome.answer}"
                card["failed"].append({"number": number, "error": why[-500:]})
                tell(f"{device}: process {number} failed: {why}")
                if len(card["failed"]) > 5 and len(card["failed"]) > done // 4:
                    break
                continue
            about = outcome.answer | {
                "number": number,
                "seconds": round(outcome.seconds, 2),
                "slow": outcome.job["slow"],
            }
            # Read while the next process measures.
            reading.append(pool.submit(_read, Path(outcome.job["results"]), about))
            longest = max(longest, outcome.seconds)
            if done % 10 == 0:
                tell(
                    f"{device}: {done} processes, {time.monotonic() - stop.begun:.0f} s; the last took {outcome.seconds:.2f} s"
                )
            if stop.now(done, longest):
                break
        for one in reading:
            process, about_card = one.result()
            card["processes"].append(process)
            card.setdefault("device", about_card["device"])
            card.setdefault("rows", about_card["rows"])
    return card


def _parameters(nodeid: str) -> str:
    return nodeid.partition("[")[2].removesuffix("]")


def _read(path: Path, about: dict[str, Any]) -> tuple[Process, dict[str, Any]]:
    process, card = reduced(json.loads(path.read_text()), about)
    path.unlink()
    if not any(path.with_suffix("").rglob("*.json")):
        # `--gpumem-save` stores nothing where the controls have changed from the start to the end: such rows are no verdict's.
        process |= {
            "rows": {},
            "spoilt": dict.fromkeys(
                process["rows"], "the session stored nothing: the device changed meanwhile"
            ),
        }
    return process, card


def reduced(results: dict[str, Any], about: dict[str, Any]) -> tuple[Process, dict[str, Any]]:
    """A process's `--benchmark-json` as the record keeps it; and the device, and what each row is, which all processes share."""
    document = results["gpumem"]
    stats = {_parameters(one["fullname"]): one["stats"] for one in results["benchmarks"]}
    process: Process = {**about, "rows": {}, "spoilt": {}}
    kinds = {}
    for row in document["rows"]:
        name, seen = _parameters(row["nodeid"]), row["measurement"]
        if (
            seen is None
            or row["failed"]
            or row["verdict"]["code"] == "conditions"
            or name not in stats
        ):
            process["spoilt"][name] = row["verdict"]["reason"][:300]
            continue
        kept: dict[str, Any] = {
            "m": packed([float(np.median(placement)) for placement in seen["placements"]])
        }
        kept["s"] = packed_stats(stats[name], kept["m"][0])
        if seen["overhead"] is None:
            kept["sampler"] = seen["sampler"]
        states = (one for one in (*seen["conditions"], seen["during"]) if one is not None)
        mhz = [round(one["sm_clock_hz"] / 1e6) for one in states if one["sm_clock_hz"]]
        process.setdefault("mhz", mhz[0] if mhz else None)
        if set(mhz) - {process["mhz"]}:
            kept["mhz"] = mhz
        process["rows"][name] = kept
        kinds[name] = {
            "target": seen["target"],
            "mode": seen["mode"],
            "bytes": seen["moved_bytes"]["reads"] + seen["moved_bytes"]["writes"],
            "footprint": seen["footprint"],
        }
        if seen["overhead"] is not None:
            process["overhead"] = units(seen["overhead"])
        process["floor"] = units(seen["floor"])
        if (controls := (seen["taken"] or {}).get("controls")) is not None:
            process["controls"] = [
                controls["dram"] and units(controls["dram"]),
                controls["l2"] and units(controls["l2"]),
            ]
            process["controls"] += [
                controls["launch"] and units(controls["launch"]),
                controls["source"],
            ]
            process["controls"] += [controls["latency"] and units(controls["latency"])]
    return process, {"device": document["device"], "rows": kinds}


# Simulated


SPREADS = {"256 MiB": LARGE, "32 MiB": MIDDLE, "2 MiB": SMALL, "chase": LARGE, "bimodal": LARGE}
"""By group of rows, the kernel of the gate's simulation with its spreads."""
RATE = 4.3e12
"""Bytes a second of a simulated launch."""
HOP = 0.6e-6
"""Seconds of a step of the simulated chase."""
PLACEMENTS, SAMPLES = 16, 96


def latency(kernel: str, work: int) -> float:
    """Seconds of a simulated launch, its overhead included."""
    return OVERHEAD + (
        work * HOP if kernel == "chase" else ARRAYS.get(kernel.partition(":")[0], 2) * work / RATE
    )


def simulated(
    device: dict[str, Any],
    seed: int,
    processes: int,
    rows: Sequence[Row] = ROWS,
    *,
    worse: float = 0.0,
) -> Card:
    """A card's processes, drawn at random; no device takes part.

    Args:
        device: facts of the device that it stands for, as JSON.
        seed: everything follows from it.
        processes: how many.
        rows: those that every process measures.
        worse: by what share every head row is slower than it should be, to see that it shows.
    """
    random = np.random.default_rng([seed, 7])
    slopes = {row.name: 1 - OVERHEAD / latency(row.kernel, row.work) for row in rows}
    card: Card = {"device": device, "slopes": slopes, "rows": {}, "failed": [], "processes": []}
    for number in range(processes):
        about = job(number, seed, rows)
        overhead = OVERHEAD + OVERHEAD_SPREAD * float(random.normal())
        minute, second = divmod(3 * number, 60)
        process: Process = {
            "pid": 1000 + number,
            "utc": f"2026-11-21T00:{minute:02}:{second:02}.000+00:00",
            "exit": 0,
            "number": number,
            "seconds": 3.0,
            "slow": about["slow"],
            "rows": {},
            "spoilt": {},
            "overhead": units(overhead),
            "floor": units(1.3e-6),
        }
        control = CONTROL * math.exp(CONTROL_SPREAD * float(random.normal()))
        process["controls"] = [units(control), units(control), units(overhead), "model"]
        for row in rows:
            process["rows"][row.name] = _drawn(
                row, card["slopes"], row.name in about["slow"], overhead, random, worse
            )
        card["processes"].append(process)
    for row in rows:
        work = work_of(row, card["slopes"])
        nbytes = (
            4 * work
            if row.kernel == "chase"
            else ARRAYS.get(row.kernel.partition(":")[0], 2) * work
        )
        card["rows"][row.name] = {
            "target": row.kernel,
            "mode": "clean-cold",
            "bytes": nbytes,
            "footprint": nbytes,
        }
    return card


def _drawn(
    row: Row,
    slopes: dict[str, float],
    slow: bool,
    overhead: float,
    random: np.random.Generator,
    worse: float,
) -> dict[str, Any]:
    spread = SPREADS[row.size]
    seconds = latency(row.kernel, work_of(row, slopes, slow=slow)) * (1 + worse * row.changed)
    own = seconds * math.exp(spread.process * float(random.normal())) + overhead - OVERHEAD
    medians = own + seconds * spread.placement * random.normal(0, 1, PLACEMENTS)
    samples = np.repeat(medians, SAMPLES // PLACEMENTS) + seconds * 0.003 * np.abs(
        random.normal(0, 1, SAMPLES)
    )
    found = (
        SAMPLES,
        samples.std(ddof=1),
        samples.mean(),
        samples.min(),
        *np.quantile(samples, (0.25, 0.5, 0.75)),
    )
    kept = packed([float(one) for one in medians])
    return {
        "m": kept,
        "s": packed_stats(
            {name: float(one) for name, one in zip(STATS, found, strict=True)}, kept[0]
        ),
    }
