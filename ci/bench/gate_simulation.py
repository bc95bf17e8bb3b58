"""SIMULATED: how often the gate errs, and what it costs, on processes drawn at random.

The package's own functions judge whole gates: the screen, the duet of what did not pass, and for
creep a second duet with the oldest revision. The spreads are those that H200 cards show. It does
not show that a GPU is like the model.

    python ci/bench/gate_simulation.py --draws 600 --json ci/records/no-gpu/gate_simulation.json

Each merge is a day: its gate runs once, then a run is saved. `--draws` is the number of gates of
15 rows in a cell; other cells have a multiple or a part of it.
"""

from __future__ import annotations

import itertools
import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from record_file import record_parser, write_record

from pytest_gpumem.judging.duet import LOOKS, judge_pairs
from pytest_gpumem.judging.slowdown import (
    DAYS,
    SUCCESSIVE,
    Reference,
    fails_in_plain_session,
    gains_restart,
    screen,
)
from pytest_gpumem.outcomes import Outcome

Random = np.random.Generator
RARE = 0.002
"""Share of processes that are 2 to 3 % slow for no visible reason."""
DATES = [date(2026, 1, 1) + timedelta(days=day) for day in range(400)]


@dataclass(frozen=True)
class Kernel:
    """A row of a suite, and how the logarithms of its latencies spread between processes."""

    name: str
    latency: float  # seconds
    spread: float  # standard deviation
    limit: float = 0.01  # `max_regression`
    mode: float = 0.0  # share of processes that are 5 % slower
    heavy: bool = False  # Student's t with 3 degrees of freedom

    @property
    def log_limit(self) -> float:
        """The limit as a log-ratio."""
        return math.log1p(self.limit)

    def processes(self, random: Random, count: int) -> Any:
        """Return what each process adds to the logarithm of the row's latency."""
        if self.heavy:
            logs = self.spread * random.standard_t(3, count) / math.sqrt(3)
        else:
            logs = self.spread * random.standard_normal(count)
        rare = random.random(count) < RARE
        logs += rare * np.log1p(random.uniform(0.02, 0.03, count))
        slow = random.random(count) < self.mode
        return logs + slow * math.log1p(0.05)


K256 = Kernel("256 MiB", 183e-6, 0.0004)
K32 = Kernel("32 MiB", 24.8e-6, 0.0015)
K2 = Kernel("2 MiB", 5.4e-6, 0.005, limit=0.02)
K4 = Kernel("4 MiB", 6e-6, 0.01, limit=0.05)
K2_1, K4_1 = replace(K2, limit=0.01), replace(K4, limit=0.01)
LARGE = [K256] * 8 + [K32] * 7
MIXED = [K256] * 5 + [K32] * 5 + [K2] * 3 + [K4, replace(K4, mode=0.05)]
ALL_1 = [replace(kernel, limit=0.01) for kernel in MIXED]
SUITES = {"large": LARGE, "mixed": MIXED, "all 1 %": ALL_1}
PLAIN_SUITES = {
    "modes of 5 % in 10 %": [replace(kernel, mode=0.1) for kernel in ALL_1],
    "heavy tails": [replace(kernel, heavy=True) for kernel in ALL_1],
    "2.5 % noisy": [replace(kernel, spread=0.025) for kernel in ALL_1],
}
DAY_SPREADS = (0.0, 0.0015, 0.003)
LAYOUTS = {"1 x 3": (1, 3), "3 x 3": (3, 3), "12 x 1": (DAYS, 1)}
"""Days of a reference, and processes of each."""
Layout = tuple[int, int]


@dataclass
class Row:
    """A row in a gate. Levels are log-ratios to the code of the reference, without noise."""

    kernel: Kernel
    reference: Reference
    random: Random
    day: float  # what today and this card add to each process
    head: float = 0.0  # level of the change
    base: float = 0.0  # level of its base revision
    oldest: float = 0.0  # level of the reference's oldest revision

    @cached_property
    def latency(self) -> float:
        """Seconds of the process that the screen judges."""
        return self.kernel.latency * math.exp(self.head + self.day + self._noise(1)[0])

    @property
    def change(self) -> float:
        """The change that the screen judges."""
        return math.log(self.latency) - self.reference.mean

    def fails_plainly(self, card: float) -> bool:
        """Return whether a plain session fails, on a card that is slower by a share."""
        limit = self.kernel.log_limit
        return fails_in_plain_session(math.log(self.latency * (1 + card)), limit, self.reference)

    def passes_screen(self, others: Sequence[float], same_code: bool) -> bool:
        """Return whether the screen passes. `others`: the changes of the other rows."""
        seen = (self.change, self.kernel.log_limit, self.reference, others)
        return screen(*seen, same_code=same_code) is Outcome.PASS

    @cached_property
    def duet(self) -> tuple[Outcome, int]:
        """The duet's outcome and its pairs, with those of a second duet."""
        outcome, pairs, head = self._duet(self.base)
        level = math.log(self.kernel.latency) + self.day + head - self.reference.mean
        if outcome is Outcome.FAIL or level <= self.kernel.log_limit:
            return outcome, pairs
        outcome, more, _ = self._duet(self.oldest)
        return outcome, pairs + more

    def _duet(self, base: float) -> tuple[Outcome, int, float]:
        """Return outcome, pairs and head's mean of a duet with a revision of this level."""
        head = self.head + self._noise(LOOKS[-1])
        log_ratios = head - base - self._noise(LOOKS[-1])
        judged = judge_pairs(log_ratios.tolist(), self.kernel.log_limit)
        assert judged.outcome is not None
        pairs = len(judged.log_ratios)
        return judged.outcome, pairs, float(np.mean(head[:pairs]))

    def _noise(self, count: int) -> Any:
        return self.kernel.processes(self.random, count)


def days_of(spread: float, count: int, random: Random) -> Any:
    """Draw what each day adds, by half of its variance."""
    return random.normal(0.0, spread / math.sqrt(2), count)


def row_of(kernel: Kernel, saved: Layout, day: float, common: Any, random: Random) -> Row:
    """Draw an unchanged row. `common`: what each day, at last today, adds to all rows."""
    shifts = common + days_of(day, len(common), random)
    days, processes = saved
    logs = kernel.processes(random, days * processes).reshape(days, processes)
    logs += math.log(kernel.latency) + shifts[:-1, None]
    reference = Reference(list(zip(DATES, logs.tolist(), strict=False)))
    return Row(kernel, reference, random, float(shifts[-1]))


def suite_of(kernels: Sequence[Kernel], saved: Layout, day: float, random: Random) -> list[Row]:
    """Draw the unchanged rows of a session. `day`: the spread between days."""
    common = days_of(day, saved[0] + 1, random)
    return [row_of(kernel, saved, day, common, random) for kernel in kernels]


@dataclass
class Tally:
    """What comes of the gates of a cell."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    runs: list[float] = field(default_factory=list)  # of the whole suite
    pairs: list[int] = field(default_factory=list)  # of each row that goes to the duet

    def gate(self, rows: Sequence[Row], same_code: bool, seen: Sequence[float] = ()) -> None:
        """Judge a gate. `seen`: the changes of further rows, which are unchanged and pass."""
        changes = [row.change for row in rows]
        worst = Outcome.PASS
        processes = len(rows)
        for index, row in enumerate(rows):
            others = [*seen, *changes[:index], *changes[index + 1 :]]
            if row.passes_screen(others, same_code):
                continue
            outcome, pairs = row.duet
            if outcome.rank < worst.rank:
                worst = outcome
            processes += 2 * pairs
            self.pairs.append(pairs)
        self.runs.append(processes / len(rows))
        self.outcomes[worst] += 1

    def share(self, outcome: Outcome) -> float:
        """Return a share of the gates in percent; PASS is green."""
        return percent(self.outcomes[outcome], len(self.runs))


def percent(count: int, total: int) -> float:
    """Return a share in percent."""
    return round(100 * count / total, 2)


def random_of(*cell: object) -> Random:
    """Return the generator of a cell."""
    return np.random.default_rng(zlib.crc32(repr(cell).encode()))


Lines = Iterator[dict[str, Any]]


def unchanged_gates(draws: int) -> Lines:
    """Unchanged gates: red or without a verdict; runs of the suite; rows that have a duet"""
    for name, size, saved, day in itertools.product(SUITES, (15, 100), LAYOUTS, DAY_SPREADS):
        kernels = (7 * SUITES[name])[:size]
        random = random_of("unchanged", name, size, saved, day)
        by_time, same_code = Tally(), Tally()
        for _ in range(draws if size == 15 else math.ceil(draws / 10)):
            rows = suite_of(kernels, LAYOUTS[saved], day, random)
            by_time.gate(rows, same_code=False)
            same_code.gate(rows, same_code=True)
        line = {"suite": name, "rows": size, "saved": saved, "d": day}
        for key, tally in (("", by_time), (" same", same_code)):
            line[f"red{key}"] = tally.share(Outcome.FAIL)
            line[f"open{key}"] = tally.share(Outcome.UNDECIDED)
            line[f"runs{key}"] = round(float(np.mean(tally.runs)), 2)
            line[f"90 %{key}"] = round(float(np.quantile(tally.runs, 0.9)), 1)
            line[f"duets{key}"] = percent(len(tally.pairs), size * len(tally.runs))
        yield line


def lone_rows(
    kernel: Kernel, saved: Layout, day: float, times: float, gates: int
) -> tuple[Tally, Tally]:
    """Judge a row that loses so many limits; fourteen of 256 MiB pass. Also: by the same code."""
    random = random_of(kernel, saved, day, times)
    spread = math.hypot(K256.spread, day / math.sqrt(2)) * math.sqrt(1 + 1 / saved[0])
    by_time, same_code = Tally(), Tally()
    for _ in range(gates):
        common = days_of(day, saved[0] + 1, random)
        row = row_of(kernel, saved, day, common, random)
        row.head = math.log1p(times * kernel.limit)
        others = common[-1] - np.mean(common[:-1]) + random.normal(0, spread, 14)
        by_time.gate([row], False, others.tolist())
        same_code.gate([row], True, others.tolist())
    return by_time, same_code


def losses(draws: int) -> Lines:
    """A row loses so many limits, the others are unchanged: gates that are green"""
    heavy = replace(K32, name="32 MiB, t3", heavy=True)
    grid = itertools.product((K256, K32, K2, K4, K4_1, heavy), LAYOUTS, DAY_SPREADS[::2])
    for kernel, saved, day in grid:
        line = {"row": kernel.name, "limit": kernel.limit, "saved": saved, "d": day}
        for times in (1.0, 1.5, 2.0):
            by_time, same_code = lone_rows(kernel, LAYOUTS[saved], day, times, 5 * draws)
            line[f"{times:g}"] = by_time.share(Outcome.PASS)
            line[f"{times:g} same"] = same_code.share(Outcome.PASS)
        yield line


def plain_sessions(draws: int) -> Lines:
    """Plain sessions of unchanged code, also on a card that is 2 % slower: those with a FAIL"""
    for name, size, saved in itertools.product(PLAIN_SUITES, (15, 100), LAYOUTS):
        line = {"suite": name, "rows": size, "saved": saved}
        kernels = (7 * PLAIN_SUITES[name])[:size]
        sessions = 2 * draws if size == 15 else math.ceil(draws / 4)
        for title, day, card in (("d 0", 0, 0), ("d 0.003", 0.003, 0), ("card + 2 %", 0, 0.02)):
            random = random_of("plain", name, size, saved, day, card)
            failed = 0
            for _ in range(sessions):
                rows = suite_of(kernels, LAYOUTS[saved], day, random)
                failed += any(row.fails_plainly(card) for row in rows)
            line[title] = percent(failed, sessions)
        yield line


class History:
    """The saved days of a row, a process each."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.restarts = 0
        self.reference: Reference | None = None
        self.saved: list[tuple[int, float, float]] = []  # day, level, log-latency
        self._fast = False  # the day before was faster by more than the limit

    def save(self, day: int, level: float, noise: float) -> None:
        """Save a day, unless the reference is full and nothing gets faster."""
        log = math.log(self.kernel.latency) + level + noise
        if self.reference is not None and self.reference.days == DAYS:
            before, self._fast = self._fast, log < self.reference.mean - self.kernel.log_limit
            if not (before or self._fast):
                return
        self.saved.append((day, level, log))
        earlier, newest = self.saved[:-SUCCESSIVE], self.saved[-SUCCESSIVE:]
        if earlier:
            logs = [log for _, _, log in newest]
            if gains_restart(self._reference(earlier), logs, self.kernel.log_limit):
                self.saved = newest
                self.restarts += 1
        self.reference = self._reference(self.saved)

    @staticmethod
    def _reference(saved: Sequence[tuple[int, float, float]]) -> Reference:
        return Reference([(DATES[day], [log]) for day, _, log in saved])


def first_red(
    kernel: Kernel, levels: Sequence[float], before: int, day: float, random: Random
) -> float | None:
    """Return the level of the first red gate, of a merge a day. `before`: days at level 0."""
    days = before + len(levels)
    common, further = days_of(day, days, random), days_of(day, days, random)
    noise = kernel.processes(random, days) + common + further
    history = History(kernel)
    for number in range(before):
        history.save(number, 0.0, noise[number])
    base = 0.0
    for number, level in enumerate(levels, before):
        assert history.reference is not None
        today, oldest = common[number] + further[number], history.saved[0][1]
        row = Row(kernel, history.reference, random, today, level, base, oldest)
        others = common[number] - np.mean(common[: min(number, DAYS)])
        if not row.passes_screen([others], False) and row.duet[0] is Outcome.FAIL:
            return level
        history.save(number, level, noise[number])
        base = level
    return None


def creep(draws: int) -> Lines:
    """Every merge loses a little: the loss at the first red gate in percent, median (95 %)"""
    for step, kernel in itertools.product((0.001, 0.004), (K256, K32, K2_1, K4_1, K2, K4)):
        line: dict[str, Any] = {"row": kernel.name, "limit": kernel.limit, "a merge": step}
        levels = np.log1p(step) * np.arange(1, math.ceil(0.15 / step))
        for before, day in itertools.product((1, DAYS), DAY_SPREADS[::2]):
            _, loss = reds(kernel, levels, before, day, draws)
            line[f"{before} saved, d {day:g}"] = loss
        yield line


def gains(draws: int) -> Lines:
    """A gain of 20 %, then a loss of 0.8 % a merge: histories with a red gate, and the loss there"""
    levels = math.log(0.8) + np.log1p(0.008) * np.arange(12)
    for kernel, day in itertools.product((K256, K32, K2_1, K4_1), DAY_SPREADS[::2]):
        red, loss = reds(kernel, levels, DAYS, day, draws)
        yield {"row": kernel.name, "limit": kernel.limit, "d": day, "red": red, "loss": loss}


def reds(kernel: Kernel, levels: Any, before: int, day: float, draws: int) -> tuple[float, str]:
    """Return the share of histories with a red gate, and the loss there since the fastest level."""
    random = random_of(kernel, levels.tolist(), before, day)
    fastest = min(0.0, levels[0])
    losses = []
    histories = math.ceil(draws / 4)
    for _ in range(histories):
        level = first_red(kernel, levels.tolist(), before, day, random)
        if level is not None:
            losses.append(level - fastest)
    if not losses:
        return 0.0, ""
    low, high = np.expm1(np.quantile(losses, (0.5, 0.95), method="inverted_cdf"))
    return percent(len(losses), histories), f"{100 * low:.2f} ({100 * high:.2f})"


def false_restarts(draws: int) -> Lines:
    """Unchanged for 300 days: how many times a reference begins anew"""
    slow = replace(K4_1, name="4 MiB, mode 20 %", mode=0.2)
    for kernel in (K256, K32, K2_1, K4_1, slow, K2, K4):
        random = random_of("restarts", kernel)
        histories = math.ceil(draws / 2)
        count = 0
        for _ in range(histories):
            history = History(kernel)
            for day, noise in enumerate(kernel.processes(random, 300).tolist()):
                history.save(day, 0.0, noise)
            count += history.restarts
        yield {"row": kernel.name, "limit": kernel.limit, "restarts": count / histories}


TABLES = (unchanged_gates, losses, plain_sessions, creep, gains, false_restarts)


def simulate(draws: int) -> dict[str, Any]:
    """Return the record. `draws`: gates of 15 rows in a cell."""
    tables = {lines.__name__: list(lines(draws)) for lines in TABLES}
    return {"kind": "gate_simulation", "simulated": True, "draws": draws, "tables": tables}


def table(record: dict[str, Any]) -> str:
    """Return the record as text."""
    texts = [
        f"SIMULATED, no GPU: {record['draws']} gates of 15 rows a cell; shares in %",
        "saved: days x processes; d: spread between days; open: no verdict; same: the same code",
    ]
    for lines in TABLES:
        texts += ["", str(lines.__doc__), *columns(record["tables"][lines.__name__])]
    return "\n".join(texts)


def columns(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines of text with a column for each key."""
    rows = [list(lines[0])]
    for line in lines:
        rows.append([str(value) for value in line.values()])
    for index in range(len(rows[0])):
        width = max(len(row[index]) for row in rows)
        for row in rows:
            row[index] = row[index].ljust(width)
    return ["  ".join(row).rstrip() for row in rows]


def summary(record: dict[str, Any]) -> str:
    """Return the rates that docs/explanation/judging.md shows: the worst of rows and days."""
    worst: dict[str, dict[str, Any]] = {}
    for name in ("unchanged_gates", "losses"):
        for line in record["tables"][name]:
            if line.get("suite") == "all 1 %":
                continue  # limits that do not fit the noise
            entry = worst.setdefault(line["saved"], {"saved": line["saved"]})
            for key in ("red", "open", "runs", "runs same", "1", "1 same", "2", "2 same"):
                if key in line:
                    entry[key] = max(line[key], entry.get(key, 0))
    return "\n".join(columns(list(worst.values())))


def main() -> int:
    """Simulate, print and record."""
    parser = record_parser(__doc__, device=None)
    parser.add_argument("--draws", type=int, default=50, help="gates a cell (default 50)")
    options = parser.parse_args()
    if options.draws < 1:
        parser.error(f"--draws {options.draws}: at least 1")
    record = simulate(options.draws)
    if options.json:
        write_record(options.json, record)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
