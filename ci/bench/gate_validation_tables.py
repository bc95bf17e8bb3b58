"""The record of the gate's validation as text."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

from gate_validation_peers import CHECKS, NVBENCH, ROBUST
from gate_validation_rows import BY_NAME, ROWS, SIZES
from gate_validation_summary import (
    CONFIRMED,
    Tally,
    interval,
    measured_ratios,
    off_plan,
    peer_counts,
    tallies,
    targets,
    together,
)
from gate_validation_verdicts import ALLOCATION, BASELINE, HALVED, LETTERS, SEVERAL, UNCHANGED, planned_name

MET = {True: "met", False: "NOT MET", None: "too few"}
SHORT = {NVBENCH: "nvbench", ROBUST: "nvb. robust"}


def table(record: Mapping[str, Any]) -> str:
    """The record as text."""
    lines = list(_head(record))
    if "verdicts" not in record:
        return "\n".join([*lines, "", "not judged yet"])
    ratios = measured_ratios(record)
    off = {name for name in ratios if off_plan(name, ratios)}
    found, as_planned = tallies(record["verdicts"]), tallies(record["verdicts"], off)
    others = tallies(record["verdicts"], ratios.keys() - off) if off else {}
    for part in (
        _unchanged(found),
        _slower(as_planned, others, ratios),
        _duets(record["verdicts"], off),
        _common(record["verdicts"]),
        _peers(record["verdicts"]),
    ):
        if drawn := list(part):
            lines += ["", *drawn]
    lines += ["", *(f"{MET[target.met]:<8} {target.sentence}" for target in targets(record))]
    return "\n".join(line.rstrip() for line in lines)


def _head(record: Mapping[str, Any]) -> Iterator[str]:
    device = record["cards"][0]["device"]
    simulated = "SIMULATED: " if record["simulated"] else ""
    driver = f", driver {device['driver']}" if device.get("driver") else ""
    yield f"{simulated}{device['name']}{driver}, {record['ended'][:10]}"
    processes = [process for card in record["cards"] for process in card["processes"]]
    each = statistics.median(process["seconds"] for process in processes)
    cards, spoilt = len(record["cards"]), sum(len(process["spoilt"]) for process in processes)
    failed = sum(len(card["failed"]) for card in record["cards"])
    rows = max(len(card["rows"]) for card in record["cards"])
    yield (
        f"{len(processes)} processes of {rows} rows on {_counted(cards, 'card')}, {each:.1f} s each, one session; "
        f"the first {BASELINE} of a card are its baseline"
    )
    how = " ".join(record["options"]) or "measured as by default"
    yield f"{_counted(failed, 'process', 'es')} failed, {_counted(spoilt, 'row')} could not be judged; {how}"


def _counted(count: int, thing: str, plural: str = "s") -> str:
    return f"{count} {thing}{'' if count == 1 else plural}"


def _outcomes(tally: Tally) -> str:
    return " ".join(f"{tally.letters[letter]:>5}" for letter in "FSIP")


def _share(hits: int, count: int) -> str:
    low, high = interval(hits, count)
    return f"{_figure(hits / count)} ({_figure(low)} to {_figure(high)})"


def _figure(share: float) -> str:
    """Per cent, with two digits where that says more than one."""
    return f"{100 * share:.2f}" if 0 < share < 0.01 or 0.99 < share < 1 else f"{100 * share:.1f}"


def _bounds(bounds: tuple[float, float]) -> str:
    return f"{_figure(bounds[0])} to {_figure(bounds[1])}"


def _resolves(tally: Tally) -> str:
    return f"{100 * statistics.median(tally.resolves):.2f}" if tally.resolves else ""


_ENDS = f"{'FAIL':>5} {'SUSP.':>5} {'INC.':>5} {'PASS':>5}"


def _unchanged(found: Mapping[tuple[str, str], Tally]) -> Iterator[str]:
    yield "unchanged code: alarms are FAIL and SUSPECT"
    yield f"{'rows of':<19} {'limit':>5} {'run':>3} {'rows':>4} {'count':>5} {_ENDS} {'resolves':>8}  {'alarms, %':<20} by run, %"
    for name, said in ((UNCHANGED, ""), (SEVERAL, ""), (ALLOCATION, "after alloc.")):
        own = {size: tally for (scenario, size), tally in found.items() if scenario == name and tally.count}
        for size, tally in own.items():
            yield _line(f"{size} {said}", tally)
        if name == UNCHANGED and own:
            yield _line("all of these", together(own.values()))


def _line(name: str, tally: Tally) -> str:
    asked = f"{tally.limit:>5} {tally.processes or '':>3} {tally.rows:>4} {tally.count:>5}"
    bounds = f"{_share(tally.caught, tally.count):<20} {_bounds(tally.bounds_by_run())}"
    return f"{name:<19} {asked} {_outcomes(tally)} {_resolves(tally):>8}  {bounds}"


def _slower(
    as_planned: Mapping[tuple[str, str], Tally], others: Mapping[tuple[str, str], Tally], ratios: Mapping[str, tuple[float, float]]
) -> Iterator[str]:
    yield "slower code: caught are FAIL and SUSPECT" + (
        f"; * twins that turned out more than {CONFIRMED:.0%} off their plan, which no target counts" if others else ""
    )
    yield (
        f"{'rows of':<8} {'planned':>7} {'measured, %':>14} {'limit':>5} {'run':>3} {'rows':>4} {'count':>5} {_ENDS} {'resolves':>8}  "
        f"{'caught, %':<22} by run, %"
    )
    names = [planned_name(share) for share in sorted({row.planned for row in ROWS if row.planned})]
    for size in SIZES:
        for name, star in itertools.product([*names, HALVED], ("", "*")):
            tally = (others if star else as_planned).get((name, size))
            if tally is None or not tally.count:
                continue
            true = [100 * ratios[head][0] for head in dict.fromkeys(tally.heads) if head in ratios]
            seen = f"{min(true):.2f}" + (f" to {max(true):.2f}" if len(true) > 1 else "") if true else ""
            asked = f"{tally.limit:>5} {tally.processes:>3} {tally.rows:>4} {tally.count:>5}"
            bounds = f"{_share(tally.caught, tally.count):<22} {_bounds(tally.bounds_by_run())}"
            yield f"{size:<8} {star + name.partition(' held')[0]:>7} {seen:>14} {asked} {_outcomes(tally)} {_resolves(tally):>8}  {bounds}"


def _duets(verdicts: Mapping[str, Any], off: Container[str]) -> Iterator[str]:
    if not verdicts["duets"]:
        return
    yield "duets of single rows at max_regression 1%, with as many pairs as they need; unfinished: the processes ended before"
    yield f"{'rows of':<8} {'code':>10} {'duets':>6} {'FAIL':>6} {'INC.':>6} {'PASS':>6} {'unfinished':>10}  {'pairs':<9}"
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for one in verdicts["duets"]:
        star = "*" if one["head"] != one["row"] and one["head"] in off else ""
        groups.setdefault((BY_NAME[one["row"]].size, star + one["scenario"]), []).append(one)
    for (size, name), ones in sorted(groups.items(), key=lambda group: list(SIZES).index(group[0][0])):
        letters = Counter(one["outcome"] for one in ones)
        decided = [one["pairs"] for one in ones if one["outcome"] != LETTERS[None]]
        pairs = (f"{min(decided)} to {max(decided)}" if len(set(decided)) > 1 else f"{decided[0]}") if decided else ""
        figures = " ".join(f"{letters[letter]:>6}" for letter in "FIP")
        yield f"{size:<8} {name:>10} {len(ones):>6} {figures} {letters[LETTERS[None]]:>10}  {pairs:<9}"


def _common(verdicts: Mapping[str, Any]) -> Iterator[str]:
    for name, what in ((UNCHANGED, "all unchanged"), (planned_name(0.01), "all 1 % slower")):
        ones = [one for one in verdicts["common"] if one["scenario"] == name]
        if ones:
            shifts = [100 * one["change"] for one in ones if one["change"] is not None]
            letters = [one["outcome"] for one in ones]
            yield (
                f"common shift of {ones[0]['rows']} rows over {ones[0]['pairs']} pairs, {what}: {letters.count('F')} FAIL, "
                f"{letters.count('P')} PASS of {len(ones)}; {min(shifts):+.3f} to {max(shifts):+.3f} %"
            )


def _peers(verdicts: Mapping[str, Any]) -> Iterator[str]:
    counts = peer_counts(verdicts)
    if not any(sum(letters.values()) for checks in counts.values() for letters in checks.values()):
        return
    yield "peers on the same data, one process against one: flagged as slower, % (and undecided, %)"
    yield f"{'rows of':<8} {'code':>10} {'pairs':>6} " + " ".join(f"{SHORT.get(check, check):>12}" for check in CHECKS)
    for size in SIZES:
        for (name, group), checks in counts.items():
            count = sum(checks[CHECKS[0]].values())
            if group != size or not count:
                continue
            cells = []
            for check in CHECKS:
                flagged, open_ = (100 * checks[check][letter] / count for letter in "X?")
                cells.append(f"{flagged:.1f}" + (f" ({open_:.1f})" if open_ else ""))
            code = "allocation" if name == ALLOCATION else name
            yield f"{size:<8} {code:>10} {count:>6} " + " ".join(f"{cell:>12}" for cell in cells)
