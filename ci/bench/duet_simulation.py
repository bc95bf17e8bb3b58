"""SIMULATED: how often the duet errs, and how many pairs it takes.

No GPU takes part. Processes are drawn with the spreads that H200 cards showed (`--records`), or with noise that hangs together in time. A
coin decides for each pair which side runs first. The shipped code (`pytest_gpumem.judging.paired`) judges after every pair, without its
rule for slow modes of head, by which a PASS takes 30 pairs (`judging_simulation`).

    python ci/bench/duet_simulation.py --json ci/records/no-gpu/duet_simulation.json

Exits with 1 if a row misses a promise beyond doubt.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

import peers_summary
from gate_simulation import interval
from record_file import record_parser, write_record

from pytest_gpumem.commands import ROUNDS
from pytest_gpumem.judging.paired import ALARM, MISS, Paired, judge_pairs
from pytest_gpumem.judging.screen import ALPHA
from pytest_gpumem.outcomes import Outcome

RECORDS = (
    Path("ci/records/nvidia-h200/peers.json"),
    Path("ci/records/nvidia-h200/peers_random.json"),
)
DELTA = 0.01
CHANGES = (0.0, 1.0, 1.5, 2.0, 50.0)
"""Slow-downs over `DELTA`."""
SLOW, SLOW_SHARE = 0.02, 0.2
"""By what share a process in the slow mode is slower, and how many are in it."""
FAMILIES = (1, 300)
PART = 500

Rng = np.random.Generator
COUNT = 2 * ROUNDS


def _period_of_four(rng: Rng) -> Any:
    """x(t) = -0.9 x(t-2) + e: an oscillation with a period of four processes."""
    drawn = rng.standard_normal(COUNT + 50) * math.sqrt(1 - 0.9**2)
    for index in range(2, len(drawn)):
        drawn[index] -= 0.9 * drawn[index - 2]
    return drawn[50:]


def _square_wave(rng: Rng) -> Any:
    """Two levels that take turns every 1 to 6 processes, and a little noise."""
    half, phase = rng.integers(1, 7), rng.integers(0, 12)
    return np.where((np.arange(COUNT) + phase) // half % 2, 1.0, -1.0) + 0.3 * rng.standard_normal(
        COUNT
    )


NOISES: dict[str, Callable[[Rng], Any]] = {
    "normal": lambda rng: rng.standard_normal(COUNT),
    "period of 4": _period_of_four,
    "square wave": _square_wave,
    "t, 2 d.f.": lambda rng: rng.standard_t(2, COUNT) * 0.6745 / 0.8165,
    "t, 3 d.f.": lambda rng: rng.standard_t(3, COUNT) * 0.6745 / 0.7649,
    "2 % slow mode": lambda rng: rng.standard_normal(COUNT),
}
"""Noise of processes in the order in which they run, in units of the spread; Student's t has the quartiles of a normal."""


def spreads(records: Sequence[Path]) -> dict[int, float]:
    """Spread between processes by MiB of each array: the larger one where several records have it."""
    found: dict[int, float] = {}
    for path in records:
        for row in peers_summary.rows(json.loads(path.read_text())):
            if row.way == peers_summary.OURS + peers_summary.CORRECTED and row.spread is not None:
                found[row.mib] = max(found.get(row.mib, 0.0), row.spread.value)
    return dict(sorted(found.items(), reverse=True))


def log_ratios(rng: Rng, noise: str, spread: float, change: float) -> list[float]:
    """Head over base of `ROUNDS` pairs of processes, each in an order of its own."""
    values = spread * NOISES[noise](rng)
    if noise == "2 % slow mode":
        values = values + math.log1p(SLOW) * (rng.random(COUNT) < SLOW_SHARE)
    base_first = np.where(rng.random(ROUNDS) < 0.5, 1.0, -1.0)
    return list(base_first * (values[1::2] - values[::2]) + math.log1p(change))


def decided(values: Sequence[float]) -> Paired:
    """The shipped verdict after the first pair that decides. A verdict is never taken back, so that bisection finds it."""

    def after(pairs: int) -> Paired:
        return judge_pairs({"": values[:pairs]}, {"": DELTA}, clean=1)[""]

    below, above = 0, 4
    while (found := after(above)).outcome is None:
        if above == len(values):
            return found
        below, above = above, min(2 * above, len(values))
    while above - below > 1:
        middle = (below + above) // 2
        if (at := after(middle)).outcome is None:
            below = middle
        else:
            above, found = middle, at
    return found


def single(job: tuple[str, float, float, int, int]) -> list[tuple[str, int]]:
    """Outcome and pairs of tests that are judged alone; the job is noise, spread, change, trials, begin."""
    noise, spread, change, trials, begin = job
    rng = np.random.default_rng([zlib.crc32(f"{noise} {spread} {change}".encode()), begin])
    found = (decided(log_ratios(rng, noise, spread, change)) for _ in range(trials))
    return [(one.outcome.value if one.outcome else "open", one.pairs) for one in found]


def suite(job: tuple[int, float, float, int]) -> int:
    """The number of failing tests of one suite, all of them equally slow; the job is tests, spread, change, number."""
    tests, spread, change, number = job
    rng = np.random.default_rng([tests, round(1e6 * change), number])
    pairs = {str(test): log_ratios(rng, "normal", spread, change) for test in range(tests)}
    return sum(
        one.outcome is Outcome.FAIL
        for one in judge_pairs(pairs, dict.fromkeys(pairs, DELTA)).values()
    )


def simulate(trials: int, suites: int, known: dict[int, float], workers: int) -> dict[str, Any]:
    """The record: `trials` verdicts for each single row, `suites` suites for each size."""
    middle = known.get(32, min(known.values()))
    worlds = [("normal", spread) for spread in known.values()]
    worlds += [
        (noise, max(known.values()) if noise != "2 % slow mode" else middle)
        for noise in NOISES
        if noise != "normal"
    ]
    singles, families = [], []
    with ProcessPoolExecutor(workers) as pool:
        for noise, spread in worlds:
            for change in CHANGES:
                jobs = [
                    (noise, spread, change * DELTA, min(PART, trials - begin), begin)
                    for begin in range(0, trials, PART)
                ]
                found = [one for part in pool.map(single, jobs) for one in part]
                pairs = [count for outcome, count in found if outcome != "open"]
                row = {
                    "noise": noise,
                    "spread": spread,
                    "change": change,
                    "outcomes": dict(sorted(Counter(o for o, _ in found).items())),
                }
                low, high = (
                    np.quantile(pairs, (0.5, 0.95), method="inverted_cdf").tolist()
                    if pairs
                    else (None, None)
                )
                singles.append(row | {"pairs": {"median": low, "95%": high}})
        for tests in FAMILIES:
            for change in CHANGES[:2]:
                failed = list(
                    pool.map(
                        suite,
                        [(tests, middle, change * DELTA, number) for number in range(suites)],
                        chunksize=4,
                    )
                )
                families.append(
                    {
                        "tests": tests,
                        "change": change,
                        "suites": suites,
                        "alarmed": sum(map(bool, failed)),
                        "failed": sum(failed),
                    }
                )
    return {"kind": "duet_simulation", "simulated": True, "single": singles, "suites": families}


def promises(record: dict[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """The errors: name, count, trials, and the largest share that is promised."""
    for row in record["single"]:
        count = sum(row["outcomes"].values())
        name = f"{row['noise']}, {100 * row['spread']:.3f} %, {_code(row['change'])}"
        if row["change"] <= 1:
            yield f"{name}: FAIL", row["outcomes"].get("FAIL", 0), count, ALARM
        if row["change"] >= 1:
            yield f"{name}: PASS", row["outcomes"].get("PASS", 0), count, MISS
    for row in record["suites"]:
        yield (
            f"suites of {row['tests']}, {_code(row['change'])}: any FAIL",
            row["alarmed"],
            row["suites"],
            ALPHA if row["tests"] > 1 else ALARM,
        )


def missed(record: dict[str, Any]) -> list[str]:
    """Promises that are broken beyond doubt."""
    return [
        f"{name} in {100 * hits / count:.2f} %, promised {100 * most:g} %"
        for name, hits, count, most in promises(record)
        if interval(hits, count)[0] > most
    ]


def _code(change: float) -> str:
    return "same" if not change else f"{change:g} x"


COLUMNS = (
    ("same", "PASS"),
    ("same", "pairs"),
    ("1 x", "FAIL"),
    ("1 x", "PASS"),
    ("1.5 x", "FAIL"),
    ("2 x", "FAIL"),
    ("2 x", "pairs"),
    ("50 x", "FAIL"),
)
"""Columns of the table: the code, and the share of an outcome in percent, or the pairs that 95 % of the decided verdicts needed at most."""


def table(record: dict[str, Any]) -> str:
    """The record as text: a line for each noise."""
    count = max(sum(row["outcomes"].values()) for row in record["single"])
    lines = [
        f"SIMULATED, no GPU: max_regression {100 * DELTA:g} %, at most {ROUNDS} pairs; {count} tests in each case",
        "same: unchanged code; 1 x to 50 x: slower by so many times the limit; shares of verdicts in %",
        "spread: standard deviation between processes; pairs: of 95 % of the decided verdicts, at most",
        "",
        f"{'':<23}" + "".join(f"{code:>9}" for code, _ in COLUMNS),
        f"{'noise':<14}{'spread %':>9}" + "".join(f"{column:>9}" for _, column in COLUMNS),
    ]
    cases: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for row in record["single"]:
        cases.setdefault((row["noise"], row["spread"]), {})[_code(row["change"])] = row
    for (noise, spread), rows in cases.items():
        lines.append(
            f"{noise:<14}{100 * spread:>9.3f}"
            + "".join(_cell(rows[code], column) for code, column in COLUMNS)
        )
    lines += ["", f"{'tests':>5}{'code':>7}{'suites':>8}{'any FAIL %':>12}  interval"]
    for row in record["suites"]:
        low, high = (100 * bound for bound in interval(row["alarmed"], row["suites"]))
        share = 100 * row["alarmed"] / row["suites"]
        lines.append(
            f"{row['tests']:>5}{_code(row['change']):>7}{row['suites']:>8}{share:>12.2f}  {low:.2f} to {high:.2f}"
        )
    broken = missed(record)
    return "\n".join(
        [
            *lines,
            "",
            f"promises missed beyond doubt: {len(broken) or 'none'}",
            *(f"MISS  {sentence}" for sentence in broken),
        ]
    )


def _cell(row: dict[str, Any], column: str) -> str:
    if column == "pairs":
        return f"{row['pairs']['95%'] or '-':>9}"
    return f"{100 * row['outcomes'].get(column, 0) / sum(row['outcomes'].values()):>9.2f}"


def main() -> int:
    """Simulate, print and record."""
    assert __doc__
    parser = record_parser(__doc__, device=None)
    parser.add_argument(
        "--trials",
        type=int,
        default=2000,
        help="verdicts of each row of single tests (default 2000)",
    )
    parser.add_argument("--suites", type=int, default=600, help="suites of each size (default 600)")
    parser.add_argument(
        "--records",
        type=Path,
        nargs="+",
        default=list(RECORDS),
        metavar="FILE",
        help="where the spreads come from",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that draw (default 2)")
    options = parser.parse_args()
    if min(options.trials, options.suites, options.workers) < 1:
        parser.error(
            f"--trials {options.trials}, --suites {options.suites}, --workers {options.workers}: at least 1 of each"
        )
    record = simulate(options.trials, options.suites, spreads(options.records), options.workers)
    if options.json:
        write_record(options.json, record, indent=1)
    print(table(record))
    return 1 if missed(record) else 0


if __name__ == "__main__":
    sys.exit(main())
