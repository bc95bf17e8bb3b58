"""Simulate `max_peak_regression` where the peak varies by process: how often an unchanged test fails, and when a growth does.

A history saves a run each night, of another revision, with the processes that the session takes. Needs no GPU.

    python ci/bench/peak_simulation.py --histories 200 --nights 60
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from pytest_gpumem.judging.footprint import PastFootprint, decidable, judge_footprint
from pytest_gpumem.judging.screen import LOOKS
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.footprint import Footprint, FootprintRepeat
from pytest_gpumem.records.measurement import Limits
from pytest_gpumem.records.row import Row
from pytest_gpumem.units import MiB

LIMITS = Limits(max_peak_regression="1%", origin={"max_peak_regression": "marker"})
USUAL, MORE = 1024 * MiB, 32 * MiB
WINDOW = 20


def night(draw: Callable[[], int], past: list[PastFootprint]) -> tuple[Outcome, Footprint]:
    """The verdict of a session, and what it saw."""
    saved = past if len(past) <= WINDOW else [past[0], *past[-WINDOW:]]
    seen = Footprint(draw(), watched=("CUPTI",), driver_peak=0)
    while True:
        findings = list(judge_footprint(seen, LIMITS, saved, ("max_peak_regression",), "none"))
        verdict = with_verdict(Row("test_peak", LIMITS, OPEN), findings).verdict
        if not saved or not decidable(seen, LIMITS, verdict, saved, LOOKS[-1]):
            return findings[0].outcome, seen
        more = (
            next(count for count in LOOKS if count > 1 + len(seen.further)) - 1 - len(seen.further)
        )
        further = (*seen.further, *(FootprintRepeat(draw()) for _ in range(more)))
        seen = Footprint(seen.peak, watched=seen.watched, driver_peak=0, further=further)


def simulated(
    share: float, histories: int, nights: int, levels: int, seed: int
) -> dict[str, float]:
    """Shares of nights and histories. `share`: of processes whose peak is higher; `levels`: different higher peaks."""
    random = np.random.default_rng(seed)
    failed = undecided = processes = 0
    grown = dict.fromkeys(Outcome, 0)

    def draw(base: int) -> int:
        return base + (MORE * int(random.integers(1, levels + 1)) if random.random() < share else 0)

    for _ in range(histories):
        past: list[PastFootprint] = []
        for number in range(nights):
            outcome, seen = night(lambda: draw(USUAL), past)
            failed += outcome is Outcome.FAIL
            undecided += outcome is Outcome.UNDECIDED
            processes += 1 + len(seen.further)
            if outcome is not Outcome.FAIL:
                past.append(PastFootprint(seen, str(number)))
        outcome, _ = night(lambda: draw(USUAL + MORE), past)
        grown[outcome] += 1
    of = histories * nights
    return {
        "FAIL": failed / of,
        "UNDECIDED": undecided / of,
        "processes": processes / of,
        "grown FAIL": grown[Outcome.FAIL] / histories,
        "grown PASS": grown[Outcome.PASS] / histories,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--nights", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(
        f"{options.histories} histories of {options.nights} nights; limit 1 % of 1 GiB; a growth is of 32 MiB in all processes"
    )
    print(
        "higher in  by       unchanged: FAIL  UNDECIDED  processes  first night after a growth: FAIL    PASS"
    )
    for levels in (1, 8):
        for share in (0.0, 0.05, 0.2, 0.25, 0.3, 0.5):
            found = simulated(share, options.histories, options.nights, levels, options.seed)
            words = "32 MiB" if levels == 1 else "32-256"
            print(
                f"{share:8.0%}   {words:8} {found['FAIL']:15.2%} {found['UNDECIDED']:10.2%} {found['processes']:10.2f} "
                f"{found['grown FAIL']:31.1%} {found['grown PASS']:7.1%}"
            )


if __name__ == "__main__":
    main()
