"""SIMULATED: how often the gate errs, on processes drawn at random with the spreads that H200 cards showed.

No GPU takes part. A process's latency is drawn from a model: the shares of its session, itself and its placements, and its launch overhead.
The shipped judge gives every verdict, again with 3 and 12 processes of the run while more of them can decide: as for somebody who then
passes `--gpumem-processes`. Modelled rows draw what the judge assumes. The other rows draw what it does not assume. The simulation does not
show that a GPU is like the model.

    python ci/bench/gate_simulation.py --verdicts 4000 --json ci/records/no-gpu/gate_simulation.json

Exits with 1 if a modelled row misses a promise beyond doubt.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

from record_file import write_record

from pytest_gpumem.baselines.acceptance import refusal
from pytest_gpumem.baselines.history import Baseline, SavedProcess, SavedRow
from pytest_gpumem.devices.opening import choose
from pytest_gpumem.judging.judge import SETTLED, judge
from pytest_gpumem.judging.screen import (
    ALONE,
    ALPHA,
    LOWER,
    UPPER,
    Family,
    allowed,
    below,
    compared,
    judge_change,
)
from pytest_gpumem.judging.spread import difference
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import (
    Conditions,
    Limits,
    Measurement,
    MovedBytes,
    Provenance,
    Repeat,
)
from pytest_gpumem.records.row import ENOUGH, Row, Verdict
from pytest_gpumem.records.what_ran import WhatRan

FACTS = choose("sim:h200").facts
ALARM, MISS, ACCEPTED = 1e-3, 5e-3, 0.98
"""Promised: largest share of FAIL for unchanged code, largest share of PASS at the limit, least share of PASS where it is asked for."""
MISS_SAME_CODE = 0.05
"""Promised: largest share of PASS for a slow-down of the limit that the machine code does not show."""
DOUBT = 0.005
"""Error of each bound on a share."""
SUITE, SLOW_ROWS, SLOW = 300, 15, 0.02
"""Rows of a suite; those of them with a slow mode; by what share a process in that mode is slower."""
LOOKS = (1, ENOUGH, 12)
"""Processes of a run after which it is judged."""
NOTHING = "0.001%"
"""A limit so small that unchanged code lies at it."""
PLACEMENTS = 8
"""Of a measurement, by default."""
OVERHEAD, OVERHEAD_SPREAD = 3.2e-6, 52e-9
"""Seconds of launch overhead, and its spread between processes."""
DAY = datetime(2026, 1, 1, tzinfo=timezone.utc)
CONDITIONS = (Conditions(sm_clock_hz=1.98e9, memory_clock_hz=3.2e9),) * 2


@dataclass(frozen=True)
class Kernel:
    """A triad as H200 cards showed it (`pytest_gpumem.judging.spread`); spreads are shares of the latency."""

    mib: int
    latency: float
    placement: float
    process: float
    session: float
    limit: float


SMALL = Kernel(2, 5.4e-6, placement=0.0094, process=0.0051, session=0.0025, limit=0.02)
MIDDLE = Kernel(32, 24.8e-6, placement=0.0029, process=0.0012, session=0.0007, limit=0.01)
LARGE = Kernel(256, 183e-6, placement=0.0016, process=0.00037, session=0.0004, limit=0.01)


class Runs(NamedTuple):
    """The runs of a baseline."""

    runs: int
    processes: int
    """Of each run."""
    sessions: int

    def __str__(self) -> str:
        return f"{self.runs} x {self.processes} in {self.sessions}"


USUAL = Runs(20, 1, 5)
MODELLED = (
    Runs(3, 1, 3),
    Runs(3, 3, 3),
    Runs(1, 3, 1),
    USUAL,
    Runs(20, 1, 20),
    Runs(20, 1, 1),
    Runs(3, 3, 1),
)


@dataclass(frozen=True)
class Case:
    """A row of the record: what is drawn, and how it is judged."""

    group: str
    kernel: Kernel
    baseline: Runs = USUAL
    slower: float = 0.0
    """By how much the code is slower, over the limit; each night, as a share, where there are nights."""
    note: str = ""
    """What the judge does not assume; empty for a modelled row."""
    limit: str = ""
    """`max_regression`; the kernel's by default."""
    looks: tuple[int, ...] = LOOKS
    shape: str = "normal"
    """Of what sessions and processes add: "normal", "t2", "t3" or "bimodal"."""
    spread: float = 1.0
    """Factor of the spreads of processes and sessions."""
    now: float = 1.0
    """The same, of this run alone."""
    inside: bool = False
    """`now` holds for placements too."""
    days: float = 1.0
    """Factor of the spread of sessions."""
    slow: float = 0.0
    """Probability that a process is in a mode that is slower by `SLOW`."""
    nights: int = 0
    """Runs that follow each other; each is accepted by the shipped rule or not. 0: the baseline is drawn."""
    suite: int = 1
    """Rows that are judged together."""
    weight: float = 1.0
    """Verdicts, over `--verdicts`."""
    asked: bool = False
    """Promised to pass where it is unchanged."""
    same_code: bool = field(default=False, repr=False)
    """The same machine code ran, whatever is slower. Not in the seed, which `repr` gives: its cases have a group of their own."""

    @property
    def held_to(self) -> Limits:
        return Limits(max_regression=self.limit or f"{100 * self.kernel.limit:g}%")


class Drawn(Measurement, frozen=True, dict=True):
    """A measurement whose medians are worked out once: it is judged in many windows."""

    @cached_property
    def medians(self) -> tuple[float, ...]:
        return tuple(placement[0] for placement in self.placements)


@cache
def begun(day: int) -> str:
    """Start of a day's session."""
    return (DAY + timedelta(days=day)).isoformat()


class Source:
    """Draws the measurements of a case; the same seed gives the same ones."""

    def __init__(self, case: Case, seed: Sequence[int]) -> None:
        self.case, self._kernel = case, case.kernel
        self._random = np.random.default_rng(seed)

    def standard(self, count: int) -> Any:
        """Deviations: standard deviation 1; Student's t has the quartiles of a normal."""
        shape = self.case.shape
        if shape in ("t2", "t3"):
            freedom, quartile = {"t2": (2, 0.8165), "t3": (3, 0.7649)}[shape]
            return self._random.standard_t(freedom, count) * 0.6745 / quartile
        if shape == "bimodal":
            # One process in five is slower; four parts of the variance lie between the modes, one within them.
            slow = self._random.random(count) < 0.2
            return (2.0 * slow - 0.4) / 0.8 * math.sqrt(0.8) + self._random.normal(
                0, math.sqrt(0.2), count
            )
        return self._random.normal(0, 1, count)

    def session(self, factor: float = 1.0) -> float:
        """What a session adds."""
        return (
            float(self.standard(1)[0])
            * self._kernel.session
            * self.case.days
            * self.case.spread
            * factor
        )

    def history(self) -> list[Measurement]:
        """The baseline's runs, shared out evenly over its sessions."""
        runs, processes, sessions = self.case.baseline
        shifts = np.array([self.session() for _ in range(sessions)])
        drawn = self.processes(np.repeat(shifts[np.arange(runs) % sessions], processes))
        return [
            self.run(drawn[first : first + processes], first // processes % sessions)
            for first in range(0, len(drawn), processes)
        ]

    def head(self) -> Measurement:
        """The run to be judged, with the processes of the last look, in a session of its own."""
        case = self.case
        change = math.log1p(case.slower * case.kernel.limit)
        shifts = np.repeat(self.session(case.now) + change, case.looks[-1])
        return self.run(self.processes(shifts, case.now), 400)

    def night(self, number: int) -> Measurement:
        """The run of a night."""
        shift = self.session() + number * math.log1p(self.case.slower)
        return self.run(self.processes(np.repeat(shift, self.case.looks[-1])), number)

    def processes(self, shifts: Any, factor: float = 1.0) -> list[Repeat]:
        """One process for each shift, a logarithm."""
        case, kernel, random, count = self.case, self._kernel, self._random, len(shifts)
        own = shifts + self.standard(count) * kernel.process * case.spread * factor
        own += math.log1p(SLOW) * (random.random(count) < case.slow)
        placement = kernel.placement * (factor if case.inside else 1.0)
        overheads = OVERHEAD + OVERHEAD_SPREAD * random.normal(0, 1, count)
        logs = own[:, None] + random.normal(0, placement, (count, PLACEMENTS))
        medians = kernel.latency * np.exp(logs) + (overheads - OVERHEAD)[:, None]
        return [
            Repeat(*one)
            for one in zip(map(tuple, medians.tolist()), overheads.tolist(), strict=True)
        ]

    def run(self, processes: Sequence[Repeat], day: int) -> Measurement:
        """The measurement of a run."""
        first, kernel = processes[0], self._kernel
        return Drawn(
            label="",
            target="triad",
            mode="clean-cold",
            sampler="blocked",
            sampler_reason="",
            placements=tuple(zip(first.medians, strict=True)),
            half_width=None,
            moved_bytes=MovedBytes(2 * kernel.mib << 20, kernel.mib << 20),
            footprint=3 * kernel.mib << 20,
            floor=1.3e-6,
            conditions=CONDITIONS,
            overhead=first.overhead,
            provenance=Provenance(begun(day), "a card"),
            further=tuple(processes[1:]),
            what_ran=WhatRan("the same") if self.case.same_code else None,
        )


def decidable(
    measurement: Measurement, limits: Limits, verdict: Verdict, history: Sequence[Measurement]
) -> bool:
    """Return True if the processes of the last look decide an undecided row, should its change stay the same."""
    processes = 1 + len(measurement.further)
    if (
        verdict.outcome is not Outcome.UNDECIDED
        or verdict.code is Code.CONDITIONS
        or processes >= LOOKS[-1]
    ):
        return False
    found, delta = difference(measurement, history), allowed(limits.max_regression, history)
    change = judge_change(
        measurement, found, compared(found, delta), delta, limits.max_regression or ""
    )
    since_first = verdict.comparison is not None and verdict.comparison.since_first is not None
    if (change.code is Code.LOOKS_SLOWER or since_first) and processes < ENOUGH:
        return True
    last, limit = replace(found, measured=LOOKS[-1]), math.log1p(delta)
    same_code = verdict.comparison is not None and verdict.comparison.same_code
    if change.code in SETTLED and same_code and below(last, delta):
        return True
    known = found.has_prior or found.runs >= ENOUGH
    variance = last.variance()
    return known and not found.log - variance.reach(LOWER) <= limit <= found.log + variance.reach(
        UPPER
    )


def judged(
    case: Case,
    run: Measurement,
    history: Sequence[Measurement],
    family: Family = ALONE,
    first: Sequence[Measurement] = (),
) -> tuple[Verdict, Measurement]:
    """The verdict on a run, repeated as long as more processes can decide; and what of the run was measured for it."""
    for look in case.looks:
        seen = structs.replace(run, further=run.further[: look - 1])
        found = judge(seen, case.held_to, FACTS, history, family=family, first=first)
        row = Row("", case.held_to, OPEN, seen)
        verdict = with_verdict(
            row, found.findings, comparison=found.comparison, simulated=FACTS.simulated
        ).verdict
        if not decidable(seen, case.held_to, verdict, history):
            break
    return verdict, seen


@dataclass
class Tally:
    """What came of the verdicts of a case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    processes: int = 0
    groups: int = 0
    """Suites; of one row, histories."""
    alarmed: int = 0
    """Groups with a FAIL."""
    failed_at: list[float] = field(default_factory=list)
    """By history that grew slower: the change since its first run at its first FAIL."""

    def add(self, verdict: Verdict, seen: Measurement) -> bool:
        """True for a FAIL."""
        self.outcomes[verdict.outcome.value] += 1
        self.processes += 1 + len(seen.further)
        return verdict.outcome is Outcome.FAIL

    def merge(self, part: Tally) -> None:
        """Count in what came of a part of the case."""
        self.outcomes.update(part.outcomes)
        self.processes += part.processes
        self.groups += part.groups
        self.alarmed += part.alarmed
        self.failed_at += part.failed_at


def play(job: tuple[Case, int, tuple[int, ...]]) -> Tally:
    """The verdicts of a part of a case: the case, verdicts (or suites, or histories), seed."""
    case, count, seed = job
    tally = Tally()
    if case.nights:
        for index in range(count):
            _nights(case, (*seed, index), tally)
        return tally
    if case.suite == 1:
        source = Source(case, seed)
        for _ in range(count):
            tally.add(*judged(case, source.head(), source.history()))
        return tally
    sources = [
        Source(replace(case, kernel=kernel), (*seed, kernel.mib))
        for kernel in (SMALL, MIDDLE, LARGE)
    ]
    for _ in range(count):
        family, alarmed = Family(case.suite), False
        for row in range(case.suite):
            source = sources[row % 3]
            verdict, seen = judged(source.case, source.head(), source.history(), family)
            alarmed |= tally.add(verdict, seen)
            family = family.after(verdict)
        tally.groups, tally.alarmed = tally.groups + 1, tally.alarmed + alarmed
    return tally


def _nights(case: Case, seed: tuple[int, ...], tally: Tally) -> None:
    """A history of nightly runs, each against the window of those accepted before; in a suite, `SLOW_ROWS` of them side by side."""
    sources = [Source(case, (*seed, row)) for row in range(1 if case.suite == 1 else SLOW_ROWS)]
    accepted: list[list[SavedRow]] = [[] for _ in sources]
    any_alarm = False
    for night in range(case.nights):
        family, alarmed = Family(case.suite), False
        for source, rows in zip(sources, accepted, strict=True):
            known = Baseline({"": tuple(rows)}).history("", lambda _: True)
            first = known.first_measurements
            verdict, seen = judged(case, source.night(night), known.measurements, family, first)
            family = family.after(verdict)
            if known.measurements:
                alarmed |= tally.add(verdict, seen)
            if refusal(Row("", case.held_to, verdict, seen), simulated=True) is None:
                process = SavedProcess(str(night), DAY + timedelta(days=night), None, FACTS)
                # No window reaches back further than this; the first run is kept.
                rows[:] = [*rows[:3], *rows[3:][-20:], SavedRow("", seen, process)]
        any_alarm |= alarmed
        if case.suite > 1:
            tally.groups, tally.alarmed = tally.groups + 1, tally.alarmed + alarmed
        elif alarmed and case.slower:
            tally.failed_at.append(math.expm1(night * math.log1p(case.slower)))
            break
    if case.suite == 1:
        tally.groups, tally.alarmed = tally.groups + 1, tally.alarmed + any_alarm


def cases() -> Iterator[Case]:
    """All rows of the record."""
    every = (LARGE, MIDDLE, SMALL)
    for kernel in every:
        for baseline in MODELLED:
            for slower in (0, 1):
                yield Case("modelled", kernel, baseline, slower)
            for much_slower in (1.5, 2):
                yield Case("modelled", kernel, baseline, much_slower, weight=0.1)
    for kernel in (LARGE, MIDDLE):
        for baseline in (USUAL, Runs(20, 1, 20)):
            yield Case(
                "modelled, every run of 3 processes",
                kernel,
                baseline,
                looks=(3,),
                weight=0.5,
                asked=True,
            )
    for kernel in every:
        for baseline in MODELLED:
            yield Case(
                "modelled, limit of next to nothing, run of 3 to 12",
                kernel,
                baseline,
                limit=NOTHING,
                looks=LOOKS[1:],
            )
    for limit, looks, baseline, weight in (
        ("", LOOKS, USUAL, 0.01),
        (NOTHING, LOOKS[1:], USUAL, 0.02),
        (NOTHING, LOOKS[1:], MODELLED[1], 0.04),
    ):
        yield Case(
            "modelled, suites of 300",
            LARGE,
            baseline,
            limit=limit,
            looks=looks,
            suite=SUITE,
            weight=weight,
        )
    for days in (2, 4):
        for kernel in (LARGE, MIDDLE):
            for baseline in MODELLED[-2:]:
                for slower in (0, 1):
                    yield Case(
                        "baseline of one session, judged on another day",
                        kernel,
                        baseline,
                        slower,
                        f"days differ {days} x",
                        days=days,
                    )
    for slow in (0.02, 0.1, 0.3):
        for kernel in (LARGE, MIDDLE):
            yield Case(
                "slow mode, 60 nights",
                kernel,
                note=f"2 % slow, p = {slow:g}",
                slow=slow,
                nights=60,
                weight=0.03,
            )
    group = f"slow mode, 60 nights, suites of {SUITE} with {SLOW_ROWS} such rows"
    for slow in (0.02, 0.1, 0.3):
        yield Case(
            group,
            LARGE,
            note=f"2 % slow, p = {slow:g}",
            slow=slow,
            nights=60,
            suite=SUITE,
            weight=0.003,
        )
    for spread in (8, 15):
        for kernel in (LARGE, MIDDLE):
            for baseline in (*MODELLED[:2], USUAL, Runs(20, 1, 20)):
                yield Case(
                    "spread above its prior",
                    kernel,
                    baseline,
                    1,
                    f"{spread} x",
                    spread=spread,
                    weight=0.5,
                )
    for now in (5, 10):
        for inside in (False, True):
            for kernel in (LARGE, MIDDLE):
                for slower in (0, 1):
                    note = f"{now} x, {'seen' if inside else 'not seen'} inside"
                    yield Case(
                        "noisier than its baseline",
                        kernel,
                        USUAL,
                        slower,
                        note,
                        now=now,
                        inside=inside,
                        weight=0.5,
                    )
    for night in (0, 0.0001, 0.0003):
        note = f"+{100 * night:g} % a night" if night else "unchanged"
        for kernel in (LARGE, MIDDLE):
            yield Case(
                "creep, 200 nights", kernel, slower=night, note=note, nights=200, weight=0.015
            )
    for shape in ("t2", "t3", "bimodal"):
        for kernel in every:
            for baseline in (MODELLED[1], USUAL):
                for slower in (0, 1):
                    yield Case("tails", kernel, baseline, slower, shape, shape=shape, weight=0.5)
    for kernel, note in (
        (MIDDLE, ""),
        (SMALL, ""),
        *(
            (replace(MIDDLE, process=noise), f"processes by {100 * noise:g} %")
            for noise in (0.002, 0.004, 0.008)
        ),
    ):
        for baseline in (*MODELLED[:4], MODELLED[-1]):
            for slower in (0, 1, 2):
                yield Case(
                    "same code, slower by another cause",
                    kernel,
                    baseline,
                    slower,
                    note,
                    same_code=True,
                    weight=0.5,
                )


def simulate(count: int, workers: int, chosen: Sequence[Case] | None = None) -> dict[str, Any]:
    """The record.

    Args:
        count: verdicts of a case of weight 1.
        workers: processes; the result does not depend on them.
        chosen: the cases; by default all of them.
    """
    wanted = list(cases() if chosen is None else chosen)
    jobs = []
    for index, case in enumerate(wanted):
        total, size = (
            max(round(count * case.weight), 1),
            500 if case.suite == 1 and not case.nights else 4,
        )
        seed = zlib.crc32(repr(case).encode())
        jobs += [
            (index, (case, min(size, total - begin), (seed, begin)))
            for begin in range(0, total, size)
        ]
    found = [Tally() for _ in wanted]
    with ProcessPoolExecutor(workers) as pool:
        for (index, _), part in zip(jobs, pool.map(play, [job for _, job in jobs]), strict=True):
            found[index].merge(part)
    rows = [_row(case, tally) for case, tally in zip(wanted, found, strict=True)]
    return {"kind": "gate_simulation", "simulated": True, "verdicts": count, "rows": rows}


def _row(case: Case, tally: Tally) -> dict[str, Any]:
    kernel = "2, 32, 256" if case.suite > 1 and not case.nights else str(case.kernel.mib)
    row: dict[str, Any] = {
        "group": case.group,
        "mib": kernel,
        "limit": case.held_to.max_regression,
        "note": case.note,
    }
    row["limit"] = "1%, 2%" if "," in kernel and not case.limit else row["limit"]
    row |= {
        "baseline": "nightly" if case.nights else str(case.baseline),
        "slower": case.slower,
        "asked": case.asked,
    }
    row |= {"same_code": True} if case.same_code else {}
    row |= {"outcomes": dict(sorted(tally.outcomes.items())), "processes": tally.processes}
    if case.suite > 1:
        row |= {"suites": tally.groups, "alarmed": tally.alarmed}
    elif case.nights:
        row |= {"histories": tally.groups, "alarmed": tally.alarmed}
    if tally.failed_at:
        low, middle, high = np.quantile(tally.failed_at, (0.05, 0.5, 0.95), method="inverted_cdf")
        row["failed_at"] = {
            "5%": round(float(low), 6),
            "median": round(float(middle), 6),
            "95%": round(float(high), 6),
        }
    return row


def interval(hits: int, count: int) -> tuple[float, float]:
    """Clopper-Pearson interval of a share."""
    low = float(beta.ppf(DOUBT, hits, count - hits + 1)) if hits else 0.0
    return low, float(beta.ppf(1 - DOUBT, hits + 1, count - hits)) if hits < count else 1.0


def promises(row: dict[str, Any]) -> Iterator[tuple[str, int, int, float]]:
    """Of a row: what must be rare, how often it came, among how many, and the largest share that is promised."""
    outcomes, growing = row["outcomes"], "failed_at" in row
    count = sum(outcomes.values())
    if not row["slower"]:
        yield "unchanged code fails", outcomes.get("FAIL", 0), count, ALARM
        if "suites" in row:
            yield "unchanged suites fail", row["alarmed"], row["suites"], ALPHA
        if row["asked"]:
            yield (
                "unchanged code does not pass",
                count - outcomes.get("PASS", 0),
                count,
                1 - ACCEPTED,
            )
    elif not growing and row["slower"] == 1:
        yield (
            "a slow-down of the limit passes",
            outcomes.get("PASS", 0),
            count,
            MISS_SAME_CODE if row.get("same_code") else MISS,
        )


def missed(record: dict[str, Any], *, modelled: bool) -> list[str]:
    """Promises that rows break beyond doubt, of modelled rows or of the others."""
    found = []
    for row in record["rows"]:
        for what, hits, count, most in promises(row):
            low, high = interval(hits, count)
            if low > most and modelled == (not row["note"]):
                place = ", ".join(
                    filter(None, (row["group"], row["note"], f"{row['mib']} MiB", row["baseline"]))
                )
                found.append(
                    f"{place}:\n      {what} in {100 * hits / count:.2f} % ({100 * low:.2f} to {100 * high:.2f}), promised {100 * most:g} %"
                )
    return found


COLUMNS = (
    (0, "FAIL", max),
    (0, "PASS", min),
    (1, "PASS", max),
    (1.5, "FAIL", min),
    (2, "PASS", max),
    (2, "FAIL", min),
)
"""Columns of the table: slow-down over the limit, outcome, and which of several baselines is the worst."""
BROKEN = {
    "unchanged code fails": 0,
    "unchanged code does not pass": 1,
    "a slow-down of the limit passes": 2,
}
"""The column that shows each promise."""


def table(record: dict[str, Any]) -> str:
    """The record as text: modelled rows one by one, of the others the worst of sizes and baselines."""
    total = sum(sum(row["outcomes"].values()) for row in record["rows"])
    counts = [len(missed(record, modelled=modelled)) for modelled in (True, False)]
    heads = (
        (f"{slower:g} x" if slower else "same" for slower, _, _ in COLUMNS),
        (outcome for _, outcome, _ in COLUMNS),
    )
    above, below = ("".join(f"{head:>9}" for head in row) for row in heads)
    lines = [
        f"SIMULATED, no GPU: {total} verdicts on processes drawn with the spreads that H200 cards showed",
        "same: unchanged code; 1 x, 1.5 x, 2 x: slower by so many times the limit; shares of verdicts in %",
        "baseline: runs x processes in sessions; of several sizes or baselines the worst",
        f"!: misses its promise beyond doubt: {counts[0]} modelled rows, {counts[1]} others",
        "",
        f"{'':54}{above}",
        f"{'':21}{'MiB':>12} {'limit':>7} {'baseline':>12}{below}",
    ]
    for group, rows in itertools.groupby(record["rows"], lambda row: str(row["group"])):
        lines += ["", group]
        places: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in rows:
            place = (
                row["note"],
                row["limit"],
                *((row["mib"], row["baseline"]) if group == "modelled" else ()),
            )
            places.setdefault(place, []).append(row)
        for (note, limit, *_), same in places.items():
            sizes, baselines = (
                list(dict.fromkeys(row[name] for row in same)) for name in ("mib", "baseline")
            )
            baseline = baselines[0] if len(baselines) == 1 else f"{len(baselines)} of them"
            cells = "".join(_cell(same, number) for number in range(len(COLUMNS)))
            lines += [
                f"{note:21}{', '.join(sizes):>12} {limit:>7} {baseline:>12}{cells}".rstrip(),
                *_groups(same),
            ]
    return "\n".join(lines)


def _cell(rows: list[dict[str, Any]], number: int) -> str:
    """A share in percent, of the worst of these rows; blank if none has that slow-down."""
    slower, outcome, worst = COLUMNS[number]
    asked = [row for row in rows if row["slower"] == slower]
    if not asked:
        return " " * 9
    share = worst(row["outcomes"].get(outcome, 0) / sum(row["outcomes"].values()) for row in asked)
    broken = any(
        BROKEN.get(what) == number and interval(hits, count)[0] > most
        for row in asked
        for what, hits, count, most in promises(row)
    )
    return f"{'!' * broken + format(100 * share, '.2f'):>9}"


def _groups(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How many suites or histories have a FAIL, all together."""
    for kind in ("suites", "histories"):
        if counted := [row for row in rows if kind in row]:
            alarmed, count = (sum(row[name] for row in counted) for name in ("alarmed", kind))
            low, high = interval(alarmed, count)
            found = f"{'':24}FAIL in {alarmed} of {count} {kind} ({100 * low:.2f} to {100 * high:.2f} %)"
            if at := [row["failed_at"]["median"] for row in counted if "failed_at" in row]:
                found += f", at {100 * min(at):+.2f} to {100 * max(at):+.2f} % (medians)"
            yield found


def main() -> int:
    """Simulate, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--verdicts",
        type=int,
        default=400,
        help="of each row; rows of histories and suites have fewer (default 400)",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes that draw (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record is written")
    options = parser.parse_args()
    if min(options.verdicts, options.workers) < 1:
        parser.error(
            f"--verdicts {options.verdicts}, --workers {options.workers}: at least 1 of each"
        )
    record = simulate(options.verdicts, options.workers)
    if options.json:
        write_record(options.json, record, indent=1)
    broken = missed(record, modelled=True)
    print(
        "\n".join(
            [
                table(record),
                "",
                *(f"MISS  {sentence}" for sentence in (*broken, *missed(record, modelled=False))),
            ]
        )
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
