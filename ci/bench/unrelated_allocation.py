"""Does an unrelated allocation in new code look like a slower kernel?

Base and head measure the same triad on the same card; head makes one unrelated allocation more, before the arrays. Both run alternately in
fresh processes, in an order drawn anew for every round, once with the default plan and once on one placement. Nothing that the kernel does
differs, so a difference is an artefact of where the arrays came to lie.

    python ci/bench/unrelated_allocation.py --pairs 20 --json ci/records/nvidia-h200/unrelated_allocation.json

The record is written after every round. Exits with 1 if a worker failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from fresh_processes import one_after_another, serve, within
from record_file import chosen_device, write_record
from triad_bench import TriadBench, cuda_index, prepared
from whole_mib import whole_mib

from pytest_gpumem.devices.opening import Chosen
from pytest_gpumem.judging.spread import corrected_latencies, difference, readings
from pytest_gpumem.measuring.sampling import Plan
from pytest_gpumem.measuring.stopping import half_width
from pytest_gpumem.records.measurement import Conditions, Measurement, Provenance
from pytest_gpumem.units import KiB, MiB

EXTRA_MIB = (3, 37, 129)
"""Unrelated allocations that are tried, one for each head: not multiples of each other, small to large."""
MIB = (2, 32)
PLANS = {"one placement": Plan(placements=1), "default": Plan()}
"""One placement comes first: the other moves the arrays about, and what it frees would be given out again."""
TINY_PLAN = Plan(budget=0.05)
CONFIDENCE = 0.95
SESSION = Provenance("2026-11-21T00:00:00+00:00")
"""Of both sides of a pair, which follow each other on one card within seconds."""
AHEAD = 3
WORKER_SECONDS = 120.0

Job = dict[str, Any]


def answer(chosen: Chosen, job: Job) -> dict[str, Any]:
    """A worker's measurements: one case for each size and plan."""
    bench = TriadBench(chosen, [job["extra"] * MiB] if job["extra"] else [], index=cuda_index(job["device"]))
    cases = []
    try:
        with bench.arrays(64 * KiB) as arrays:
            bench.measure(arrays, TINY_PLAN)
        for mib in job["mib"]:
            for name, plan in PLANS.items():
                with bench.arrays(mib * MiB) as arrays:
                    addresses = [buffer.address for buffer in arrays]
                    measurement, wall = bench.measure(arrays, plan)
                    cases.append(
                        {
                            "mib": mib,
                            "plan": name,
                            "value": measurement.latency,
                            "half_width": measurement.half_width,
                            "overhead": measurement.overhead,
                            "wall": wall,
                            "addresses": addresses,
                            "medians": list(measurement.medians),
                            "samples": len(measurement.samples),
                        }
                    )
    finally:
        bench.close()
    return {"cases": cases}


def jobs(rounds: range, extras: tuple[int, ...], mib: tuple[int, ...], device: str, seed: int) -> Iterator[Job]:
    """Base, whose extra is 0, and every head once a round, in a drawn order."""
    sides = (0, *extras)
    for number in rounds:
        for i in np.random.default_rng([seed, number]).permutation(len(sides)):
            yield {"round": number, "extra": sides[i], "mib": list(mib), "device": device}


def differences(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Head over base, less 1, for each plan, size and extra allocation; levelled, as a comparison of two processes takes them.

    Two questions, two intervals. Does the extra allocation shift the value at all? `difference` is the mean over rounds, `low` to `high`
    its Student's 95 % interval over rounds, `low_all` to `high_all` the one that holds for all comparisons of a plan at once (Bonferroni),
    and `differs` says whether that leaves out 0. Would one base and one head, as a pull request has them, be taken for different?
    `stated` is the reach of the 95 % interval that a run states when the baseline is that one base process (`verdicts.spread`), its median
    over rounds, and `beyond_stated` is the number of pairs whose difference lies outside their own.
    """
    cases: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for run in record["runs"]:
        if run["error"] is None:
            for case in run["cases"]:
                cases[case["plan"], case["mib"], run["extra"], run["round"]] = case
    kinds = dict.fromkeys((plan, mib, extra) for plan, mib, extra, _ in cases if extra)
    found = []
    for plan, mib, extra in sorted(kinds):
        rounds = sorted(number for p, m, e, number in cases if (p, m, e) == (plan, mib, extra) and (plan, mib, 0, number) in cases)
        if len(rounds) < 2:
            continue
        pairs = [(cases[plan, mib, 0, number], cases[plan, mib, extra, number]) for number in rounds]
        ratios = np.array([_ratio(base, head) - 1 for base, head in pairs])
        stated = [difference(_measured(head), [_measured(base)]).variance().reach((1 + CONFIDENCE) / 2) for base, head in pairs]
        mean = float(ratios.mean())
        together = sum(p == plan for p, _, _ in kinds)
        one, every = (half_width(ratios.tolist(), 1 - (1 - CONFIDENCE) / among) or 0.0 for among in (1, together))
        found.append(
            {
                "plan": plan,
                "mib": mib,
                "extra_mib": extra,
                "pairs": len(ratios),
                "difference": mean,
                "low": mean - one,
                "high": mean + one,
                "low_all": mean - every,
                "high_all": mean + every,
                "differs": not mean - every <= 0 <= mean + every,
                "stated": float(np.median(stated)),
                "beyond_stated": int(np.sum(np.abs(np.log1p(ratios)) > stated)),
            }
        )
    return found


def _measured(case: dict[str, Any]) -> Measurement:
    """A case as the screen takes it; each placement stands as its median."""
    calm = Conditions()
    return Measurement(
        label="",
        target="triad",
        mode="clean-cold",
        sampler="blocked",
        sampler_reason="",
        placements=tuple((median,) for median in case["medians"]),
        half_width=None,
        traffic=None,
        footprint=None,
        floor=0.0,
        conditions=(calm, calm),
        overhead=case["overhead"],
        provenance=SESSION,
    )


def _ratio(base: dict[str, Any], head: dict[str, Any]) -> float:
    """Head over base, with the launch overhead of both put to their mean where both know theirs."""
    first, second = corrected_latencies([*readings(_measured(base)), *readings(_measured(head))])
    return second / first


def table(record: dict[str, Any]) -> str:
    """The record as text."""
    device = record["device"]
    simulated = "SIMULATED " if device["simulated"] else ""
    found = differences(record)
    heads = f"{'difference % (95 % interval)':<30}{'for all at once':<20}{'a run states':>14}{'beyond':>8}"
    said = [
        f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}",
        "",
        f"{'plan':<15}{'arrays':>8}{'extra':>9}{'pairs':>7}  {heads}",
    ]
    for one in found:
        low, high, low_all, high_all = (100 * one[name] for name in ("low", "high", "low_all", "high_all"))
        difference = f"{100 * one['difference']:+.3f} ({low:+.3f} to {high:+.3f})"
        together = f"{low_all:+.3f} to {high_all:+.3f}"
        stated = f"{_plus_minus(one['stated']):>14}{one['beyond_stated']:>8}"
        what = f"{one['plan']:<15}{one['mib']:>4} MiB{one['extra_mib']:>5} MiB{one['pairs']:>7}"
        said.append(f"{what}  {difference:<30}{together:<20}{stated}".rstrip())
    for plan in PLANS:
        own = [one for one in found if one["plan"] == plan]
        if own:
            largest = max(abs(one["difference"]) for one in own)
            text = f"{plan}: {sum(one['differs'] for one in own)} of {len(own)} differ; the largest is {100 * largest:.3f} %"
            beyond, pairs = (sum(one[name] for one in own) for name in ("beyond_stated", "pairs"))
            text += f"; {beyond} of {pairs} pairs beyond the interval that a run states"
            said += ["", text]
    return "\n".join(said)


def _plus_minus(share: float) -> str:
    return f"+-{100 * share:.3f}"


def main() -> int:
    assert __doc__ is not None
    if sys.argv[1:2] == ["worker"]:
        job = json.loads(sys.argv[2])
        serve(lambda: prepared(job["device"]), lambda chosen: answer(chosen, job))
        return 1  # it was never let go
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="rounds: one base and each head (default 20)")
    parser.add_argument("--extra", type=whole_mib, default=EXTRA_MIB, help="MiB of each head's extra allocation (default 3,37,129)")
    parser.add_argument("--sizes", type=whole_mib, default=MIB, help="MiB of each array (default 2,32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, sim (default cuda)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round that would end after this long")
    parser.add_argument("--seed", type=int, default=1, help="of the orders (default 1)")
    chosen = parser.parse_args()
    if chosen.pairs < 2:
        parser.error(f"--pairs {chosen.pairs}: an interval needs at least 2")
    facts = chosen_device(parser, chosen.device).facts
    record: dict[str, Any] = {
        "kind": "unrelated_allocation",
        "device": {"name": facts.name, "simulated": facts.simulated, "driver": facts.driver, "uuid": facts.uuid},
        "runs": [],
    }
    rounds = range(1, chosen.pairs + 1)
    workers = one_after_another(
        jobs(rounds, chosen.extra, chosen.sizes, chosen.device, chosen.seed),
        lambda job: [sys.executable, str(Path(__file__).resolve()), "worker", json.dumps(job)],
        ahead=AHEAD,
        timeout=WORKER_SECONDS,
    )
    try:
        for number in within(rounds, chosen.seconds, "round"):
            for _ in (0, *chosen.extra):
                outcome = next(workers)
                run = {"round": number, "extra": outcome.job["extra"], "seconds": outcome.seconds, "error": outcome.error, "cases": []}
                record["runs"].append(run | (outcome.answer or {}))
                if outcome.error is not None:
                    print(f"round {number}, extra {outcome.job['extra']} MiB: {outcome.error}", file=sys.stderr)
            record["ended"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
            record["differences"] = differences(record)
            if chosen.json:
                write_record(chosen.json, record)
    finally:
        workers.close()
    if not record["runs"]:
        parser.error(f"--seconds {chosen.seconds:g}: no round was run")
    print(table(record))
    return 1 if any(run["error"] is not None for run in record["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
