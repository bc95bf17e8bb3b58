"""The verdicts of the gate's validation, from its raw data alone, by the shipped code: `gpumem compare`'s, `gpumem duet`'s, and the peers'.

The first processes of a card are the baseline. All others are heads, which the screen takes up in runs of as many processes as their
group says (`Size`), and a duet in pairs. No process is the head of a row twice in the same question. A question (`Scenario`) puts for each
row what the new code's measurement of it is: its own (unchanged code), that of a twin, or the one after an unrelated allocation. A twin is
shown with the bytes of its row: the slow-down is one that nobody declares.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gate_validation_collect import UNIT, unpacked, unpacked_stats
from gate_validation_peers import CHECKS
from gate_validation_peers import verdict as peer_verdict
from gate_validation_rows import BY_NAME, ROWS, SIZES, Asked

from pytest_gpumem.baselines.history import Accepted
from pytest_gpumem.baselines.history import Process as Accepting
from pytest_gpumem.compare.pairs import compare_sides
from pytest_gpumem.compare.sides import File, Side
from pytest_gpumem.duet.reading import delta_of
from pytest_gpumem.duet.rounds import Jury
from pytest_gpumem.duet.schedule import BASE, HEAD, Turn, turns
from pytest_gpumem.duet.workers import Process as Played
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.measurement import Conditions, Controls, Limits, Measurement, Taken, Traffic
from pytest_gpumem.records.row import Row as ResultRow
from pytest_gpumem.records.schema import device_from_json
from pytest_gpumem.records.verdict import Outcome, Verdict
from pytest_gpumem.verdicts.paired import MANY, Paired, common_plan, plan
from pytest_gpumem.verdicts.spread import level

BASELINE = 20
"""Processes of the baseline."""
PAIRS = 24
"""Pairs of processes that there must be for a duet to begin: three of its looks."""
LETTERS = {Outcome.PASS: "P", Outcome.FAIL: "F", Outcome.SUSPECT: "S", Outcome.INCONCLUSIVE: "I", Outcome.UNRELIABLE: "U", None: "O"}
"""One for each verdict; "O" is a duet that had not decided when the processes ended, "-" a row that its process could not measure."""
MISSING = "-"
DUET_LIMIT = "1%"
HALF = Asked("0.5%", 8)
"""What half a per cent more is held to besides."""
UNCHANGED, SEVERAL, ALLOCATION = "unchanged", "unchanged, several processes", "an unrelated allocation first"
HALVED = "+0.5 % held to 0.5 %"
"""Names of questions; `planned_name` gives those of slower code."""


@dataclass(frozen=True)
class Scenario:
    """One question."""

    name: str
    rows: Mapping[str, str]
    """By row of the baseline: the row that is the new code's measurement of it."""
    limits: Mapping[str, str]
    """By row: its `max_regression`."""
    processes: Mapping[str, int]
    """By row: processes of one run."""


def scenarios(measured: Container[str] | None = None) -> list[Scenario]:
    """All questions; of the rows that were measured, where it is said which."""
    found = []
    for one in _scenarios():
        rows = {row: head for row, head in one.rows.items() if measured is None or (row in measured and head in measured)}
        if rows:
            found.append(Scenario(one.name, rows, {row: one.limits[row] for row in rows}, {row: one.processes[row] for row in rows}))
    return found


def _scenarios() -> list[Scenario]:
    asked = [_scenario(UNCHANGED, {row.name: row.name for row in ROWS if not row.unrelated}, slower=False)]
    several = {row.name: row.name for row in ROWS if not row.unrelated and SIZES[row.size].slower.processes > 1}
    asked.append(_scenario(SEVERAL, several, slower=True))
    asked.append(_scenario(ALLOCATION, {row.of: row.name for row in ROWS if row.unrelated}, slower=True))
    for share in sorted({row.planned for row in ROWS if row.planned}):
        asked.append(_scenario(planned_name(share), {row.of: row.name for row in ROWS if row.planned == share}, slower=True))
    half = {row.of: row.name for row in ROWS if row.planned == 0.005 and row.size == "256 MiB"}
    asked.append(Scenario(HALVED, half, dict.fromkeys(half, HALF.limit), dict.fromkeys(half, HALF.processes)))
    return asked


def _scenario(name: str, rows: Mapping[str, str], *, slower: bool) -> Scenario:
    asked = {row: SIZES[BY_NAME[row].size].slower if slower else SIZES[BY_NAME[row].size].usual for row in rows}
    return Scenario(name, rows, {row: one.limit for row, one in asked.items()}, {row: one.processes for row, one in asked.items()})


def planned_name(share: float) -> str:
    """ "+1 %"."""
    return f"+{100 * share:g} %"


# From the record to what the shipped code takes


class Data:
    """One card's raw data, and how its processes are shared out."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self.device: DeviceFacts = device_from_json(card["device"])
        self.kinds: Mapping[str, Mapping[str, Any]] = card["rows"]
        # A session whose device changed meanwhile stores nothing: it is no process of a baseline, and nobody judges it.
        self.processes: Mapping[int, Mapping[str, Any]] = {one["number"]: one for one in card["processes"] if one["rows"]}
        numbers = sorted(self.processes)
        self.baseline, self.heads = numbers[:BASELINE], numbers[BASELINE:]
        self._seen: dict[tuple[int, str, str], Measurement | None] = {}

    def runs(self, processes: int) -> list[tuple[int, ...]]:
        """The heads that follow each other, in groups of so many."""
        return [tuple(self.heads[first : first + processes]) for first in range(0, len(self.heads) - processes + 1, processes)]

    def measurement(self, number: int, row: str, of: str) -> Measurement | None:
        """What a process measured of a row, shown as `of`; None where it could not be judged."""
        key = number, row, of
        if key not in self._seen:
            self._seen[key] = self._measurement(number, row, of)
        return self._seen[key]

    def _measurement(self, number: int, row: str, of: str) -> Measurement | None:
        process = self.processes[number]
        seen, kind = process["rows"].get(row), self.kinds.get(of)
        if seen is None or kind is None:
            return None
        controls = process.get("controls")
        read = None
        if controls is not None:
            # Seconds, or None where a control was not read; older records end with the source.
            dram, l2, launch, latency = (one and one * UNIT for one in (*controls[:3], *(controls[4:] or [None])))
            read = Controls(dram, l2, launch, latency, source=controls[3])
        return Measurement(
            label="",
            target=kind["target"],
            mode=kind["mode"],
            sampler=seen.get("sampler", "blocked"),
            sampler_reason="",
            placements=tuple((median,) for median in unpacked(seen["m"])),
            half_width=None,
            traffic=Traffic(kind["bytes"], 0),
            footprint=kind["footprint"],
            floor=process["floor"] * UNIT,
            conditions=(Conditions(), Conditions()),
            overhead=process["overhead"] * UNIT if "sampler" not in seen else None,
            taken=Taken(process["utc"], self.device.uuid, read),
        )

    def accepted(self, number: int, row: str, of: str) -> Accepted | None:
        """A row as a file holds it."""
        measurement = self.measurement(number, row, of)
        if measurement is None:
            return None
        process = Accepting(str(number), datetime.fromisoformat(self.processes[number]["utc"]), None, self.device)
        return Accepted(of, measurement, process)

    def side(self, numbers: Iterable[int], rows: Mapping[str, str], limits: Mapping[str, str]) -> Side:
        """Result files of some processes, with `rows` in them, as `gpumem compare` reads them."""
        files = []
        for number in numbers:
            made = [one for of, row in rows.items() if (one := self.accepted(number, row, of)) is not None]
            files.append(File(Path(f"{number}.json"), f"{number} {sorted(rows.values())}", self.device, tuple(made), held_to=limits))
        by_key: dict[str, list[Accepted]] = {}
        for one in sorted((one for file in files for one in file.rows), key=lambda one: (one.process.utc, one.process.id)):
            by_key.setdefault(one.key, []).append(one)
        return Side("processes", tuple(files), {key: tuple(found) for key, found in by_key.items()}, {})

    def played(self, number: int, turn: Turn, rows: Mapping[str, str], limit: str) -> Played:
        """A process as a duet has it."""
        process, made = self.processes[number], []
        for of, row in rows.items():
            measurement = self.measurement(number, row, of)
            if measurement is not None:
                made.append(ResultRow(of, Limits(max_regression=limit), Verdict(Outcome.PASS, ""), measurement))
        about = {"device": self.device.key, "uuid": self.device.uuid, "simulated": self.device.simulated}
        return Played(turn, 1, process["utc"], process["seconds"], process["pid"], rows=tuple(made), **about)


# Judging


def judged(record: Mapping[str, Any]) -> dict[str, Any]:
    """All verdicts of a record, as its `verdicts` has them."""
    found: dict[str, Any] = {"screens": [], "duets": [], "common": [], "peers": []}
    for index, card in enumerate(record["cards"]):
        data = Data(card)
        asked = scenarios(data.kinds)
        for scenario in asked:
            found["screens"] += [{"card": index, **one} for one in screens(data, scenario)]
            if scenario.name not in (SEVERAL, HALVED):  # the same heads again
                found["peers"] += [{"card": index, **one} for one in peers(data, scenario)]
        for scenario in asked:
            if scenario.name in (UNCHANGED, *(planned_name(share) for share in (0.005, 0.01))):
                found["duets"] += [{"card": index, **one} for one in duets(data, scenario)]
            if scenario.name in (UNCHANGED, planned_name(0.01)):
                found["common"] += [{"card": index, **one} for one in common_shifts(data, scenario)]
    return found


def screens(data: Data, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """The screen's verdicts: a letter for each run of each row."""
    letters: dict[str, list[str]] = {row: [] for row in scenario.rows}
    resolved: dict[str, list[float]] = {row: [] for row in scenario.rows}
    for row, verdict in screened(data, scenario):
        letters[row].append(MISSING if verdict is None else LETTERS[verdict.outcome])
        if verdict is not None and verdict.comparison is not None:
            resolved[row].append(verdict.comparison.resolvable)
    for row, head_row in scenario.rows.items():
        yield {
            "scenario": scenario.name,
            "row": row,
            "head": head_row,
            "limit": scenario.limits[row],
            "processes": scenario.processes[row],
            "outcomes": "".join(letters[row]),
            "resolves": round(statistics.median(resolved[row]), 6) if resolved[row] else None,
        }


def screened(data: Data, scenario: Scenario) -> Iterator[tuple[str, Verdict | None]]:
    """A verdict for each row and run, the runs of a row in their order, as `gpumem compare` judges a suite of the rows that have such runs;
    None where the row is missing in a process of the run."""
    baseline = data.side(data.baseline, {row: row for row in scenario.rows}, scenario.limits)
    # Rows of the same runs are one suite: that is what Holm's procedure counts.
    suites: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for row in scenario.rows:
        suites.setdefault(tuple(data.runs(scenario.processes[row])), []).append(row)
    for runs, rows in suites.items():
        known = Side(baseline.name, baseline.files, {row: baseline.rows[row] for row in rows if row in baseline.rows}, {})
        for run in runs:
            head = data.side(run, {row: scenario.rows[row] for row in rows}, scenario.limits)
            verdicts = {pair.row.nodeid: pair.row.verdict for pair in compare_sides(known, head, None, force=False).pairs}
            for row in rows:
                # A run whose processes did not all measure the row is none of so many processes.
                yield row, verdicts.get(row) if len(head.rows.get(row, ())) == len(run) else None


def duets(data: Data, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """Duets of one row each, one after the other, with as many pairs as `gpumem duet` takes until it has decided: the next begins with the
    processes after those of the one before, as long as there are enough for most (`PAIRS`)."""
    for row, head in scenario.rows.items():
        pool = data.heads
        while len(pool) >= 2 * PAIRS:
            verdict = _jury(data, pool, {row: head}).found.get(row)
            paired = verdict if isinstance(verdict, Paired) else None
            yield {
                "scenario": scenario.name,
                "row": row,
                "head": head,
                "limit": DUET_LIMIT,
                "first": pool[0],
                "outcome": LETTERS[verdict.outcome if verdict is not None else None],
                "pairs": paired.pairs if paired is not None else len(pool) // 2,
                "change": round(paired.change, 6) if paired is not None else None,
                "resolves": round(paired.resolvable, 6) if paired is not None and math.isfinite(paired.resolvable) else None,
            }
            pool = pool[2 * paired.pairs :] if paired is not None else []


def common_shifts(data: Data, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """The test of a shift of all rows together, over as many groups of processes as there are: every row of 256 and 32 MiB that has a
    twin of 1 %, all of them unchanged or all of them slower."""
    slower = (row.of for row in ROWS if row.planned == 0.01 and row.size in ("256 MiB", "32 MiB"))
    rows = {row: scenario.rows[row] for row in slower if row in scenario.rows}
    if len(rows) <= MANY:
        return
    looks = common_plan(plan(len(rows)))
    pairs = next(n for n, share in zip(looks.looks, looks.alarm, strict=True) if share)
    for numbers in data.runs(2 * pairs):
        jury = _jury(data, numbers, rows)
        common = jury.common
        yield {
            "scenario": scenario.name,
            "rows": len(jury.family),
            "first": numbers[0],
            "pairs": pairs,
            "outcome": LETTERS[common.outcome] if common is not None else MISSING,
            "change": round(common.change, 6) if common is not None else None,
        }


def _jury(data: Data, pool: Sequence[int], rows: Mapping[str, str]) -> Jury:
    """A duet's jury after those of its looks that the pool is enough for."""
    rounds: dict[int, dict[str, Played]] = {}
    own = {row: row for row in rows}
    for number, turn in zip(pool, turns(0), strict=False):
        rounds.setdefault(turn.round, {})[turn.side] = data.played(number, turn, own if turn.side == BASE else rows, DUET_LIMIT)
    first = {side: {row.key: row for row in rounds[1][side].rows} for side in (BASE, HEAD)}
    family = [row for row in rows if all(row in first[side] for side in first)]
    schedule = plan(len(family))
    deltas = {row: delta_of(first[BASE][row], first[HEAD][row], None) for row in family}
    jury = Jury(family, schedule, deltas)
    for look in schedule.looks:
        if look <= len(rounds) and not jury.done:
            jury.look(look, rounds)
    return jury


def peers(data: Data, scenario: Scenario) -> Iterator[dict[str, Any]]:
    """What the peers say of the same heads, each against one process of the baseline, in turn."""
    for row, head_row in scenario.rows.items():
        said: dict[str, list[str]] = {check: [] for check in CHECKS}
        for index, number in enumerate(data.heads):
            base = data.processes[data.baseline[index % len(data.baseline)]]["rows"].get(row)
            head = data.processes[number]["rows"].get(head_row)
            for check in CHECKS:
                missing = base is None or head is None
                said[check].append(MISSING if missing else peer_verdict(check, unpacked_stats(base), unpacked_stats(head)))
        yield {"scenario": scenario.name, "row": row, "head": head_row, "said": {check: "".join(found) for check, found in said.items()}}


# What the twins are really slower by


def ratios(card: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By changed row: how much slower it is than its row, as a share, over all processes of a card, with its standard error."""
    data, found = Data(card), {}
    for row in ROWS:
        if not row.changed:
            continue
        logs = []
        for number in data.processes:
            both = [data.measurement(number, name, name) for name in (row.of, row.name)]
            if both[0] is not None and both[1] is not None:
                base, head = level([both[0], both[1]])
                logs.append(math.log(head / base))
        if len(logs) > 1:
            found[row.name] = (math.expm1(statistics.fmean(logs)), statistics.stdev(logs) / math.sqrt(len(logs)))
    return found
