"""SIMULATED: what the screen's verdicts do on processes drawn at random, with the spreads that H200 cards showed.

No GPU takes part. Processes are drawn from a model: a session's, a process's and a placement's share of the latency and the launch overhead
of the process, each with the standard deviation that ci/records/nvidia-h200/peers*.json show, normal, heavy-tailed (Student's t with 3
degrees of freedom) or bimodal (one process in five is slower by twice the spread); the shipped judge then gives its verdict on each. It
shows whether the statistics keep what they promise where their assumptions hold, and what becomes of it where they do not. It does not show
that a GPU is like the model.

    python ci/bench/gate_simulation.py --verdicts 6000 --json ci/records/no-gpu/gate_simulation.json

Exits with 1 if a promise that is held against a figure is missed beyond doubt.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binomtest

from pytest_gpumem.files import write_whole
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Controls, Limits, Measurement, Repeat, Taken, Traffic
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.judge import judge
from pytest_gpumem.verdicts.suite import ALONE, Family

PLACEMENTS = 32
"""Of a measurement: as many as the default plan takes of arrays up to 32 MiB."""
ALARMS = 1e-3
"""Largest share of verdicts on unchanged code that may be FAIL or SUSPECT."""
SUITES = 0.05
"""Largest share of suites of unchanged tests in which one may FAIL."""
POWER = 0.99
"""Least share of slow-downs of the size asked about that must be caught, where the verdict says that it can."""
SUITE = 300
"""Rows of a suite."""
CONTROL = 60e-6
"""Seconds of the control kernel's read of DRAM, and of L2."""
CONTROL_SPREAD = 0.0004
"""Of the control kernel between processes: as long kernels."""

FACTS = DeviceFacts(
    name="model of an H200's spreads",
    simulated=True,
    compute_capability=(9, 0),
    sm_count=132,
    max_threads_per_sm=2048,
    memory_bytes=150 << 30,
    l2_bytes=60 << 20,
    persisting_l2_max_bytes=0,
    access_policy_max_window_bytes=0,
    memory_clock_hz=3.2e9,
    memory_bus_bits=6144,
    peak_bandwidth=4.8e12,
    async_engines=3,
    can_map_host=True,
    concurrent_managed_access=True,
    pageable_memory_access=False,
    integrated=False,
)


@dataclass(frozen=True)
class Kernel:
    """A triad as H200 cards showed it; spreads are standard deviations, as shares of the latency."""

    mib: int
    """Of each of three arrays."""
    latency: float
    """Seconds, launch overhead included."""
    placement: float
    process: float
    session: float


KERNELS = (
    Kernel(2, 5.4e-6, placement=0.0094, process=0.0051, session=0.0025),
    Kernel(32, 24.8e-6, placement=0.0029, process=0.0012, session=0.0007),
    Kernel(256, 183e-6, placement=0.0016, process=0.00037, session=0.0004),
)
OVERHEAD, OVERHEAD_SPREAD = 3.2e-6, 52e-9
"""Seconds: launch overhead, and its standard deviation between processes."""


@dataclass(frozen=True)
class World:
    """What is drawn."""

    shape: str = "normal"
    """Of what processes and sessions add: "normal", "heavy" or "bimodal"."""
    processes: int = 20
    """Of the baseline."""
    sessions: int = 5
    """Of the baseline; the run is of another one."""
    measured: int = 3
    """Processes of the run."""
    slower: float = 0.0
    """By how much the code is slower, as a share."""
    drift: float = 0.0
    """By how much the device is slower than it was for the baseline."""
    limit: str = "1%"
    """`max_regression`."""


class Source:
    """Draws measurements; the same seed gives the same ones."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._random = np.random.default_rng(seed)

    def standard(self, count: int = 1) -> Any:
        """Deviations with mean 0 and standard deviation 1."""
        if self._world.shape == "heavy":
            return self._random.standard_t(3, count) / math.sqrt(3)
        if self._world.shape == "bimodal":
            slow = self._random.random(count) < 0.2
            # Four parts of the variance between the modes, one within them.
            return (2.0 * slow - 0.4) / 0.8 * math.sqrt(0.8) + self._random.normal(0, math.sqrt(0.2), count)
        return self._random.normal(0, 1, count)

    def history(self, kernel: Kernel) -> list[Measurement]:
        """The baseline's processes, spread evenly over its sessions."""
        world = self._world
        begun = [datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(days=day) for day in range(world.sessions)]
        shifts = self.standard(world.sessions) * kernel.session
        return [
            self.process(kernel, shifts[index % world.sessions], begun[index % world.sessions], 0.0, 0.0)
            for index in range(world.processes)
        ]

    def run(self, kernel: Kernel, slower: float) -> Measurement:
        """This run's measurement, over its processes, in a session of its own."""
        world = self._world
        shift = float(self.standard()[0]) * kernel.session
        begun = datetime(2026, 6, 1, tzinfo=timezone.utc)
        first, *others = [self.process(kernel, shift, begun, slower, world.drift) for _ in range(world.measured)]
        return replace(first, further=tuple(Repeat(other.medians, other.overhead) for other in others))

    def process(self, kernel: Kernel, shift: float, begun: datetime, slower: float, drift: float) -> Measurement:
        """One process: its own share, its placements', its overhead."""
        own = shift + float(self.standard()[0]) * kernel.process
        medians = (kernel.latency - OVERHEAD) + kernel.latency * np.expm1(
            own + math.log1p(slower) + math.log1p(drift) + self._random.normal(0, kernel.placement, PLACEMENTS)
        )
        overhead = OVERHEAD + OVERHEAD_SPREAD * float(self._random.normal())
        control = CONTROL * (1 + drift) * math.exp(CONTROL_SPREAD * float(self._random.normal()))
        return Measurement(
            label="",
            target="triad",
            mode="clean-cold",
            sampler="blocked",
            sampler_reason="",
            placements=tuple((float(median),) for median in medians + overhead),
            half_width=None,
            traffic=Traffic(2 * kernel.mib << 20, kernel.mib << 20),
            footprint=3 * kernel.mib << 20,
            floor=1.3e-6,
            conditions=(Conditions(), Conditions()),
            overhead=overhead,
            taken=Taken(begun.isoformat(), "a card", Controls(dram=control, l2=control, launch=overhead, source="model")),
        )

    def verdict(self, kernel: Kernel, family: Family = ALONE) -> Verdict:
        """The shipped judge's, on one row that nothing else is known of."""
        limits = Limits(max_regression=self._world.limit)
        return judge(self.run(kernel, self._world.slower), limits, FACTS, self.history(kernel), strict=False, family=family)


def verdicts(world: World, kernel: Kernel, count: int, seed: int) -> tuple[Counter[str], list[float]]:
    """Outcomes of `count` independent rows, and what each could resolve."""
    source, seen, resolved = Source(world, seed), Counter[str](), list[float]()
    for _ in range(count):
        verdict = source.verdict(kernel)
        seen[verdict.outcome.value] += 1
        if verdict.comparison is not None:
            resolved.append(verdict.comparison.resolvable)
    return seen, resolved


def suites(world: World, count: int, seed: int) -> tuple[int, int]:
    """Suites of `SUITE` rows of all sizes in turn: in how many one row FAILs at least, and how many rows do."""
    source, alarmed, rows = Source(world, seed), 0, 0
    for _ in range(count):
        family, failed = Family(size=SUITE), 0
        for row in range(SUITE):
            verdict = source.verdict(KERNELS[row % len(KERNELS)], family)
            family = family.after(verdict)
            failed += verdict.outcome is Outcome.FAIL
        alarmed, rows = alarmed + bool(failed), rows + failed
    return alarmed, rows


def interval(hits: int, count: int) -> tuple[float, float]:
    """95 % Clopper-Pearson interval of a share."""
    found = binomtest(hits, count).proportion_ci(0.95, method="exact")
    return float(found.low), float(found.high)


def cases() -> Iterator[tuple[str, World, Kernel]]:
    """What is simulated, each with the name of its group."""
    for kernel in KERNELS:
        for shape in ("normal", "heavy", "bimodal"):
            yield "unchanged code", World(shape), kernel
        for processes, sessions, measured in ((3, 1, 1), (20, 1, 1), (20, 5, 1)):
            yield "unchanged code", World(processes=processes, sessions=sessions, measured=measured), kernel
    for shape in ("normal", "heavy", "bimodal"):
        for processes, sessions, measured in ((3, 1, 1), (20, 1, 1), (20, 5, 3), (20, 20, 1)):
            world = World(shape, processes=processes, sessions=sessions, measured=measured, limit="0.001%")
            yield "unchanged code, a margin of next to nothing (max_regression 0.001%)", world, KERNELS[1]
    for kernel in KERNELS:
        for slower in (0.0025, 0.005, 0.01, 0.02):
            yield "slower code", World(slower=slower), kernel
    for kernel in KERNELS:
        yield "slower code, smaller baselines", World(slower=0.01, processes=3, sessions=1, measured=1), kernel
        yield "slower code, smaller baselines", World(slower=0.01, measured=1), kernel
    for drift in (0.005, 0.01):
        yield "slower device, unchanged code", World(drift=drift), KERNELS[2]
    yield "slower device and code", World(drift=0.01, slower=0.01), KERNELS[2]


def chunked(count: int, seed: int, size: int = 500) -> list[tuple[int, int]]:
    """Parts of a case, each with a seed of its own: the result does not depend on how many workers there are."""
    return [(min(size, count - first), seed * 100_003 + first) for first in range(0, count, size)]


def simulate(count: int, suite_count: int, map_: Callable[..., Any] = map) -> dict[str, Any]:
    """The record.

    Args:
        count: verdicts of each case.
        suite_count: suites of unchanged tests.
        map_: as the built-in, over parts of a case.
    """
    rows = []
    for seed, (group, world, kernel) in enumerate(cases()):
        parts = chunked(count, seed)
        seen, resolved = Counter[str](), list[float]()
        for outcomes, resolvable in map_(partial(_part, world, kernel), parts):
            seen += outcomes
            resolved += resolvable
        rows.append(
            {
                "group": group,
                "world": asdict(world),
                "mib": kernel.mib,
                "outcomes": dict(seen),
                "resolves": float(np.median(resolved)) if resolved else None,
            }
        )
    parts = chunked(suite_count, 10_000, 1)
    whole = list(map_(partial(_suites, World()), parts))
    return {
        "kind": "gate_simulation",
        "simulated": True,
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "kernels": [asdict(kernel) for kernel in KERNELS],
        "rows": rows,
        "suites": {"count": suite_count, "rows": SUITE, "alarmed": sum(a for a, _ in whole), "failed_rows": sum(f for _, f in whole)},
    }


def _part(world: World, kernel: Kernel, part: tuple[int, int]) -> tuple[Counter[str], list[float]]:
    return verdicts(world, kernel, *part)


def _suites(world: World, part: tuple[int, int]) -> tuple[int, int]:
    return suites(world, *part)


def caught(outcomes: dict[str, int]) -> int:
    """Verdicts that flag a slow-down."""
    return outcomes.get(Outcome.FAIL.value, 0) + outcomes.get(Outcome.SUSPECT.value, 0)


def missed(record: dict[str, Any]) -> list[str]:
    """Promises that the record breaks beyond doubt: alarms as FAIL whatever the shape, also as SUSPECT where it is normal; power where the
    verdicts say that they can decide."""
    said = []
    for row in record["rows"]:
        world, outcomes = row["world"], row["outcomes"]
        total = sum(outcomes.values())
        low, high = interval(caught(outcomes), total)
        name = f"{row['group']}, {row['mib']} MiB, {world}"
        fails = interval(outcomes.get(Outcome.FAIL.value, 0), total)[0]
        if world["slower"] == 0 and fails > ALARMS:
            said.append(f"{name}: FAIL in {fails:.2%} of verdicts at least")
        if world["shape"] == "normal" and world["slower"] == 0 and low > ALARMS:
            said.append(f"{name}: flagged in {low:.2%} of verdicts at least")
        if world["slower"] >= 0.01 and outcomes.get(Outcome.PASS.value, 0) and interval(outcomes["PASS"], total)[0] > 1 - POWER:
            said.append(f"{name}: passes {interval(outcomes['PASS'], total)[0]:.2%} at least")
        if world["slower"] >= 0.01 and row["resolves"] is not None and row["resolves"] < 0.0095 and high < POWER:
            said.append(f"{name}: catches {high:.2%} at most, though it resolves {row['resolves']:.2%}")
    whole = record["suites"]
    if whole["count"] and interval(whole["alarmed"], whole["count"])[0] > SUITES:
        said.append(f"{whole['alarmed']} of {whole['count']} suites of unchanged tests fail")
    return said


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    total = sum(sum(row["outcomes"].values()) for row in record["rows"])
    lines = [
        f"SIMULATED, no GPU: {total} verdicts on processes drawn with the spreads that H200 cards showed, {record['ended'][:10]}",
        "max_regression 1%; baseline: processes in sessions; run: processes in another session; interval: Clopper-Pearson, 95 %",
    ]
    head = f"{'MiB':>5}  {'spreads':<8} {'code':>7} {'device':>7}  {'baseline':>8} {'run':>3} {'flagged %  (interval)':>26}"
    group = None
    for row in record["rows"]:
        if row["group"] != group:
            group = row["group"]
            lines += ["", group, f"{head} {'FAIL':>6} {'SUSP.':>6} {'INCONCL.':>8} {'PASS':>6}  {'resolves':>8}"]
        world, outcomes = row["world"], row["outcomes"]
        count = sum(outcomes.values())
        low, high = interval(caught(outcomes), count)
        flagged = f"{100 * caught(outcomes) / count:.2f}  ({100 * low:.2f} to {100 * high:.2f})"
        lines.append(
            f"{row['mib']:>5}  {world['shape']:<8} {_percent(world['slower']):>7} {_percent(world['drift']):>7}  "
            f"{world['processes']:>3} in {world['sessions']} {world['measured']:>3} {flagged:>26} "
            f"{outcomes.get('FAIL', 0):>6} {outcomes.get('SUSPECT', 0):>6} {outcomes.get('INCONCLUSIVE', 0):>8} "
            f"{outcomes.get('PASS', 0):>6}  "
            f"{'' if row['resolves'] is None else format(100 * row['resolves'], '.2f'):>6} %"
        )
    whole = record["suites"]
    if whole["count"]:
        low, high = interval(whole["alarmed"], whole["count"])
        lines += [
            "",
            f"{whole['alarmed']} of {whole['count']} suites of {whole['rows']} unchanged tests have a FAIL: "
            f"{100 * whole['alarmed'] / whole['count']:.2f} % ({100 * low:.2f} to {100 * high:.2f})",
        ]
    broken = missed(record)
    lines += ["", *(f"MISS  {sentence}" for sentence in broken)] if broken else ["", "no promise is missed beyond doubt"]
    return "\n".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:+.2f}" if share else "same"


def main() -> int:
    """Simulate, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verdicts", type=int, default=500, help="of each case (default 500)")
    parser.add_argument("--suites", type=int, default=10, help=f"of {SUITE} unchanged tests each (default 10)")
    parser.add_argument("--workers", type=int, default=2, help="processes that draw (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    options = parser.parse_args()
    if min(options.verdicts, options.workers) < 1 or options.suites < 0:
        parser.error("--verdicts and --workers are at least 1, --suites at least 0")
    with ProcessPoolExecutor(options.workers) as pool:
        record = simulate(options.verdicts, options.suites, pool.map)
    if options.json:
        write_whole(options.json, json.dumps(record, indent=1) + "\n")
    print(table(record))
    return 1 if missed(record) else 0


if __name__ == "__main__":
    sys.exit(main())
