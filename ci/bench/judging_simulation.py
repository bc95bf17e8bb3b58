"""SIMULATED: what the gate does under noise that nobody fitted it to: creep, steps, days, hosts, slow modes.

No GPU takes part. Processes are drawn with spreads that are not those of the gate's priors (`SIZES`), with 0.3 % between days or without;
the shipped functions judge them. `gate_simulation` draws what the gate assumes.

    python ci/bench/judging_simulation.py --json ci/records/no-gpu/judging_simulation.json
    python ci/bench/judging_simulation.py creep duet --count 20     # two questions, with few histories

Exits with 1 if an answer misses its target.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set

import gate_simulation as gate
from gate_validation_verdicts import Data, baseline_of, joined
from record_file import write_record

from pytest_gpumem.baselines.acceptance import improvement, refusal
from pytest_gpumem.baselines.history import Baseline, SavedProcess, SavedRow
from pytest_gpumem.judging.finding import Judgement
from pytest_gpumem.judging.judge import judge, repeatable
from pytest_gpumem.judging.paired import MODE, judge_pairs
from pytest_gpumem.judging.screen import ALONE, LOOKS, Family
from pytest_gpumem.judging.verdict import OPEN, with_verdict
from pytest_gpumem.outcomes import Code, Outcome
from pytest_gpumem.records.measurement import Limits, Measurement, Provenance, Repeat
from pytest_gpumem.records.row import ENOUGH, Row, Verdict
from pytest_gpumem.records.what_ran import WhatRan

LIMIT = 0.01
HELD = Limits(max_regression="1%")
DAYS = 0.003
"""What a day adds, as a standard deviation: an assumption."""
SIZES = {
    256: gate.Kernel(256, 183e-6, placement=0.0016, process=0.0002, session=0.0004, limit=LIMIT),
    32: gate.Kernel(32, 24.8e-6, placement=0.0029, process=0.0015, session=0.0007, limit=LIMIT),
    4: gate.Kernel(4, 7.2e-6, placement=0.007, process=0.01, session=0.002, limit=LIMIT),
    2: gate.Kernel(2, 5.4e-6, placement=0.0094, process=0.005, session=0.0025, limit=LIMIT),
}
"""By MiB. The spread between processes holds the part of their placements, whose mean is that of the process."""
BASELINES = {"1x3": (1, 3, 1), "3x3": (3, 3, 3), "20x1": (20, 1, 20), "20x1, one day": (20, 1, 1)}
"""Runs, processes of each, and days."""
H100 = Path("ci/records/nvidia-h100/gate_validation_minute.json")


class Source:
    """Draws runs of one row."""

    def __init__(self, mib: int, *seed: object, days: float = 0.0, same_code: bool = False) -> None:
        """`days`: standard deviation of what a day adds."""
        self.kernel, self._sd, self._days = SIZES[mib], days, dict[tuple[int, str], float]()
        self._random = np.random.default_rng(zlib.crc32(repr((mib, *seed)).encode()))
        self._ran = WhatRan("the same") if same_code else None
        self._template = gate.Source(gate.Case("", self.kernel), (1,)).run(
            [Repeat((1e-5,), 0.0)], 0
        )

    def run(
        self,
        change: float,
        processes: int,
        day: int,
        hour: float = 0.0,
        card: str = "a card",
        *,
        shared: bool = False,
    ) -> Measurement:
        """A run.

        Args:
            change: by how much it is slower, as a share.
            shared: runs of a day and card share their session.
        """
        random, kernel = self._random, self.kernel
        of_day = self._days.setdefault((day, card), random.normal(0, self._sd) if self._sd else 0.0)
        logs = (
            math.log1p(change)
            + of_day
            + (0.0 if shared else random.normal(0, kernel.session))
            + random.normal(0, kernel.process, processes)
        )
        overheads = gate.OVERHEAD + gate.OVERHEAD_SPREAD * random.normal(0, 1, processes)
        times = kernel.latency * np.exp(logs) + overheads - gate.OVERHEAD
        placed = random.normal(0, kernel.placement, (processes, gate.PLACEMENTS))
        medians = times[:, None] * (1 + placed - placed.mean(axis=1, keepdims=True))
        first, *further = [
            Repeat(*one)
            for one in zip(map(tuple, medians.tolist()), overheads.tolist(), strict=True)
        ]
        begun = (gate.DAY + timedelta(days=day, hours=hour)).isoformat()
        return structs.replace(
            self._template,
            placements=tuple(zip(first.medians, strict=True)),
            overhead=first.overhead,
            provenance=Provenance(begun, card, None),
            further=tuple(further),
            what_ran=self._ran,
        )

    def baseline(self, runs: int, processes: int, days: int) -> list[Measurement]:
        """Runs on so many days; those of one day an hour and some apart."""
        return [
            self.run(0.0, processes, index % days, 1.2 * (index // days)) for index in range(runs)
        ]


def saved(measurement: Measurement, day: int) -> SavedRow:
    """A saved run."""
    return SavedRow(
        "", measurement, SavedProcess(str(day), gate.DAY + timedelta(days=day), None, gate.FACTS)
    )


def given(found: Judgement, measurement: Measurement) -> Verdict:
    """The verdict that a judgement gives its row."""
    return with_verdict(
        Row("", HELD, OPEN, measurement),
        found.findings,
        comparison=found.comparison,
        simulated=True,
    ).verdict


def screened(
    run: Measurement, rows: list[SavedRow], looks: tuple[int, ...] = LOOKS, family: Family = ALONE
) -> tuple[Verdict, Measurement]:
    """The verdict on a run, and what of it was measured. `looks`: numbers of processes."""
    known = Baseline({"": tuple(rows)}).history("", lambda _: True)
    for look in looks:
        seen = structs.replace(run, further=run.further[: look - 1])
        verdict = given(
            judge(
                seen,
                HELD,
                gate.FACTS,
                known.measurements,
                first=known.first_measurements,
                family=family,
            ),
            seen,
        )
        if not repeatable(seen, HELD, verdict, known.measurements):
            break
    return verdict, seen


@dataclass
class Main:
    """A main branch that saves its runs, and resets its baseline, by the shipped rules."""

    looks: tuple[int, ...]
    rows: list[SavedRow] = field(default_factory=list)
    resets: int = 0

    def night(self, run: Measurement, day: int) -> Verdict:
        """The verdict on a run, which is saved if it may be. The first three saves take three processes."""
        verdict, seen = screened(
            run, self.rows, self.looks if len(self.rows) >= ENOUGH else (ENOUGH,)
        )
        row = Row("", HELD, verdict, seen)
        if refusal(row, simulated=True) is None:
            gain = improvement(row, [one.measurement for one in self.rows])
            self.resets += gain is not None
            self.rows = [*([] if gain is not None else self.rows), saved(seen, day)]
        return verdict


@dataclass(frozen=True)
class Answer:
    """One line of the table."""

    question: str
    of: str
    figure: float
    target: str
    """Such as "<= 0.035"; empty where none is set."""
    more: str = ""

    @property
    def missed(self) -> bool:
        """True if the figure is not as the target says."""
        if not self.target:
            return False
        sign, value = self.target.split()
        return self.figure > float(value) if sign == "<=" else self.figure < float(value)


def creep(count: int) -> Iterator[Answer]:
    """How far code creeps that is slower by a little every run. Runs of 3 processes, a week apart."""
    for step, targets in (
        (0.004, {256: 0.035, 32: 0.035, 2: 0.05}),
        (0.001, {256: 0.02, 32: 0.02, 2: 0.035}),
    ):
        for mib, target in targets.items():
            caught = []
            for index in range(count):
                source, main, night = Source(mib, "creep", step, index), Main((3,)), 0
                while (
                    main.night(source.run((1 + step) ** night - 1, 3, 7 * night), 7 * night).outcome
                    is not Outcome.FAIL
                    and night < 150
                ):
                    night += 1
                caught.append((1 + step) ** night - 1)
            yield Answer(
                "creep: first FAIL (median)",
                f"+{step:.1%} a run, {mib} MiB",
                statistics.median(caught),
                f"<= {target}",
            )


def unchanged(count: int) -> Iterator[Answer]:
    """Unchanged histories of 150 runs."""
    failed = histories = 0
    for mib in (256, 32, 2):
        for index in range(5 * count):
            source, main = Source(mib, "unchanged", index), Main((3,))
            failed += Outcome.FAIL in [
                main.night(source.run(0.0, 3, night), night).outcome for night in range(150)
            ]
            histories += 1
    yield Answer(
        "unchanged histories of 150 runs with a FAIL",
        f"{histories} of 3 sizes",
        failed / histories,
        f"<= {1 / 600:.5f}",
    )


def step(count: int) -> Iterator[Answer]:
    """A step on main after twenty nights: nights of the ten that follow until it is named. And how often it passes later."""
    for mib, change, target in (
        (256, 0.015, 0.95),
        (32, 0.015, 0.95),
        (2, 0.03, 0.95),
        (32, 0.012, None),
        (2, 0.02, None),
    ):
        for looks in ((1, *LOOKS[1:]), (3,)):
            named, passes, nights = 0, 0, 0
            for index in range(10 * count):
                source, main = Source(mib, "step", change, index), Main(looks)
                outcomes = [
                    main.night(source.run(change if night >= 20 else 0.0, 12, night), night).outcome
                    for night in range(50)
                ]
                named += Outcome.FAIL in outcomes[20:30]
                passes += outcomes[40:].count(Outcome.PASS)
                nights += 10
            of = f"+{change:.1%}, {mib} MiB, saves of {'auto' if looks[0] == 1 else '3'}"
            yield Answer(
                "step on main: named within 10 nights",
                of,
                named / (10 * count),
                f">= {target}" if target else "",
            )
            yield Answer(
                "step on main: PASS in nights 21 to 30",
                of,
                passes / nights,
                "" if target is None else "<= 0.05",
            )


def _screens(
    count: int, mib: int, name: str, change: float, days: float, *, same_code: bool, apart: int = 30
) -> Counter[str]:
    found: Counter[str] = Counter()
    for index in range(count):
        source = Source(
            mib, "screen", name, change, days, same_code, index, days=days, same_code=same_code
        )
        rows = [saved(one, day) for day, one in enumerate(source.baseline(*BASELINES[name]))]
        verdict, seen = screened(source.run(change, 12, apart), rows)
        found[verdict.outcome.value] += 1
        found["looks slower"] += verdict.code is Code.LOOKS_SLOWER
        found["processes"] += 1 + len(seen.further)
    return found


def same_code(count: int) -> Iterator[Answer]:
    """The screen's PASS of the same machine code that is slower by another cause; all else goes to a duet in a gate."""
    for mib in SIZES:
        for name in BASELINES:
            for days in (0.0, DAYS):
                for change in (0.0, 0.01, 0.02):
                    found = _screens(5 * count, mib, name, change, days, same_code=True)
                    target = (
                        "<= 0.05" if change == 0.02 and mib != 4 and name in ("3x3", "20x1") else ""
                    )
                    of = f"{mib} MiB, {name}, days {days:.1%}, {change / LIMIT:+.0f} limits"
                    more = f"{found['processes'] / (5 * count):.1f} processes"
                    yield Answer(
                        "same code: green without a duet",
                        of,
                        found["PASS"] / (5 * count),
                        target,
                        more,
                    )


def by_time(count: int) -> Iterator[Answer]:
    """Verdicts by time alone."""
    for mib in SIZES:
        for name in BASELINES:
            for days in (0.0, DAYS):
                for change in (0.0, 0.01, 0.015, 0.03):
                    number = (80 if change == 0.01 else 5) * count
                    found = _screens(number, mib, name, change, days, same_code=False)
                    of = f"{mib} MiB, {name}, days {days:.1%}, {change / LIMIT:+.1f} limits"
                    passes, fails = found["PASS"] / number, found["FAIL"] / number
                    at = change == 0.01
                    yield Answer(
                        "by time: PASS",
                        of,
                        passes,
                        "<= 0.01" if at else "",
                        f"{found['processes'] / number:.1f} processes",
                    )
                    yield Answer(
                        "by time: FAIL",
                        of,
                        fails,
                        "<= 0.005" if at else "<= 0" if not change else "",
                    )


def looks_slower(count: int) -> Iterator[Answer]:
    """Suites of fifteen unchanged rows of three sizes."""
    for name in BASELINES:
        for days in (0.0, DAYS):
            hit = failed = 0
            for suite in range(10 * count):
                family, seen = Family(15), []
                for row in range(15):
                    source = Source(
                        (256, 32, 2)[row % 3], "suite", name, days, suite, row, days=days
                    )
                    rows = [
                        saved(one, day) for day, one in enumerate(source.baseline(*BASELINES[name]))
                    ]
                    verdict, _ = screened(source.run(0.0, 12, 30), rows, family=family)
                    family = family.after(verdict)
                    seen.append(verdict)
                hit += any(one.code is Code.LOOKS_SLOWER for one in seen)
                failed += any(one.outcome is Outcome.FAIL for one in seen)
            of = f"{name}, days {days:.1%}"
            yield Answer(
                "unchanged suites of 15 rows: looks slower",
                of,
                hit / (10 * count),
                "<= 0.01" if not days or name != "1x3" else "",
            )
            yield Answer("unchanged suites of 15 rows: FAIL", of, failed / (10 * count), "<= 0.05")


def ratchet(count: int) -> Iterator[Answer]:
    """Unchanged code; after five nights on host A, 30 % of sixty nights are on host B, which is faster."""
    for mib, gap in ((32, 0.02), (32, 0.03), (256, 0.015), (256, 0.02)):
        for card in ("another card", "a card"):
            red = nights = resets = 0
            for index in range(count):
                source, main = Source(mib, "hosts", gap, index), Main((3,))
                random = np.random.default_rng(index)
                for night in range(65):
                    fast = night >= 5 and random.random() < 0.3
                    run = source.run(
                        1 / (1 + gap) - 1 if fast else 0.0,
                        3,
                        night,
                        card=card if fast else "a card",
                    )
                    red += main.night(run, night).outcome is Outcome.FAIL
                    nights += night >= 5
                resets += main.resets
            of = f"{mib} MiB, B {gap:.1%} faster, {'cards told apart' if card == 'another card' else 'cards not told apart'}"
            yield Answer(
                "fast nights on another host: red nights",
                of,
                red / nights,
                "<= 0" if card == "another card" else "",
                f"{resets} resets",
            )


def gains(count: int) -> Iterator[Answer]:
    """A gain of 5 % after twenty nights, lost after ten more: nights of the ten that follow until it is named."""
    for mib in (256, 32, 2):
        named = 0
        for index in range(count):
            source, main = Source(mib, "gain", index), Main((3,))
            outcomes = [
                main.night(source.run(-0.05 if 20 <= night < 30 else 0.0, 3, night), night).outcome
                for night in range(40)
            ]
            named += Outcome.FAIL in outcomes[30:]
        yield Answer(
            "a gain of 5 %, lost again: named within 10 nights",
            f"{mib} MiB",
            named / count,
            ">= 0.95",
        )


def variants(_count: int) -> Iterator[Answer]:
    """The committed record of two H100s: the row that waits for DRAM, made slower, on one card against the baseline of the other."""
    record = json.loads((Path(__file__).resolve().parents[2] / H100).read_text())
    cards = [Data(card, baseline_of(record)) for card in record["cards"]]
    for head, base in ((0, 1), (1, 0)):
        for change in (0.0, 0.01, 0.015, 0.02):
            found: Counter[str] = Counter()
            runs = cards[head].runs(3)
            for run in runs:
                taken = [cards[head].measurement(number, "chase", "chase") for number in run]
                whole = joined([_slower(one, change) for one in taken if one is not None])
                verdict = given(
                    judge(whole, HELD, cards[head].device, cards[base].history("chase")), whole
                )
                found[verdict.outcome.value] += 1
            of = f"card {head} against card {base}, {change:+.1%}, {len(runs)} runs"
            yield Answer(
                "card variants: PASS of the row that waits for DRAM",
                of,
                found["PASS"] / len(runs),
                "<= 0.01" if change >= 0.01 else "",
                str(dict(found)),
            )


def _slower(one: Measurement, change: float) -> Measurement:
    return structs.replace(
        one,
        placements=tuple(tuple(value * (1 + change) for value in each) for each in one.placements),
    )


def clocks(count: int) -> Iterator[Answer]:
    """A row that no bandwidth bounds, at an SM clock of 1905 MHz against a baseline of 1980: it takes 3.9 % longer."""
    usual, lower = 1.98e9, 1.905e9

    def at(one: Measurement, clock: float) -> Measurement:
        return structs.replace(
            one,
            moved_bytes=None,
            conditions=(structs.replace(one.conditions[0], sm_clock_hz=clock),) * 2,
        )

    for mib in (256, 32, 2):
        for change, clock, target in ((0.0, lower, "<= 0"), (0.05, lower, ""), (0.05, usual, "")):
            failed = 0
            for index in range(5 * count):
                source = Source(mib, "clocks", change, clock, index)
                rows = [
                    saved(at(one, usual), day)
                    for day, one in enumerate(source.baseline(*BASELINES["20x1"]))
                ]
                verdict, _ = screened(
                    at(source.run((1 + change) * usual / clock - 1, 12, 30), clock), rows
                )
                failed += verdict.outcome is Outcome.FAIL
            code = f"code {change:+.1%}" if change else "unchanged code"
            of = f"{code}, {mib} MiB, {clock / 1e6:.0f} MHz"
            yield Answer(
                "a row that follows the SM clock, of 1980 MHz before: FAIL",
                of,
                failed / (5 * count),
                target,
            )


def duet(count: int) -> Iterator[Answer]:
    """Duets of one row, with a slow mode of some processes on both sides, or of head alone; and of unchanged code."""
    random = np.random.default_rng(7)

    def played(
        slow: float,
        share: float,
        *,
        both: bool,
        change: float = 0.0,
        spread: float = 0.0013,
        rows: int = 1,
    ) -> tuple[list[Any], int]:
        modes = math.log1p(slow) * (random.random((2, rows, 96)) < share)
        noise = spread * random.normal(size=(2, rows, 96))
        logs = math.log1p(change) + modes[1] - modes[0] * both + noise[1] - noise[0]

        def after(number: int) -> list[Any]:
            pairs = {str(row): logs[row][:number].tolist() for row in range(rows)}
            found = judge_pairs(pairs, dict.fromkeys(pairs, LIMIT))
            return [one if one.outcome is not None else None for one in found.values()]

        # A verdict is never taken back, so that bisection finds the first pair after which all have one.
        below, above = 0, 96
        if None in (found := after(above)):
            return found, above
        while above - below > 1:
            middle = (below + above) // 2
            if None in (at := after(middle)):
                below = middle
            else:
                above, found = middle, at
        return found, above

    def share(results: list[Any], outcome: Outcome) -> float:
        return sum(one is not None and one.outcome is outcome for one in results) / len(results)

    for slow, part in ((0.12, 0.5), (0.12, 0.3), (0.12, 0.2), (0.3, 0.5), (0.12, 0.05)):
        results = [played(slow, part, both=True)[0][0] for _ in range(50 * count)]
        yield Answer(
            "duet, slow mode on both sides: FAIL",
            f"+{slow:.0%} in {part:.0%}",
            share(results, Outcome.FAIL),
            "<= 0.0025",
        )
        yield Answer(
            "duet, slow mode on both sides: PASS",
            f"+{slow:.0%} in {part:.0%}",
            share(results, Outcome.PASS),
            "",
        )
    suites = [played(0.12, 0.3, both=True, rows=15)[0] for _ in range(4 * count)]
    failed = sum(
        any(one is not None and one.outcome is Outcome.FAIL for one in suite) for suite in suites
    ) / len(suites)
    yield Answer(
        "duet, slow mode on both sides: suites of 15 with a FAIL", "+12% in 30%", failed, "<= 0.05"
    )
    for slow, part in ((0.3, 0.1), (0.3, 0.05), (0.1, 0.2), (0.05, 0.2), (0.3, 0.3)):
        results = [played(slow, part, both=False)[0][0] for _ in range(20 * count)]
        target = "<= 0.05" if part >= MODE else ""
        yield Answer(
            "duet, slow mode of head alone: PASS",
            f"+{slow:.0%} in {part:.0%}",
            share(results, Outcome.PASS),
            target,
        )
    for spread in (0.0003, 0.0015, 0.005, 0.01):
        for change in (0.0, 0.015, 0.5):
            results = [
                played(0.0, 0.0, both=True, change=change, spread=spread) for _ in range(5 * count)
            ]
            outcomes = [one for (one,), _ in results]
            wanted = Outcome.FAIL if change else Outcome.PASS
            pairs = statistics.median(number for _, number in results)
            yield Answer(
                f"duet: {wanted.value}",
                f"{change:+.1%}, processes {spread:.2%}",
                share(outcomes, wanted),
                "",
                f"{pairs:g} pairs",
            )


QUESTIONS: dict[str, Callable[[int], Iterator[Answer]]] = {
    "creep": creep,
    "unchanged": unchanged,
    "step": step,
    "same_code": same_code,
    "by_time": by_time,
    "looks_slower": looks_slower,
    "ratchet": ratchet,
    "gains": gains,
    "variants": variants,
    "clocks": clocks,
    "duet": duet,
}


CELL = re.compile(r"(\d+) MiB, (.*), days ([\d.]+)%, [+]([\d.]+) limits")
GREEN, PASSED, FAILED = "same code: green without a duet", "by time: PASS", "by time: FAIL"
COLUMNS = (
    (PASSED, 0.0),
    (PASSED, 1.0),
    (FAILED, 1.0),
    (FAILED, 1.5),
    (FAILED, 3.0),
    (GREEN, 0.0),
    (GREEN, 1.0),
    (GREEN, 2.0),
)


HEAD = "SIMULATED, no GPU; shares and changes in %; max_regression 1 %; !: misses its target"


def summary(record: dict[str, Any]) -> str:
    """The verdicts of a record by size and baseline."""
    return "\n".join([HEAD, *_matrix([Answer(**one) for one in record["answers"]])])


def table(record: dict[str, Any]) -> str:
    """The answers of a record: verdicts by size and baseline, then all others."""
    before = {(one["question"], one["of"]): one["figure"] for one in record.get("before", ())}
    answers = [Answer(**one) for one in record["answers"]]
    lines = [HEAD, *_matrix(answers)]
    others = [one for one in answers if CELL.fullmatch(one.of) is None]
    questions = list(dict.fromkeys(one.question for one in others))
    lines += ["", f"{'before: the rule until 2026-11-23':56}{'target':>9}{'before':>9}{'now':>9}"]
    for one in sorted(others, key=lambda one: questions.index(one.question)):
        if one.question not in lines:
            lines += ["", one.question]
        old = before.get((one.question, one.of))
        target = (
            f"{one.target.split()[0]} {100 * float(one.target.split()[1]):.3g}"
            if one.target
            else ""
        )
        figure = f"{'!' * one.missed}{100 * one.figure:.2f}"
        lines.append(
            f"  {one.of:54}{target:>9}{'' if old is None else format(100 * old, '.2f'):>9}{figure:>9}  {one.more}".rstrip()
        )
    return "\n".join(lines)


def _matrix(answers: list[Answer]) -> Iterator[str]:
    """Verdicts of single rows by size and baseline."""
    cells = {
        (one.question, *found.groups()): one
        for one in answers
        if (found := CELL.fullmatch(one.of)) is not None
    }
    if not cells:
        return
    yield "baseline: runs x processes, each run of its own day; days: what a day adds, in %; 1 x: slower by so many times the limit"
    yield ""
    heads = ("PASS", "PASS", "FAIL", "FAIL", "FAIL", "PASS", "PASS", "PASS")
    code = ("same", "1 x", "1 x", "1.5 x", "3 x", "same", "1 x", "2 x")
    yield f"{'':26}{'by time':>40}{'same machine code':>24}"
    yield f"{'MiB':>5} {'baseline':14}{'days':>6}" + "".join(f"{one:>8}" for one in code)
    yield f"{'':26}" + "".join(f"{one:>8}" for one in heads)
    for mib, baseline, days in dict.fromkeys(key[1:4] for key in cells):
        shown = []
        for question, slower in COLUMNS:
            one = next(
                (
                    one
                    for key, one in cells.items()
                    if key[:4] == (question, mib, baseline, days) and float(key[4]) == slower
                ),
                None,
            )
            shown.append("" if one is None else f"{'!' * one.missed}{100 * one.figure:.1f}")
        yield f"{mib:>5} {baseline:14}{days:>6}" + "".join(f"{one:>8}" for one in shown)


def main() -> int:
    """Simulate, print and record."""
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "questions", nargs="*", metavar="QUESTION", help=f"of {', '.join(QUESTIONS)} (default all)"
    )
    parser.add_argument(
        "--count",
        type=int,
        default=20,
        help="histories of each cell; verdicts are some times as many (default 20)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="the record; answers to other questions in it stay",
    )
    options = parser.parse_args()
    if unknown := set(options.questions) - QUESTIONS.keys():
        parser.error(f"QUESTION {', '.join(sorted(unknown))}: accepted are {', '.join(QUESTIONS)}")
    found = {
        name: [vars(one) for one in QUESTIONS[name](options.count)]
        for name in options.questions or QUESTIONS
    }
    record: dict[str, Any] = {
        "kind": "judging_simulation",
        "simulated": True,
        "count": options.count,
        "answers": [one for each in found.values() for one in each],
    }
    if options.json:
        if options.json.exists():
            old = json.loads(options.json.read_text())
            asked = {one["question"] for one in record["answers"]}
            record["answers"] = [
                one for one in old["answers"] if one["question"] not in asked
            ] + record["answers"]
            record |= {"before": old["before"]} if "before" in old else {}
        write_record(options.json, record, indent=1)
    print(table(record))
    return 1 if any(Answer(**one).missed for one in record["answers"]) else 0


if __name__ == "__main__":
    sys.exit(main())
