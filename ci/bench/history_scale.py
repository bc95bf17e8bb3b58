"""A generated history of many tests and runs with planted changes: what `gpumem history` finds, how long it takes, and how much memory.

    python ci/bench/history_scale.py [--tests 10000] [--runs 1000] [--out ci/records/no-gpu/history.json]

One run a night. The scatter of a time depends on the time as on an H200 (`judging.spread`): of runs and of their placements, and what all
tests of a run deviate by together, which lasts for days. One value of 500 is 2 to 3 % slow. Tests come, go, and miss runs; the card is
swapped for another variant of it in the middle. 40 changes of 1 to 20 % are planted in times, and one in every 250 tests changes a count.
The figures go through `history.columns` into the cache file of a store whose files were read before; reading a file, once for each
machine, is timed apart. Each query, with its page, is a fresh process; the seconds are those of its one thread on a processor, because
other programs of the machine count in the wall time, which is recorded beside them. Exits with 1 if a change is not found within three
runs, if there is more than one false change in a test and year, if a query or a page takes longer than 5 s, or both together more than
1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
from record_file import write_record

from pytest_gpumem.baselines.storage import Storage
from pytest_gpumem.baselines.store import record
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.history.columns import Column, Columns, Values, cache_file
from pytest_gpumem.history.data import History
from pytest_gpumem.history.page import page
from pytest_gpumem.history.query import history
from pytest_gpumem.judging.spread import placement_spread, process_spread, session_spread
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint
from pytest_gpumem.records.measurement import Conditions, Controls, Limits, Measurement, Provenance, Traffic
from pytest_gpumem.records.row import Row, Verdict

PLANTED, LEAST, MOST = 40, 0.01, 0.2
WITHIN = 3  # runs by which a date may be wrong
NEAR_THE_END = 10  # least runs on each side of a planted change
PLACEMENTS = 8
SECONDS, BYTES = 5.0, 2**30
BEGIN = datetime(2024, 1, 1, 2, 0, tzinfo=timezone.utc)
FACTS = choose("sim").facts
Planted = dict[str, Any]


def scatter(latency: float) -> float:
    """Of the time of one test between runs, as a share, without what all tests have in common."""
    return float(np.hypot(process_spread(latency), placement_spread(latency) / np.sqrt(PLACEMENTS)))


def generated(tests: int, runs: int, random: np.random.Generator) -> tuple[Columns, list[Planted], list[str]]:
    """The columns of a store, the changes of times in them, and the tests with a change of a count."""
    latency = np.exp(random.uniform(np.log(5e-6), np.log(1e-2), tests))
    own = np.array([scatter(one) for one in latency])
    together = np.zeros(runs)
    for run in range(runs):
        together[run] = 0.7 * together[run - 1] * (run > 0) + random.normal(0, session_spread(5.4e-6))
    swapped = runs // 2  # from then on the cards take turns
    other = np.array([run >= swapped and run % 2 == 0 for run in range(runs)])
    present = random.random((tests, runs)) > 0.005
    for test in range(0, tests, 20):
        present[test, : random.integers(runs // 2)] = False
    for test in range(7, tests, 20):
        present[test, random.integers(runs // 2, runs) :] = False
    values = np.empty((tests, runs))
    for test in range(tests):
        logs = np.log(latency[test]) + together + own[test] * random.standard_normal(runs) + other * random.normal(0.01, 0.01)
        values[test] = logs + (random.random(runs) < 0.002) * random.uniform(0.02, 0.03, runs)
    planted: list[Planted] = []
    for number, test in enumerate(random.choice(tests, PLANTED, replace=False)):
        there = np.flatnonzero(present[test] & ~other)
        run = int(there[random.integers(NEAR_THE_END, len(there) - NEAR_THE_END)])
        share = float(np.exp(random.uniform(np.log(LEAST), np.log(MOST)))) * (-1 if number % 4 == 3 else 1)
        values[test, run:] += np.log1p(share)
        planted.append({"test": name_of(int(test)), "run": run, "share": share, "scatter": float(own[test])})
    np.exp(values, out=values)
    values[~present] = np.nan
    found = Columns()
    for run in range(runs):
        when = (BEGIN + timedelta(days=run)).isoformat(timespec="seconds")
        card, dram = ("GPU-b", 6.4e-7) if other[run] else ("GPU-a", 6.0e-7)
        name = file_name(run)
        found.columns.append(Column(name, f"{run:016x}", when, f"{run:040x}", FACTS.name, True, card, "controls", dram))
        found.files.append(name)
    found.rows = [(name_of(test), how) for test in range(tests) for how in ("clean-cold, blocked", "")]
    bits, none = np.packbits(present, axis=1), np.empty(0, np.int32)
    every = np.arange(tests, dtype=np.int32)
    found.values["latency"] = Values(2 * every, bits, np.zeros(tests), every, values)
    for metric, value in (("traffic", 2.0**28), ("peak", 2.0**29), ("kept", 0.0), ("allocations", 3.0), ("copies", 0.0)):
        found.values[metric] = Values(2 * every + 1, bits, np.full(tests, value), none, np.empty((0, runs)))
    more, later = every[::250], np.arange(runs) >= runs // 3
    dense = np.where(present[more], 1.0 + later, np.nan)
    found.values["kernels"] = Values(2 * every + 1, bits, np.ones(tests), more, dense)
    # Before the card is swapped, so on one variant alone.
    counted = [
        name_of(int(test)) for test in more if min((present[test, :swapped] & side[:swapped]).sum() for side in (later, ~later)) >= 2
    ]
    return found, planted, counted


def name_of(test: int) -> str:
    return f"tests/test_{test // 100:03d}.py::test_kernel[{test % 100}]"


def file_name(run: int) -> str:
    return f"{BEGIN + timedelta(days=run):%Y%m%dT%H%M%SZ}-{run:012x}-{run:016x}.json"


def queried(place: Path, out: Path) -> None:
    """One query and its page, in a process of its own."""
    begin, cpu = time.perf_counter(), time.process_time()
    found = history(place)
    done = time.perf_counter()
    record = {"query_seconds": done - begin, "query_cpu_seconds": time.process_time() - cpu, "query_peak_bytes": peak()}
    cpu = time.process_time()
    text = page(found, BEGIN)
    record |= {"page_seconds": time.perf_counter() - done, "page_cpu_seconds": time.process_time() - cpu, "page_peak_bytes": peak()}
    out.write_text(json.dumps({**record, "page_bytes": len(text), "changes": _changes(found)}))


def peak() -> int:
    """Most bytes of memory that this process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _changes(found: History) -> list[dict[str, Any]]:
    changes = []
    for change in found.changes:
        one = found.series[change.series]
        runs = [int(one.runs[at]) for at in (change.at, change.earliest, change.latest)]
        changes.append({"test": one.test, "metric": one.metric, "variant": one.variant, "runs": runs, "relative": change.relative})
    return changes


def measured(tests: int, runs: int, seed: int) -> dict[str, Any]:
    """The changes that a query of one history finds, and its cost."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        place = Storage(Path(folder) / "store").recorded()
        columns, planted, counted = generated(tests, runs, np.random.default_rng(seed))
        place.at(FACTS.key).mkdir(parents=True)
        for name in columns.files:
            (place.at(FACTS.key) / name).touch()
        cache = cache_file(place, FACTS.key)
        cache.parent.mkdir(parents=True)
        cache.write_bytes(columns.to_bytes())
        size, values = cache.stat().st_size, int(sum(one.mask(runs).sum() for one in columns.values.values()))
        del columns
        out = Path(folder) / "out.json"
        command = [sys.executable, __file__, "--query", str(place.folder), str(out)]
        every = []
        for _ in range(3):
            subprocess.run(command, check=True)
            every.append({**json.loads(out.read_text()), "load": os.getloadavg()[0]})
    best = every[0]
    of_time: dict[str, list[dict[str, Any]]] = {}
    for change in best["changes"]:
        if change["metric"] == "latency":
            of_time.setdefault(change["test"], []).append(change)
    counts = sorted(change["test"] for change in best["changes"] if change["metric"] == "kernels")
    false = sum(map(len, of_time.values()))
    for one in planted:
        # A change shows on both variants of the card, in the runs of each.
        near = [change for change in of_time.get(one["test"], ()) if abs(change["runs"][0] - one["run"]) <= WITHIN]
        one["found"] = [change["runs"] for change in near]
        false -= len(near)
    years = tests * runs / 365
    return {
        "tests": tests,
        "runs": runs,
        "values": values,
        "cache_bytes": size,
        "processes": [{name: value for name, value in one.items() if name != "changes"} for one in every],
        "planted": planted,
        "found": sum(bool(one["found"]) for one in planted),
        "false": false,
        "false_in_a_test_year": false / years,
        "counts": {"planted": len(counted), "found": len(set(counts) & set(counted)), "false": len(set(counts) - set(counted))},
    }


def read_once(tests: int) -> dict[str, float]:
    """Seconds and bytes of a file of one run that a machine reads for the first time."""
    conditions = Conditions(sm_clock_hz=1.98e9, memory_clock_hz=2.6e9, other_processes=0)
    rows = [
        Row(
            name_of(test),
            Limits(),
            Verdict(Outcome.PASS, "", simulated=True),
            Measurement(
                label="",
                target="triad",
                mode="clean-cold",
                sampler="blocked",
                sampler_reason="",
                placements=tuple((1e-4 * (1 + test * 1e-6 + place * 1e-4),) for place in range(PLACEMENTS)),
                half_width=1e-7,
                traffic=Traffic(2**27, 2**27),
                footprint=2**28,
                floor=1e-6,
                conditions=(conditions, conditions),
                provenance=Provenance("2024-01-01T02:00:00+00:00", "GPU-a", Controls(3e-5, 2e-5, 3e-6, 6e-7, "controls")),
            ),
            footprint=Footprint(peak=2**29),
        )
        for test in range(tests)
    ]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        place = Storage(Path(folder) / "store")
        paths = [record(place, FACTS, rows, f"{run:040x}", {}, f"{run:016x}")[0] for run in range(4)]
        begin = time.perf_counter()
        history(place.folder)
        return {"tests": tests, "seconds": (time.perf_counter() - begin) / len(paths), "bytes": paths[0].stat().st_size}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--out", type=Path, default=Path("ci/records/no-gpu/history.json"))
    parser.add_argument("--query", nargs=2, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.query is not None:
        queried(*asked.query)
        return 0
    # Also of a quarter, in tests and in runs: the cost is linear in both.
    sizes = [(asked.tests, asked.runs), (asked.tests // 4, asked.runs), (asked.tests, asked.runs // 4)]
    begun = datetime.now(timezone.utc)
    every = [measured(tests, runs, asked.seed) for tests, runs in sizes]
    once = read_once(asked.tests)
    ended = datetime.now(timezone.utc)
    record = {"kind": "history_scale", "ended": ended.isoformat(timespec="seconds"), "seconds": (ended - begun).total_seconds()}
    record |= {"cores": os.cpu_count(), "seed": asked.seed, "histories": every, "read_once": once}
    write_record(asked.out, record)
    print(table(record))
    return 0 if all(map(meets, every)) else 1


def costs(one: Mapping[str, Any]) -> tuple[float, float, int]:
    """Least seconds of a query and of a page, and most bytes of both."""
    query, page = (min(process[f"{what}_cpu_seconds"] for process in one["processes"]) for what in ("query", "page"))
    return query, page, max(process["page_peak_bytes"] for process in one["processes"])


def meets(one: Mapping[str, Any]) -> bool:
    """True if all changes of a history are found, and nothing takes too long or too much."""
    query, page, memory = costs(one)
    found = one["found"] == len(one["planted"]) and one["counts"]["found"] == one["counts"]["planted"]
    return found and one["false_in_a_test_year"] <= 1 and max(query, page) <= SECONDS and memory <= BYTES


HEADINGS = {"tests": 6, "runs": 6, "planted": 9, "found": 7, "false": 7, "false in a test-year": 22, "query s": 9, "page s": 8, "MiB": 6}


def table(record: Mapping[str, Any]) -> str:
    """The record as text."""
    lines = [f"generated runs, one a night; seconds of one processor; no GPU, {record['ended'][:10]}"]
    lines.append("".join(name.rjust(width) for name, width in HEADINGS.items()))
    for one in record["histories"]:
        query, page, memory = costs(one)
        lines.append(
            f"{one['tests']:>6}{one['runs']:>6}{len(one['planted']):>9}{one['found']:>7}{one['false']:>7}"
            f"{one['false_in_a_test_year']:>22.5f}{query:>9.1f}{page:>8.1f}{memory / 2**20:>6.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
