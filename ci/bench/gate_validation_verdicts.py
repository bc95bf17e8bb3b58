"""The verdicts of the gate's validation: the shipped judge and the peers on the raw data of a record.

The first processes of a session are the baseline, in runs of as many as the record's `baseline` says: 20 runs of one where it says nothing.
All others are heads. The gate takes heads in runs of as many processes as their group allows (`SIZES`), and repeats a run while more of
them can decide. A duet takes them in pairs. A question names for
each row the measurement that stands for new code: the row's own (unchanged code), that of a twin, or the one after an unrelated allocation.
A twin is shown with the bytes of its row, so that nothing but the time tells.

The peers compare one process of the baseline with one of the new code, as they compare two runs. The samples are this plugin's, over
placements of the buffers, which neither peer varies by itself.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gate_validation_collect import UNIT, unpacked, unpacked_stats
from gate_validation_rows import BY_NAME, ROWS, SIZES, SLOPES, Asked, work_of
from msgspec import structs
from pytest_benchmark.utils import parse_compare_fail

from pytest_gpumem.judging.judge import judge, repeatable
from pytest_gpumem.judging.paired import Paired, judge_pairs
from pytest_gpumem.judging.screen import LOOKS, Family
from pytest_gpumem.judging.spread import corrected_latencies, readings
from pytest_gpumem.judging.verdict import OPEN as OPEN_ROW
from pytest_gpumem.judging.verdict import with_verdict
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import (
    Conditions,
    Controls,
    Limits,
    Measurement,
    MovedBytes,
    Provenance,
)
from pytest_gpumem.records.row import Row, Verdict
from pytest_gpumem.records.schema import device_from_json
from pytest_gpumem.units import parse_share

PAIRS = 24
"""Pairs of processes that must be left for a duet to begin."""
MISSING, OPEN, ABOVE = "-", "O", "A"
"""Letters of a row that its process could not measure, of a duet without an end, and of an interval above the limit that is no FAIL."""
LETTERS = {Outcome.PASS: "P", Outcome.FAIL: "F", Outcome.UNDECIDED: "U"}
UNCHANGED, SEVERAL, ALLOCATION = (
    "unchanged, 1 process",
    "unchanged",
    "an unrelated allocation first",
)
NOTHING, NOTHING_LIMIT = "unchanged, next to no limit", "0.01%"
"""Unchanged code at its limit, so that an alarm is as likely as it is promised to be."""
ELSEWHERE = "unchanged, another session's"
"""Unchanged code against the baseline of the session before it in the record: of another card, or of another hour."""
TWICE, TWICE_LIMIT = "+1 % held to 0.5 %", "0.5%"
"""Code that is slower by twice its limit."""
LIMITS = {NOTHING: NOTHING_LIMIT, TWICE: TWICE_LIMIT}
STOCK = ("mean:5%", "median:1%", "min:1%")
"""Limits of pytest-benchmark's `--benchmark-compare-fail`, by its own check."""
NVBENCH, ROBUST = "nvbench_compare", "nvbench_compare_robust"
"""Of cuda-bench 0.3.0. The first says slower where the means differ by more than the smaller relative standard deviation. The second, with
its default preset, compares the intervals from least to upper quartile: slower where the new one is above the other by `GAP` or more; the
same where the medians are within `CENTRES`, the intervals overlap by `OVERLAP` of the narrower one, and no interquartile range is above
`DISPERSION` of the median; else undecided. It weighs times by the SM clock, which is here the same for both."""
CHECKS = (*STOCK, NVBENCH, ROBUST)
GAP, CENTRES, OVERLAP, DISPERSION = 0.005, 0.005, 0.5, 0.02
"""clear_gap, same.center, same.overlap_fraction and same.relative_dispersion_ceiling of the default preset."""


@dataclass(frozen=True)
class Question:
    """What is asked of every run."""

    name: str
    rows: Mapping[str, str]
    """By row of the baseline: the row that is the new code's measurement of it."""
    asked: Mapping[str, Asked]
    """By row."""


def questions(measured: Container[str] | None = None) -> Iterator[Question]:
    """All questions, of the rows that were measured."""
    there = [
        row for row in ROWS if measured is None or (row.name in measured and row.of in measured)
    ]
    plain = [row.name for row in there if not row.unrelated]
    found = [
        (name, {row: row for row in plain}) for name in (UNCHANGED, SEVERAL, NOTHING, ELSEWHERE)
    ]
    found.append((ALLOCATION, {row.of: row.name for row in there if row.unrelated}))
    for share in sorted({row.planned for row in there if row.planned}):
        found.append(
            (planned_name(share), {row.of: row.name for row in there if row.planned == share})
        )
    found.append(
        (
            TWICE,
            {
                row.of: row.name
                for row in there
                if row.planned == 0.01 and row.size in ("256 MiB", "32 MiB")
            },
        )
    )
    for name, rows in found:
        asked = {row: SIZES[BY_NAME[row].size] for row in rows}
        if name == UNCHANGED:
            asked = {row: replace(one, processes=1) for row, one in asked.items()}
        if name in LIMITS:
            asked = {row: replace(one, limit=LIMITS[name]) for row, one in asked.items()}
        if rows:
            yield Question(name, rows, asked)


def planned_name(share: float) -> str:
    """ "+1 %"."""
    return f"+{100 * share:g} %"


class Data:
    """The raw data of one card's session, and how its processes are shared out."""

    def __init__(self, card: Mapping[str, Any], baseline: Sequence[int] = ()) -> None:
        """`baseline`: processes of each of its runs."""
        self.device: DeviceFacts = device_from_json(card["device"])
        self.kinds: Mapping[str, Mapping[str, Any]] = card["rows"]
        # A session whose device changed meanwhile stores nothing: it is no process of a baseline, and nobody judges it.
        self.processes: Mapping[int, Mapping[str, Any]] = {
            one["number"]: one for one in card["processes"] if one["rows"]
        }
        numbers = sorted(self.processes)
        ends = [*itertools.accumulate(baseline, initial=0)]
        self.baseline = [tuple(numbers[first:end]) for first, end in itertools.pairwise(ends)]
        self.heads = numbers[ends[-1] :]
        self._seen: dict[tuple[int, str, str], Measurement | None] = {}

    def runs(self, processes: int) -> list[tuple[int, ...]]:
        """The heads that follow each other, in groups of so many."""
        return [
            tuple(self.heads[first : first + processes])
            for first in range(0, len(self.heads) - processes + 1, processes)
        ]

    def history(self, row: str) -> list[Measurement]:
        """The baseline's runs of a row."""
        return [
            joined(one) for numbers in self.baseline if (one := self.several(numbers, row, row))
        ]

    def measurement(self, number: int, row: str, of: str) -> Measurement | None:
        """What a process measured of a row, shown as `of`; None where it could not be judged."""
        key = number, row, of
        if key not in self._seen:
            self._seen[key] = self._measurement(number, row, of)
        return self._seen[key]

    def several(self, numbers: Iterable[int], row: str, of: str) -> list[Measurement] | None:
        """What processes measured of a row; None where one of them did not."""
        found = [self.measurement(number, row, of) for number in numbers]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None

    def _measurement(self, number: int, row: str, of: str) -> Measurement | None:
        process = self.processes[number]
        seen, kind = process["rows"].get(row), self.kinds.get(of)
        if seen is None or kind is None:
            return None
        controls = process.get("controls")
        read = None
        if controls is not None:
            # Seconds, or None where a control was not read; older records end with the source.
            dram, l2, launch, latency = (
                one and one * UNIT for one in (*controls[:3], *(controls[4:] or [None]))
            )
            read = Controls(dram, l2, launch, latency, source=controls[3])
        return Measurement(
            label="",
            target=kind["target"],
            mode=kind["mode"],
            sampler=seen.get("sampler", "blocked"),
            sampler_reason="",
            placements=tuple((median,) for median in unpacked(seen["m"])),
            half_width=None,
            moved_bytes=MovedBytes(kind["bytes"], 0),
            footprint=kind["footprint"],
            floor=process["floor"] * UNIT,
            conditions=(Conditions(), Conditions()),
            overhead=process["overhead"] * UNIT if "sampler" not in seen else None,
            provenance=Provenance(process["utc"], self.device.uuid, read),
        )


def baseline_of(record: Mapping[str, Any]) -> tuple[int, ...]:
    """Processes of each run of the baseline of a record's sessions."""
    return tuple(record.get("baseline", (1,) * 20))


def judged(record: Mapping[str, Any]) -> dict[str, Any]:
    """All verdicts of a record, as its `verdicts` has them."""
    found: dict[str, Any] = {"screens": [], "duets": [], "peers": []}
    sessions = [Data(card, baseline_of(record)) for card in record["cards"]]
    for index, data in enumerate(sessions):
        for question in questions(data.kinds):
            base = sessions[index - 1] if question.name == ELSEWHERE else data
            if question.name == ELSEWHERE and base is data:
                continue
            found["screens"] += [{"card": index, **one} for one in screens(data, question, base)]
            if question.name not in (SEVERAL, NOTHING, ELSEWHERE, TWICE):  # the same heads again
                found["peers"] += [{"card": index, **one} for one in peers(data, question)]
            if question.name in (SEVERAL, TWICE):
                found["duets"] += [{"card": index, **one} for one in duets(data, question)]
    return found


def screens(data: Data, question: Question, base: Data) -> Iterator[dict[str, Any]]:
    """The gate's verdicts against a session's baseline: a letter for each run of each row. The rows of one run are a suite."""
    letters: dict[str, list[str]] = {row: [] for row in question.rows}
    for processes in sorted({asked.processes for asked in question.asked.values()}):
        rows = [row for row, asked in question.asked.items() if asked.processes == processes]
        for run in data.runs(processes):
            family = Family(len(rows))
            for row in rows:
                seen = data.several(run, question.rows[row], row)
                verdict = screened(
                    seen, base.history(row), question.asked[row].limit, base.device, family
                )
                letters[row].append(
                    MISSING if verdict is None else letter(verdict, question.asked[row].limit)
                )
                family = family if verdict is None else family.after(verdict)
    for row, head in question.rows.items():
        asked = question.asked[row]
        about = {
            "question": question.name,
            "row": row,
            "head": head,
            "limit": asked.limit,
            "processes": asked.processes,
        }
        yield about | {"outcomes": "".join(letters[row])}


def screened(
    seen: Sequence[Measurement] | None,
    history: Sequence[Measurement],
    limit: str,
    facts: DeviceFacts,
    family: Family,
) -> Verdict | None:
    """The verdict on a row, with as many of the run's processes as it takes; None where a process has no measurement of it."""
    if not seen or not history:
        return None
    limits = Limits(max_regression=limit)
    for look in (*(look for look in LOOKS if look < len(seen)), len(seen)):
        now = joined(seen[:look])
        found = judge(now, limits, facts, history, family=family)
        row = Row("", limits, OPEN_ROW, now)
        verdict = with_verdict(
            row, found.findings, comparison=found.comparison, simulated=facts.simulated
        ).verdict
        if not repeatable(now, limits, verdict, history):
            break
    return verdict


def joined(processes: Sequence[Measurement]) -> Measurement:
    """A run of one process or more."""
    return structs.replace(processes[0], further=tuple(one.repeat for one in processes[1:]))


def letter(verdict: Verdict, limit: str) -> str:
    """The verdict's letter."""
    above = verdict.comparison is not None and verdict.comparison.low > parse_share(limit)
    return ABOVE if above and verdict.outcome is Outcome.UNDECIDED else LETTERS[verdict.outcome]


def duets(data: Data, question: Question) -> Iterator[dict[str, Any]]:
    """Duets of one row each. The next one begins with the processes after those of the one before."""
    for row, head in question.rows.items():
        limit, pool = question.asked[row].limit, data.heads
        while len(pool) >= 2 * PAIRS:
            paired = played(data, pool, row, head, limit)
            outcome = LETTERS[paired.outcome] if paired.outcome is not None else OPEN
            about = {
                "question": question.name,
                "row": row,
                "head": head,
                "limit": limit,
                "first": pool[0],
            }
            yield about | {
                "outcome": outcome,
                "pairs": paired.pairs,
                "change": round(paired.change, 6),
            }
            pool = pool[2 * paired.pairs :] if paired.outcome is not None else []


def played(data: Data, pool: Sequence[int], row: str, head: str, limit: str) -> Paired:
    """A duet of pairs of processes that follow each other. A coin decides which of them is the base. The processes are too few to ask for
    the pairs that exclude a rare slow mode."""
    coin, logs = random.Random(pool[0]), list[float]()
    delta = {"": parse_share(limit)}
    for first in range(0, len(pool) - 1, 2):
        base, new = (
            pool[first : first + 2] if coin.random() < 0.5 else pool[first : first + 2][::-1]
        )
        both = data.measurement(base, row, row), data.measurement(new, head, row)
        if both[0] is None or both[1] is None:
            continue
        logs.append(log_ratio(both[0], both[1]))
        if (paired := judge_pairs({"": logs}, delta, clean=1)[""]).outcome is not None:
            return paired
    return judge_pairs({"": logs}, delta, clean=1)[""]


def log_ratio(base: Measurement, head: Measurement) -> float:
    """Of two processes, corrected for launch overhead."""
    first, second = corrected_latencies([*readings(base), *readings(head)])
    return math.log(second / first)


def peers(data: Data, question: Question) -> Iterator[dict[str, Any]]:
    """What the peers say of the same heads, each against one process of the baseline, in turn."""
    bases = [number for numbers in data.baseline for number in numbers]
    for row, head_row in question.rows.items():
        found: dict[str, list[str]] = {check: [] for check in CHECKS}
        for index, number in enumerate(data.heads):
            base = data.processes[bases[index % len(bases)]]["rows"].get(row)
            head = data.processes[number]["rows"].get(head_row)
            for check in CHECKS:
                missing = base is None or head is None
                found[check].append(
                    MISSING
                    if missing
                    else peer_verdict(check, unpacked_stats(base), unpacked_stats(head))
                )
        yield {
            "question": question.name,
            "row": row,
            "head": head_row,
            "found": {check: "".join(one) for check, one in found.items()},
        }


def peer_verdict(check: str, base: Mapping[str, float], head: Mapping[str, float]) -> str:
    """ "X": slower; ".": not; "?": undecided.

    Args:
        check: one of `CHECKS`.
        base: figures of the baseline's samples.
        head: figures of the new code's samples, in the same unit.
    """
    if check == NVBENCH:
        noises = [one["stddev"] / one["mean"] for one in (base, head) if one["stddev"]]
        if not noises:
            return "?"
        return "X" if head["mean"] / base["mean"] - 1 > min(noises) else "."
    if check == ROBUST:
        return _robust(base, head)
    return "X" if parse_compare_fail(check).fails(head, base) else "."


def _robust(base: Mapping[str, float], head: Mapping[str, float]) -> str:
    if head["min"] > base["q3"] and (head["min"] - base["q3"]) / base["q3"] >= GAP:
        return "X"
    if base["min"] > head["q3"] and (base["min"] - head["q3"]) / head["q3"] >= GAP:
        return "."
    if (
        abs(base["median"] - head["median"]) / min(base["median"], head["median"]) > CENTRES
        or _overlap(base, head) < OVERLAP
    ):
        return "?"
    noisy = max((one["q3"] - one["q1"]) / one["median"] for one in (base, head)) > DISPERSION
    return "?" if noisy else "."


def _overlap(base: Mapping[str, float], head: Mapping[str, float]) -> float:
    common = min(base["q3"], head["q3"]) - max(base["min"], head["min"])
    if common < 0:
        return 0.0
    widths = [one["q3"] - one["min"] for one in (base, head)]
    return common / min(widths) if min(widths) > 0 else 1.0


# What the twins are really slower by


def measured_ratios(record: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By changed row: how much slower it is than its row, over all processes of all cards, as a share, with its standard error."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for card in record["cards"]:
        data = Data(card)
        for row in (row for row in ROWS if row.changed):
            both = [
                (
                    data.measurement(number, row.of, row.of),
                    data.measurement(number, row.name, row.name),
                )
                for number in data.processes
            ]
            logs = [
                log_ratio(base, head)
                for base, head in both
                if base is not None and head is not None
            ]
            if len(logs) > 1:
                error = statistics.stdev(logs) / math.sqrt(len(logs))
                seen.setdefault(row.name, []).append((math.expm1(statistics.fmean(logs)), error))
    return {
        name: (
            statistics.fmean(share for share, _ in ones),
            math.hypot(*(error for _, error in ones)) / len(ones),
        )
        for name, ones in seen.items()
    }


def seen_slopes(records: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """By twin, how latency grew with its work, logarithm over logarithm: the mean of the records that have it and saw it slower at all."""
    found: dict[str, list[float]] = {}
    for record in records:
        slopes = [card["slopes"] for card in record["cards"]]
        for name, (share, error) in measured_ratios(record).items():
            row = BY_NAME[name]
            more = statistics.fmean(math.log(work_of(row, one) / row.work) for one in slopes)
            if row.planned and share > 3 * error and more > 0:
                found.setdefault(name, []).append(
                    min(max(math.log1p(share) / more, SLOPES[0]), SLOPES[1])
                )
    return {name: statistics.fmean(seen) for name, seen in found.items()}
