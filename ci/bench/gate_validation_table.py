"""What the records of the gate's validation show, those of one kind of GPU together.

    python ci/bench/gate_validation_table.py                # all records of GPUs that were measured as by default
    python ci/bench/gate_validation_table.py FILE ...

Rows of one process are near-duplicates of each other, and all heads of a session are judged against one baseline. So a bound counts
processes, or runs of several, with any wrong verdict, and baselines with any wrong verdict; it never counts verdicts.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where PYTHONSAFEPATH is set
sys.path.append(str(Path(__file__).resolve().parents[1]))

from gate_validation_rows import BY_NAME, SIZES
from gate_validation_verdicts import (
    ABOVE,
    CHECKS,
    MISSING,
    NVBENCH,
    OPEN,
    ROBUST,
    TWICE,
    baseline_of,
    measured_ratios,
)
from renew_tables import flawed, flaws
from scipy.stats import beta

from pytest_gpumem.units import parse_share

RECORDS = Path(__file__).resolve().parents[1] / "records"
CONFIDENCE = 0.95
SHORT = {NVBENCH: "nvbench", ROBUST: "nvb. robust"}
Record = Mapping[str, Any]


def table(*records: Record, projects: Sequence[Record] = ()) -> str:
    """Records that were measured in one way, as text.
    `projects`: records of `limit_proof.py`, whose runs of unchanged code count too.
    """
    lines = list(_head(records))
    if any("verdicts" not in record for record in records):
        return "\n".join([*lines, "", "not judged yet"])
    for part in (
        _screens(records),
        _unchanged(records, projects),
        _duets(records),
        _peers(records),
    ):
        if drawn := list(part):
            lines += ["", *drawn]
    return "\n".join(line.rstrip() for line in lines)


def at_most(wrong: int, count: int) -> float:
    """Upper end of the Clopper-Pearson interval of a share (95 %, two-sided)."""
    return float(beta.ppf((1 + CONFIDENCE) / 2, wrong + 1, count - wrong)) if wrong < count else 1.0


def wrong_letters(slower: float | None, limit: float) -> str:
    """The verdicts that code must not get which is slower by a share, None for unchanged code."""
    if slower is None:
        return "F" + ABOVE
    return "P" if slower >= limit else ""


def _head(records: Sequence[Record]) -> Iterator[str]:
    cards = [card for record in records for card in record["cards"]]
    names = sorted(
        {
            ("SIMULATED: " if record["simulated"] else "") + card["device"]["name"]
            for record in records
            for card in record["cards"]
        }
    )
    days = sorted({record["ended"][:10] for record in records})
    processes = sum(len(card["processes"]) for card in cards)
    uuids, failed = (
        {card["device"]["uuid"] for card in cards},
        sum(len(card["failed"]) for card in cards),
    )
    way = " ".join(records[0]["options"]) or "measured as by default"
    yield f"{', '.join(names)}, {' to '.join(dict.fromkeys((days[0], days[-1])))}, {way}"
    yield f"{processes} processes on {len(uuids)} cards, {failed} more failed"
    shapes = dict.fromkeys(f"{len(runs)} runs of {runs[0]}" for runs in map(baseline_of, records))
    yield f"{len(cards)} baselines: the first processes of each card and session, {' or '.join(shapes)}"
    yield "wrong: FAIL or an interval above the limit (above) of unchanged code; PASS of code slower by the limit"


@dataclass
class _Group:
    """Verdicts of one question about one group of rows."""

    letters: Counter[str] = field(default_factory=Counter)
    slower: list[float] = field(default_factory=list)
    """Of each twin: the share by which it is slower than its row."""
    runs: dict[tuple[int, ...], bool] = field(default_factory=dict)
    """By record, session and run: True with any wrong verdict."""
    baselines: dict[tuple[int, ...], bool] = field(default_factory=dict)
    """By record and session, the same."""


def _screens(records: Sequence[Record]) -> Iterator[str]:
    yield (
        f"{'code':<29} {'rows of':<8} {'slower by, %':>12} {'limit':>5} {'run':>3} {'FAIL':>5} {'above':>5} {'UND.':>5} {'PASS':>5}"
        f" {'wrong runs, %':>17} {'baselines, %':>15}"
    )
    ratios = [measured_ratios(record) for record in records]
    groups: dict[tuple[str, str, str, int], _Group] = {}
    for number, record in enumerate(records):
        for one in record["verdicts"]["screens"]:
            group = groups.setdefault(
                (one["question"], BY_NAME[one["row"]].size, one["limit"], one["processes"]),
                _Group(),
            )
            twin = BY_NAME[one["head"]].planned and one["head"] != one["row"]
            slower = ratios[number].get(one["head"], (0.0, 0.0))[0] if twin else None
            group.slower += [slower] if slower is not None else []
            wrong = wrong_letters(slower, parse_share(one["limit"]))
            for run, letter in enumerate(one["outcomes"]):
                if letter != MISSING:
                    group.letters[letter] += 1
                    for wrongs, key in (
                        (group.runs, (number, one["card"], run)),
                        (group.baselines, (number, one["card"])),
                    ):
                        wrongs[key] = wrongs.get(key, False) or letter in wrong
    for (question, size, limit, processes), group in groups.items():
        if group.letters:
            low, high = (
                f"{100 * end(group.slower):.2f}" if group.slower else "" for end in (min, max)
            )
            between = low if low == high else f"{low} to {high}"
            counts = " ".join(f"{group.letters[one]:>5}" for one in ("F", ABOVE, "U", "P"))
            bounds = f"{_bounded(group.runs.values()):>17} {_bounded(group.baselines.values()):>15}"
            # Code that is slower by less than the limit may get any verdict.
            judged = not group.slower or max(group.slower) >= parse_share(limit)
            yield f"{question:<29} {size:<8} {between:>12} {limit:>5} {processes:>3} {counts} {bounds if judged else ''}"


def _unchanged(records: Sequence[Record], projects: Sequence[Record]) -> Iterator[str]:
    """Runs and baselines of unchanged code, whatever the rows, limits and processes of a run."""
    yield f"{'unchanged code, all rows':<78} {'wrong runs, %':>17} {'baselines, %':>15}"
    runs, baselines = list[bool](), list[bool]()
    for record in records:
        found: dict[int, dict[int, bool]] = {}
        for one in record["verdicts"]["screens"]:
            if one["row"] == one["head"]:
                wrongs, size = found.setdefault(one["card"], {}), one["processes"]
                for number, letter in enumerate(one["outcomes"]):
                    for head in range(
                        number * size, (number + 1) * size
                    ):  # each process is in a run of every size
                        wrongs[head] = wrongs.get(head, False) or letter in wrong_letters(None, 0.0)
        runs += [wrong for wrongs in found.values() for wrong in wrongs.values()]
        baselines += [any(wrongs.values()) for wrongs in found.values()]
    yield f"{'these sessions, by process':<78} {_bounded(runs):>17} {_bounded(baselines):>15}"
    if projects:
        sessions = [[_failed(one) for one in _unchanged_runs(project)] for project in projects]
        rows = sum(len(one["rows"]) for project in projects for one in _unchanged_runs(project))
        name = f"a user's project (limit_proof.py), {rows} rows held to 1 %, by run"
        own = [any(runs) for runs in sessions]
        yield f"{name:<78} {_bounded(itertools.chain(*sessions)):>17} {_bounded(own):>15}"
        yield f"{'together':<78} {'':>17} {_bounded([*baselines, *own]):>15}"


def _unchanged_runs(project: Record) -> list[Record]:
    """The runs and gates of unchanged code in a record of `limit_proof.py`."""
    entries = [*project["parts"].get("unchanged", []), *project["parts"].get("gate", [])]
    return [
        one for one in entries if "error" not in one and one.get("changes", "comment") == "comment"
    ]


def _failed(run: Record) -> bool:
    return any(row["outcome"] == "FAIL" for row in run["rows"])


def _bounded(wrong: Iterable[bool]) -> str:
    found = list(wrong)
    return f"{sum(found)} of {len(found)}, <{100 * at_most(sum(found), len(found)):.3g}"


def _duets(records: Sequence[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        for one in record["verdicts"]["duets"]:
            groups.setdefault((one["question"], BY_NAME[one["row"]].size, one["limit"]), []).append(
                one
            )
    if not groups:
        return
    yield "duets of single rows, in pairs of processes; open: the processes ended before a decision; no pairs against slow modes"
    yield f"{'code':<29} {'rows of':<8} {'limit':>5} {'duets':>6} {'FAIL':>6} {'PASS':>6} {'open':>6}  pairs"
    for (question, size, limit), ones in sorted(
        groups.items(), key=lambda one: (one[0][0] == TWICE, list(SIZES).index(one[0][1]))
    ):
        letters = Counter(one["outcome"] for one in ones)
        pairs = sorted(one["pairs"] for one in ones if one["outcome"] != OPEN)
        seen = f"{pairs[0]} to {pairs[-1]}, median {pairs[len(pairs) // 2]}" if pairs else ""
        yield f"{question:<29} {size:<8} {limit:>5} {len(ones):>6} {letters['F']:>6} {letters['P']:>6} {letters[OPEN]:>6}  {seen}"


def _peers(records: Sequence[Record]) -> Iterator[str]:
    groups: dict[tuple[str, str], dict[str, Counter[str]]] = {}
    for record in records:
        for one in record["verdicts"]["peers"]:
            into = groups.setdefault(
                (one["question"].partition(",")[0], BY_NAME[one["row"]].size),
                {check: Counter() for check in CHECKS},
            )
            for check, letters in one["found"].items():
                into[check].update(letters.replace(MISSING, ""))
    if not groups:
        return
    yield "peers on the same data, one process against one: flagged as slower, % (and undecided, %)"
    yield f"{'code':<29} {'rows of':<8} {'pairs':>6} " + " ".join(
        f"{SHORT.get(check, check):>12}" for check in CHECKS
    )
    for (question, size), checks in groups.items():
        count = checks[CHECKS[0]].total()
        if not count:
            continue
        cells = []
        for check in CHECKS:
            flagged, undecided = (100 * checks[check][one] / count for one in "X?")
            cells.append(f"{flagged:.1f}" + (f" ({undecided:.1f})" if undecided else ""))
        yield f"{question:<29} {size:<8} {count:>6} " + " ".join(f"{cell:>12}" for cell in cells)


def main() -> int:
    """Print."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(RECORDS.glob("*/gate_validation*.json"))
    kinds: dict[str, list[Record]] = {}
    for record in (json.loads(path.read_text()) for path in paths):
        if sys.argv[1:] or not (record["simulated"] or record["options"]):
            kinds.setdefault(record["cards"][0]["device"]["name"], []).append(record)
    projects = [
        json.loads(path.read_text()) for path in sorted(RECORDS.glob("*/limit_proof*.json"))
    ]
    tables = list[str]()
    for name, records in kinds.items():
        first, _, rest = table(
            *records, projects=[one for one in projects if one["device"]["name"] == name]
        ).partition("\n")
        found = dict.fromkeys(flaw for record in records for flaw in flaws(record))
        tables.append("\n".join([first, *flawed(list(found)), rest]))
    print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
