"""How often does the duet's verdict err? Simulated: no GPU is measured, only the spreads between processes are those of a real one.

Every verdict is made by the shipped code, `pytest_gpumem.verdicts.paired`, out of simulated latencies of base and head processes. Their
spreads are the levelled ones of the records (`--records`), the larger where two records have one. Single tests at every spread, unchanged,
slower by delta/2 (the worst unchanged code there is) and slower by delta; the same with a drift, heavy tails and two modes; and whole
suites, in which all tests of a process share a part of their noise.

    python ci/bench/duet_simulation.py --json ci/records/no-gpu/duet_simulation.json

Exits with 1 if a rate is beyond its promise, by the bound of Clopper and Pearson (99 %, one-sided) that speaks for the promise.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from pytest_gpumem.files import write_whole
from pytest_gpumem.records.verdict import Outcome
from pytest_gpumem.verdicts.paired import ALARM, FAMILY, MANY, ROUNDS, common_plan, common_shift, judge_pairs, plan

RECORDS = (Path("ci/records/nvidia-h200/peers.json"), Path("ci/records/nvidia-h200/peers_random.json"))
WAY = "gpumem clean-cold, levelled"
DELTA = 0.01
POWER = 0.99
DOUBT = 0.01
"""One-sided error of the bounds on a rate."""
SHARED = 0.5
"""Share of the variance that all tests of one process have in common, in simulated suites."""
CHUNK = 500

Rng = np.random.Generator
Draw = Callable[[Rng, tuple[int, ...]], Any]


def _normal(rng: Rng, shape: tuple[int, ...]) -> Any:
    return rng.standard_normal(shape)


def _heavy(rng: Rng, shape: tuple[int, ...]) -> Any:
    """Student's t with three degrees of freedom, scaled to the same spread."""
    return rng.standard_t(3, shape) / math.sqrt(3)


def _bimodal(rng: Rng, shape: tuple[int, ...]) -> Any:
    """One process in five lies two spreads apart from the rest, around the mode's own noise."""
    return 2.0 * (rng.random(shape) < 0.2) + 0.6 * rng.standard_normal(shape)


def _drifting(rng: Rng, shape: tuple[int, ...]) -> Any:
    """A random walk over processes beside their own noise: each step a fifth of the spread."""
    return rng.standard_normal(shape) + np.cumsum(0.2 * rng.standard_normal(shape), axis=-1)


NOISES: dict[str, Draw] = {"normal": _normal, "heavy-tailed": _heavy, "bimodal": _bimodal, "drifting": _drifting}


def spreads(records: Sequence[Path]) -> dict[int, float]:
    """Levelled spread between processes by MiB of each array: the larger one where several records have it."""
    found: dict[int, float] = {}
    for path in records:
        for row in json.loads(path.read_text())["summary"]["rows"]:
            if row["way"] == WAY:
                found[row["mib"]] = max(found.get(row["mib"], 0.0), row["spread"]["value"])
    return dict(sorted(found.items()))


def log_ratios(rng: Rng, draw: Draw, spread: float, change: float, pairs: int) -> Any:
    """Head over base of `pairs` pairs of processes, in the duet's order: blocks of four, each in one of two orders."""
    values = spread * draw(rng, (2 * pairs,)).reshape(-1, 4)
    base_first = rng.random(len(values)) < 0.5
    signs = np.where(base_first, 1.0, -1.0)
    # base head head base, or head base base head: the second pair is turned round.
    ratios = np.stack([signs * (values[:, 1] - values[:, 0]), signs * (values[:, 2] - values[:, 3])], axis=1)
    return ratios.ravel() + math.log1p(change)


def single(job: tuple[float, str, float, int, int]) -> tuple[Counter[str], int]:
    """Outcomes of single tests and the pairs that they took; the job is spread, noise, change, trials, seed."""
    spread, noise, change, trials, seed = job
    rng, schedule = np.random.default_rng(seed), plan(1)
    counts: Counter[str] = Counter()
    pairs = 0
    for _ in range(trials):
        values = log_ratios(rng, NOISES[noise], spread, change, ROUNDS)
        found = judge_pairs({"": values}, {"": DELTA}, schedule)[""]
        counts[found.outcome.value if found.outcome else "open"] += 1
        pairs += found.pairs
    return counts, pairs


def suite(job: tuple[int, float, int, int, dict[int, float]]) -> Counter[str]:
    """Suites of many tests; the job is tests, change of all of them, suites, seed, spreads.

    Counts suites, suites with any FAIL, tests, FAILs among them, and the outcomes of the common shift.
    """
    tests, change, suites, seed, known = job
    rng, schedule = np.random.default_rng(seed), plan(tests)
    counts: Counter[str] = Counter()
    every = list(known.values())
    for _ in range(suites):
        shared = log_ratios(rng, _normal, 1.0, 0.0, ROUNDS)
        pairs = {}
        for number in range(tests):
            spread = every[number % len(every)]
            own = log_ratios(rng, _normal, 1.0, 0.0, ROUNDS)
            pairs[str(number)] = spread * (math.sqrt(SHARED) * shared + math.sqrt(1 - SHARED) * own) + math.log1p(change)
        found = judge_pairs(pairs, dict.fromkeys(pairs, DELTA), schedule)
        failed = sum(one.outcome is Outcome.FAIL for one in found.values())
        counts.update(suites=1, tests=tests, failed=failed)
        alarmed = failed > 0
        if tests > MANY:
            common = judge_pairs({"": common_shift(pairs)}, {"": DELTA}, common_plan(schedule))[""]
            counts[f"common {common.outcome.value if common.outcome else 'open'}"] += 1
            counts["common pairs"] += common.pairs
            alarmed = alarmed or common.outcome is Outcome.FAIL
        counts["alarmed"] += alarmed
    return counts


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Clopper-Pearson bounds, each one-sided at 99 %."""
    low = 0.0 if hits == 0 else float(stats.beta.ppf(DOUBT, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(stats.beta.ppf(1 - DOUBT, hits + 1, trials - hits))
    return low, high


def chunks(trials: int) -> Iterator[int]:
    """Parts of the trials, for the workers."""
    while trials > 0:
        yield min(CHUNK, trials)
        trials -= CHUNK


def simulate(trials: int, suites: int, known: dict[int, float], seed: int) -> dict[str, Any]:
    """All cases: `trials` verdicts for each single case, `suites` suites for each size."""
    seeds = iter(range(seed * 1_000_000, (seed + 1) * 1_000_000))
    singles, families = [], []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for mib, spread in known.items():
            for noise in NOISES if mib == min(known) else ("normal",):
                for change in (0.0, DELTA / 2, DELTA):
                    jobs = [(spread, noise, change, part, next(seeds)) for part in chunks(trials)]
                    counts: Counter[str] = Counter()
                    pairs = 0
                    for some, took in pool.map(single, jobs):
                        counts, pairs = counts + some, pairs + took
                    case = {"mib": mib, "spread": spread, "noise": noise, "change": change, "trials": trials}
                    singles.append(case | {"outcomes": dict(counts), "mean_pairs": pairs / trials})
        for tests in (1, MANY, 100, 300):
            for change in (0.0, DELTA / 2, DELTA):
                parts = [part for whole in chunks(suites) for part in [10] * (whole // 10) + [whole % 10] if part]
                total: Counter[str] = Counter()
                for some in pool.map(suite, [(tests, change, part, next(seeds), known) for part in parts]):
                    total.update(some)
                families.append({"family": tests, "change": change, **total})
    return {"single": singles, "suites": families}


def claims(found: dict[str, Any]) -> list[tuple[str, float, float, bool]]:
    """What is promised, the rate that was seen, its limit, and whether the bound speaks against it: words, rate, limit, kept."""
    said = []
    for case in found["single"]:
        name = f"{case['mib']} MiB, {case['noise']}, {100 * case['change']:+.1f} %"
        failed = case["outcomes"].get("FAIL", 0)
        low, high = interval(failed, case["trials"])
        if case["change"] < DELTA:
            said.append((f"{name}: alarms", failed / case["trials"], ALARM, low <= ALARM))
        elif case["noise"] in ("normal", "heavy-tailed"):
            said.append((f"{name}: caught", failed / case["trials"], POWER, high >= POWER))
    unchanged = [case for case in found["single"] if case["change"] == 0]
    alarms, trials = sum(case["outcomes"].get("FAIL", 0) for case in unchanged), sum(case["trials"] for case in unchanged)
    said.append((f"unchanged, all {trials} verdicts: alarms", alarms / trials, ALARM, interval(alarms, trials)[1] <= ALARM))
    for case in found["suites"]:
        if case["change"] < DELTA:
            name = f"{case['suites']} suites of {case['family']}, {100 * case['change']:+.1f} %"
            low, _ = interval(case["alarmed"], case["suites"])
            said.append((f"{name}: alarmed", case["alarmed"] / case["suites"], FAMILY, low <= FAMILY))
        elif case["family"] > MANY:
            caught = case.get("common FAIL", 0)
            name = f"{case['suites']} suites of {case['family']}, all {100 * case['change']:+.1f} %: common shift caught"
            said.append((name, caught / case["suites"], POWER, interval(caught, case["suites"])[1] >= POWER))
    return said


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    lines = [f"SIMULATED from spreads between processes of {record['device']}; delta {100 * DELTA:g} %, at most {ROUNDS} pairs", ""]
    lines.append(
        f"{'arrays':>8}{'spread %':>10}  {'noise':<14}{'change %':>9}{'verdicts':>10}{'FAIL %':>9}{'PASS %':>9}{'open %':>9}{'pairs':>7}"
    )
    for case in record["single"]:
        shares = [100 * case["outcomes"].get(name, 0) / case["trials"] for name in ("FAIL", "PASS", "INCONCLUSIVE")]
        lines.append(
            f"{case['mib']:>4} MiB{100 * case['spread']:>10.3f}  {case['noise']:<14}{100 * case['change']:>+9.1f}{case['trials']:>10}"
            + "".join(f"{share:>9.3f}" for share in shares)
            + f"{case['mean_pairs']:>7.1f}"
        )
    lines += [
        "",
        f"{'tests':>8}{'change %':>10}{'suites':>8}{'any FAIL %':>12}{'FAIL, % of tests':>18}{'common shift FAIL %':>21}{'its pairs':>11}",
    ]
    for case in record["suites"]:
        common = 100 * case.get("common FAIL", 0) / case["suites"] if "common pairs" in case else None
        lines.append(
            f"{case['family']:>8}{100 * case['change']:>+10.1f}{case['suites']:>8}{100 * case['alarmed'] / case['suites']:>12.2f}"
            f"{100 * case['failed'] / case['tests']:>18.4f}"
            + (f"{common:>21.2f}{case['common pairs'] / case['suites']:>11.1f}" if common is not None else f"{'-':>21}{'-':>11}")
        )
    broken = [claim for claim in claims(record) if not claim[3]]
    lines += ["", f"{len(claims(record))} promises, {len(broken)} broken"]
    lines += [f"BROKEN {words}: {100 * rate:.3f} %, promised {100 * limit:g} %" for words, rate, limit, _ in broken]
    return "\n".join(lines)


def main() -> int:
    """Simulate, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000, help="verdicts for each case of a single test (default 20000)")
    parser.add_argument("--suites", type=int, default=400, help="suites for each size (default 400)")
    parser.add_argument("--records", type=Path, nargs="+", default=list(RECORDS), metavar="FILE", help="where the spreads come from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    options = parser.parse_args()
    if options.trials < 1 or options.suites < 1:
        parser.error(f"--trials {options.trials}, --suites {options.suites}: at least 1 of each")
    begun = time.perf_counter()
    record = {
        "kind": "duet_simulation",
        "simulated": True,
        "device": json.loads(options.records[0].read_text())["device"]["name"],
        "records": [str(path) for path in options.records],
        "seed": options.seed,
        **simulate(options.trials, options.suites, spreads(options.records), options.seed),
        "ended": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    if options.json:
        write_whole(options.json, json.dumps(record, indent=1) + "\n")
    print(table(record))
    print(f"{time.perf_counter() - begun:.0f} s", file=sys.stderr)
    return 1 if any(not kept for *_, kept in claims(record)) else 0


if __name__ == "__main__":
    sys.exit(main())
