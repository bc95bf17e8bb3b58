"""Counts and bounds of the gate's validation, from the verdicts of its record. Pure."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gate_validation_rows import BY_NAME, SLOPES, work_of
from gate_validation_verdicts import ALLOCATION, HALVED, LETTERS, MISSING, SEVERAL, UNCHANGED, planned_name, ratios
from scipy.stats import beta

CONFIDENCE = 0.95
FLAGGED = "FS"
"""Letters of verdicts that flag a row."""
UNFINISHED = LETTERS[None]
"""That of a duet without an end."""
ALARMS, POWER, POWER_OF_HALF = 1e-3, 0.99, 0.95
CONFIRMED = 0.1
"""Share of its plan by which a twin's slow-down, over all processes, may differ from it and still be counted."""
TRIALS, TRIALS_OF_HALF, VERDICTS = 299, 59, 3000
"""The least numbers that a target asks for."""


def interval(hits: float, count: float) -> tuple[float, float]:
    """Clopper-Pearson interval of a share, 95 %; `hits` and `count` may be effective numbers. All of [0, 1] without any."""
    if count <= 0:
        return 0.0, 1.0
    tail = (1 - CONFIDENCE) / 2
    low = 0.0 if hits <= 0 else float(beta.ppf(tail, hits, count - hits + 1))
    high = 1.0 if hits >= count else float(beta.ppf(1 - tail, hits + 1, count - hits))
    return low, high


def clustered(hits: Sequence[int], sizes: Sequence[int]) -> tuple[float, float]:
    """The interval of a share, 95 %, where the verdicts of one cluster may hang together.

    Clopper-Pearson on the effective number (Rao and Scott 1992, "A simple method for the analysis of clustered binary data"): the number
    of verdicts over what clusters differ by more than independent verdicts would, at least 1. Where all verdicts agree, nothing shows how
    they hang together; then a cluster counts as one.

    Args:
        hits: by cluster.
        sizes: verdicts by cluster.
    """
    both = [(hit, size) for hit, size in zip(hits, sizes, strict=True) if size]
    count, total = sum(size for _, size in both), sum(hit for hit, _ in both)
    if not count:
        return 0.0, 1.0
    if total in (0, count) or len(both) < 2:
        return interval(len(both) * total / count, len(both))
    share = total / count
    between = len(both) / (len(both) - 1) * sum((hit - share * size) ** 2 for hit, size in both) / count**2
    effective = count / max(between / (share * (1 - share) / count), 1.0)
    return interval(share * effective, effective)


@dataclass
class Tally:
    """Verdicts of one question about one group of rows."""

    limit: str
    processes: int
    rows: int = 0
    runs: int = 0
    letters: Counter[str] = field(default_factory=Counter)
    """Of the verdicts."""
    flagged: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By card and run: flagged verdicts."""
    judged: Counter[tuple[int, int]] = field(default_factory=Counter)
    """By card and run: verdicts."""
    resolves: list[float] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Verdicts."""
        return sum(self.letters.values())

    @property
    def caught(self) -> int:
        """Verdicts that flag."""
        return sum(self.letters[letter] for letter in FLAGGED)

    def add(self, screen: Mapping[str, Any]) -> None:
        """Take in the runs of a row."""
        self.rows += 1
        self.runs = max(self.runs, len(screen["outcomes"]))
        for run, letter in enumerate(screen["outcomes"]):
            if letter == MISSING:
                continue
            self.letters[letter] += 1
            self.judged[screen["card"], run] += 1
            self.flagged[screen["card"], run] += letter in FLAGGED
        if screen["resolves"] is not None:
            self.resolves.append(screen["resolves"])
        self.heads.append(screen["head"])

    def bounds(self) -> tuple[float, float]:
        """Of the share that is flagged, by verdicts."""
        return interval(self.caught, self.count)

    def bounds_by_run(self) -> tuple[float, float]:
        """Of the share that is flagged, verdicts of one run hanging together."""
        runs = sorted(self.judged)
        return clustered([self.flagged[run] for run in runs], [self.judged[run] for run in runs])


def off_plan(head: str, ratios: Mapping[str, tuple[float, float]]) -> bool:
    """Whether a row is a twin that turned out to be slower, or less slow, than it was meant to be."""
    planned = BY_NAME[head].planned
    return planned > 0 and head in ratios and abs(ratios[head][0] / planned - 1) > CONFIRMED


def tallies(verdicts: Mapping[str, Any], left_out: Container[str] = ()) -> dict[tuple[str, str], Tally]:
    """By question and group of rows, without the twins that are left out."""
    found: dict[tuple[str, str], Tally] = {}
    for screen in verdicts["screens"]:
        if screen["head"] != screen["row"] and screen["head"] in left_out:
            continue
        key = screen["scenario"], BY_NAME[screen["row"]].size
        tally = found.setdefault(key, Tally(screen["limit"], screen["processes"]))
        tally.add(screen)
    return found


def together(several: Iterable[Tally]) -> Tally:
    """Tallies of the same question over groups of rows, whose runs are the same processes."""
    found = Tally("", 0)
    for tally in several:
        found.rows += tally.rows
        found.runs = max(found.runs, tally.runs)
        for name in ("letters", "flagged", "judged"):
            setattr(found, name, getattr(found, name) + getattr(tally, name))
        # Counters drop zeros when they are added: a run without a flagged verdict is one all the same.
        found.judged.update(dict.fromkeys(tally.judged, 0))
    return found


def measured_ratios(record: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """By changed row: how much slower it is than its row, over all processes of all cards, as a share, with its standard error."""
    seen: dict[str, list[tuple[float, float]]] = {}
    for card in record["cards"]:
        for name, one in ratios(card).items():
            seen.setdefault(name, []).append(one)
    return {
        name: (sum(share for share, _ in ones) / len(ones), sum(error**2 for _, error in ones) ** 0.5 / len(ones))
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
                found.setdefault(name, []).append(min(max(math.log1p(share) / more, SLOPES[0]), SLOPES[1]))
    return {name: statistics.fmean(seen) for name, seen in found.items()}


def peer_counts(verdicts: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Counter[str]]]:
    """By question and group of rows, and by check: letters."""
    found: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for one in verdicts["peers"]:
        into = found.setdefault((one["scenario"], BY_NAME[one["row"]].size), {})
        for check, letters in one["said"].items():
            into.setdefault(check, Counter()).update(letters.replace(MISSING, ""))
    return found


@dataclass(frozen=True)
class Target:
    """Something that the validation must show."""

    sentence: str
    met: bool | None
    """None: too few verdicts to say."""


def targets(*records: Mapping[str, Any]) -> list[Target]:
    """What must be shown, and whether it was, by one record or by several together."""
    duets, commons, found = list[Mapping[str, Any]](), list[Mapping[str, Any]](), dict[tuple[str, str], Tally]()
    for record in records:
        ratios = measured_ratios(record)
        off = {name for name in ratios if off_plan(name, ratios)}
        duets += [one for one in record["verdicts"]["duets"] if one["head"] == one["row"] or one["head"] not in off]
        commons += record["verdicts"]["common"]
        for key, tally in tallies(record["verdicts"], off).items():
            found[key] = together((found[key], tally)) if key in found else tally
    every = together(tally for (name, _), tally in found.items() if name == UNCHANGED)
    said = [
        Target(
            f"unchanged code: {every.caught} alarms in {every.count} verdicts (0 in {VERDICTS} or more)",
            None if every.count < VERDICTS and not every.caught else every.caught == 0,
        )
    ]
    several = together(tally for (name, _), tally in found.items() if name == SEVERAL)
    if several.count:
        said.append(
            Target(f"unchanged code, several processes: {several.caught} alarms in {several.count} verdicts (0)", several.caught == 0)
        )
    elsewhere = [tally for (name, _), tally in found.items() if name == ALLOCATION and tally.count]
    if elsewhere:
        alarms, count = sum(tally.caught for tally in elsewhere), sum(tally.count for tally in elsewhere)
        said.append(Target(f"after an unrelated allocation: {alarms} alarms in {count} verdicts (0)", alarms == 0))
    for name, size, least, trials in (
        (planned_name(0.01), "256 MiB", POWER, TRIALS),
        (planned_name(0.01), "32 MiB", POWER, TRIALS),
        (HALVED, "256 MiB", POWER_OF_HALF, TRIALS_OF_HALF),
    ):
        if (tally := found.get((name, size))) is not None and tally.count:
            share = tally.caught / tally.count
            said.append(
                Target(
                    f"{name}, {size}: {tally.caught} of {tally.count} caught, {tally.letters['I']} undecided, {tally.letters['P']} passed "
                    f"({least:.0%} of {trials} or more caught)",
                    None if tally.count < trials and share >= least else share >= least,
                )
            )
    for name, right, what in ((UNCHANGED, "P", "PASS"), (planned_name(0.01), "F", "FAIL")):
        for size in ("256 MiB", "32 MiB"):
            letters = Counter(one["outcome"] for one in duets if one["scenario"] == name and BY_NAME[one["row"]].size == size)
            if decided := sum(letters.values()) - letters[UNFINISHED]:
                sentence = f"duets, {name}, {size}: {letters[right]} of {decided} {what}, {letters[UNFINISHED]} unfinished (all)"
                said.append(Target(sentence, letters[right] == decided))
    slower = [one["outcome"] for one in commons if one["scenario"] != UNCHANGED]
    same = [one["outcome"] for one in commons if one["scenario"] == UNCHANGED]
    if slower:
        sentence = f"the common shift is a FAIL in {slower.count('F')} of {len(slower)} duets"
        said.append(Target(f"all rows 1 % slower: {sentence} (all)", set(slower) == {"F"}))
        sentence = f"the common shift is a FAIL in {same.count('F')} of {len(same)} duets"
        said.append(Target(f"all rows unchanged: {sentence} (none)", "F" not in same))
    return said
