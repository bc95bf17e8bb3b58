"""What it costs to load a baseline and to judge a suite by it: time of one core, memory, and how both grow with the number of tests.

Stores made-up processes (placement medians that differ as a GPU's do; no GPU is asked and none is spoken of), then, in a fresh process
each, loads them, makes the header's figure and judges one row of every test, with what has changed and what has crept.

    python ci/bench/screen_cost.py --rows 300 1000 3000 10000 --processes 20 --json screen_cost.json

Times are processor times, which others on the machine do not lengthen: all of it runs on one core.

Exits with 1 where 300 tests take more than 2 s or 300 MB, or where the time for each test at the most tests is above 1.5 times that at 300.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

from pytest_gpumem.baselines.context import changes
from pytest_gpumem.baselines.store import Store
from pytest_gpumem.judging.judge import comparable, judge
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Limits, Measurement, Provenance, Traffic
from pytest_gpumem.records.row import Row, Verdict

MOST_SECONDS, MOST_BYTES, MOST_GROWTH = 2.0, 300e6, 1.5
SUITE = 300
"""Tests of the suite that the first two limits are for."""
PLACEMENTS = 8
LIMITS = Limits(max_regression="1%", origin={"max_regression": "ini"})
CLOCKS = Conditions(1.98e9, 2.619e9, 41.0, 310.25, (), 0)
FACTS = DeviceFacts(
    name="made-up GPU",
    simulated=True,
    compute_capability=(9, 0),
    sm_count=132,
    max_threads_per_sm=2048,
    memory_bytes=80 << 30,
    l2_bytes=50 << 20,
    persisting_l2_max_bytes=0,
    access_policy_max_window_bytes=0,
    memory_clock_hz=2.6e9,
    memory_bus_bits=5120,
    peak_bandwidth=3.3e12,
    async_engines=3,
    can_map_host=True,
    concurrent_managed_access=True,
    pageable_memory_access=False,
    integrated=False,
    uuid="GPU-made-up",
    driver="580",
    cuda="13.0",
)


@dataclass(frozen=True)
class Cost:
    """Of one fresh process."""

    rows: int
    load: float
    """Seconds to load the baseline."""
    header: float
    """Seconds for the smallest slow-down that it catches."""
    judge: float
    """Seconds to judge one row of every test."""
    bytes: int
    """Largest resident set, the interpreter and its libraries included."""

    @property
    def seconds(self) -> float:
        return self.load + self.header + self.judge


def rows(count: int, seed: int) -> list[Row]:
    """One process's: a row of each test."""
    random = np.random.default_rng(seed)
    provenance = Provenance(f"2026-11-{1 + seed % 28:02}T10:00:00+00:00", FACTS.uuid)
    made = []
    for index in range(count):
        latency = 10e-6 * (1 + index % 37) * float(np.exp(random.normal(0, 1e-3)))
        medians = latency * np.exp(random.normal(0, 2e-3, PLACEMENTS))
        measurement = Measurement(
            label="",
            target="triad",
            mode="clean-cold",
            sampler="blocked",
            sampler_reason="made up",
            placements=tuple((float(median),) for median in medians),
            half_width=1e-8,
            traffic=Traffic(2 << 20, 1 << 20),
            footprint=3 << 20,
            floor=1.28e-6,
            conditions=(CLOCKS, CLOCKS),
            overhead=2e-6,
            provenance=provenance,
            kernel_source="a" * 64,
        )
        verdict = Verdict(Outcome.NEW, "made up", simulated=True)
        made.append(Row(f"tests/test_many.py::test_one[{index}]", LIMITS, verdict, measurement, test_source="b" * 64))
    return made


def store(folder: Path, count: int, processes: int) -> None:
    """Store made-up processes of `count` tests each."""
    for seed in range(processes):
        Store(folder, FACTS).save(rows(count, seed), "0" * 40)


def spend(folder: Path, count: int) -> Cost:
    """Load and judge, in this process."""
    from pytest_gpumem.plugin.terminal import catches

    now = rows(count, 1 << 20)
    begun = time.process_time()
    baseline = Store(folder, FACTS).load()
    loaded = time.process_time()
    catches(baseline, "1%", 1)
    headed = time.process_time()
    facts = replace(FACTS, driver="590")
    for row in now:
        assert row.measurement is not None
        history = baseline.history(row.key, partial(comparable, row.measurement))
        first = history.first_measurement
        judge(row.measurement, LIMITS, facts, history.measurements, strict=False, first=first)
        changes(row.measurement, facts, row.test_source, history.accepted)
    ended = time.process_time()
    # Kibibytes on Linux, bytes on macOS.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Cost(count, loaded - begun, headed - loaded, ended - headed, most)


def measured(count: int, processes: int, repeats: int) -> Cost:
    """The median of fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder), count, processes)
        costs = []
        for _ in range(repeats):
            command = [sys.executable, __file__, "--child", folder, str(count)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            costs.append(Cost(**json.loads(run.stdout)))
    return sorted(costs, key=lambda cost: cost.seconds)[len(costs) // 2]


def misses(costs: list[Cost]) -> list[str]:
    """What is above its limit."""
    said = []
    by_rows = {cost.rows: cost for cost in costs}
    if (suite := by_rows.get(SUITE)) is not None:
        if suite.seconds > MOST_SECONDS:
            said.append(f"{SUITE} tests take {suite.seconds:.2f} s, more than {MOST_SECONDS} s")
        if suite.bytes > MOST_BYTES:
            said.append(f"{SUITE} tests take {suite.bytes / 1e6:.0f} MB, more than {MOST_BYTES / 1e6:.0f} MB")
        largest = by_rows[max(by_rows)]
        growth = largest.seconds / largest.rows / (suite.seconds / suite.rows)
        if growth > MOST_GROWTH:
            said.append(f"a test among {largest.rows} takes {growth:.2f} times as long as among {SUITE}, more than {MOST_GROWTH}")
    return said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[SUITE, 1000, 3000, 10_000])
    parser.add_argument("--processes", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(asdict(spend(Path(given.child[0]), int(given.child[1])))))
        return 0
    print(f"{given.processes} stored processes, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'tests':>7} {'load':>9} {'header':>9} {'judge':>9} {'in all':>9} {'a test':>10} {'memory':>9}")
    costs = []
    for count in given.rows:
        cost = measured(count, given.processes, given.repeats)
        costs.append(cost)
        shown = f"{cost.load:8.2f}s {cost.header:8.2f}s {cost.judge:8.2f}s {cost.seconds:8.2f}s {cost.seconds / count * 1e3:7.3f} ms"
        print(f"{count:7} {shown} {cost.bytes / 1e6:6.0f} MB", flush=True)
    said = misses(costs)
    for miss in said:
        print(f"MISS: {miss}")
    if given.json is not None:
        record = {"processes": given.processes, "cores": os.cpu_count(), "python": platform.python_version()}
        write_record(given.json, record | {"costs": [asdict(cost) for cost in costs], "misses": said}, indent=1)
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
