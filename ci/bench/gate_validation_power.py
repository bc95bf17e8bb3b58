"""Power of the gate's screen, from its validation's raw data: the share of its runs that flags a slow-down, for any slow-down. Pure.

Runs of unchanged code say it without a model of their noise: had the code of a run been slower by a share, the run would have measured
that much more, with an interval as wide; it is flagged where the interval's lower bound (99.9 %) is above the margin, half of the limit.
What that assumes is that slower code is as noisy as the code was. The twins, which are slower, show whether it holds.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gate_validation_rows import ROWS, SIZES, Asked
from gate_validation_summary import FLAGGED, interval, measured_ratios, off_plan
from gate_validation_verdicts import LETTERS, Data, Scenario, screened

from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.units import parse_share

CURVES = (
    ("256 MiB", SIZES["256 MiB"].usual),
    ("256 MiB", SIZES["256 MiB"].slower),
    ("32 MiB", SIZES["32 MiB"].slower),
    ("2 MiB", SIZES["2 MiB"].usual),
)
"""Groups of rows, and what their runs are held to."""


@dataclass(frozen=True)
class Curve:
    """The share of runs that flags a slow-down, by the slow-down."""

    needed: tuple[float, ...]
    """Of each run the slow-down beyond which it is flagged, the smallest first; a share."""
    passing: int = 0
    """Runs that would pass code that is slower by the limit: they resolve it, and would not flag it."""

    def at(self, slower: float) -> float:
        """The share of the runs that flags code that is slower by a share; 0 without runs."""
        return bisect.bisect_left(self.needed, slower) / len(self.needed) if self.needed else 0.0

    def reaches(self, power: float) -> float:
        """The slow-down beyond which at least a share `power` of the runs is flagged; infinite where none is."""
        return self.needed[math.ceil(power * len(self.needed)) - 1] if self.needed else math.inf


@dataclass(frozen=True)
class Twins:
    """What came of code that is slower, of the twins of one plan."""

    planned: float
    """Share by which they were meant to be slower."""
    as_planned: bool
    """Whether they are as slow as that, or all of them are not."""
    slower: tuple[float, ...]
    """Of each verdict: share by which its twin is slower, over all processes of a record."""
    caught: int
    """Verdicts that flag."""

    @property
    def mean(self) -> float:
        """Share by which they are slower, over the verdicts."""
        return statistics.fmean(self.slower)

    @property
    def share(self) -> float:
        """Of the verdicts, those that flag."""
        return self.caught / len(self.slower)

    def bounds(self) -> tuple[float, float]:
        """Of that share: 95 %, Clopper-Pearson, as if every verdict were independent."""
        return interval(self.caught, len(self.slower))


def needed(verdict: Verdict, margin: float) -> float:
    """By what share the code of a run must be slower than it was for its verdict to flag it; infinite where nothing was judged.

    Args:
        verdict: of the run as it was.
        margin: share above which the lower bound has to be.
    """
    if verdict.comparison is None or verdict.outcome is Outcome.UNRELIABLE:
        return math.inf
    return (1 + margin) / (1 + verdict.comparison.low) - 1


def curve(records: Sequence[Mapping[str, Any]], size: str, asked: Asked) -> Curve:
    """Of the runs of unchanged code of a group of rows, over all cards of all records."""
    rows = {row.name: row.name for row in ROWS if row.size == size and not row.unrelated}
    limit, found, passing = parse_share(asked.limit), list[float](), 0
    for _, _, verdict in _judged(records, rows, asked):
        found.append(needed(verdict, limit / 2))
        resolves = verdict.comparison is not None and verdict.comparison.resolvable <= limit
        passing += resolves and limit <= found[-1] < math.inf
    return Curve(tuple(sorted(found)), passing)


def twins(records: Sequence[Mapping[str, Any]], size: str, asked: Asked) -> Iterator[Twins]:
    """What came of the twins of a group of rows, by their plan, and those that are off it apart."""
    ratios = [measured_ratios(record) for record in records]
    for planned in sorted({row.planned for row in ROWS if row.size == size and row.planned}):
        heads = {row.of: row.name for row in ROWS if row.size == size and row.planned == planned}
        found: dict[bool, list[tuple[float, bool]]] = {True: [], False: []}
        for index, row, verdict in _judged(records, heads, asked):
            own, head = ratios[index], heads[row]
            found[not off_plan(head, own)].append((own[head][0], LETTERS[verdict.outcome] in FLAGGED))
        for as_planned, ones in found.items():
            if ones:
                yield Twins(planned, as_planned, tuple(slower for slower, _ in ones), sum(flagged for _, flagged in ones))


def _judged(records: Sequence[Mapping[str, Any]], rows: Mapping[str, str], asked: Asked) -> Iterator[tuple[int, str, Verdict]]:
    """The index of the record, the row and the verdict of every run that measured it, of the cards that have the row."""
    for index, record in enumerate(records):
        for card in record["cards"]:
            data = Data(card)
            there = {row: head for row, head in rows.items() if row in data.kinds and head in data.kinds}
            every = Scenario("", there, dict.fromkeys(there, asked.limit), dict.fromkeys(there, asked.processes))
            for row, verdict in screened(data, every):
                if verdict is not None:
                    yield index, row, verdict
