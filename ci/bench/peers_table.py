"""The record of peers.py as text."""

from __future__ import annotations

from typing import Any

import peers_summary
from peers_summary import Interval, Line, Row

CONDITIONS = {"same": "The same allocations in every process", "random": "Random unrelated allocations first, another draw in every round"}


def table(record: dict[str, Any]) -> str:
    """The rows by condition and size, the claims that the record can judge, and the parts of our spread; at most 119 columns."""
    device = record["device"]
    conditions = sorted({run["condition"] for run in record["runs"]}, key=list(CONDITIONS).index)
    cards = len({run["card"] for run in record["runs"]})
    failed = sum(run["error"] is not None for run in record["runs"])
    simulated = "SIMULATED " if device["simulated"] else ""
    head = f"{simulated}{device['name']}, driver {device['driver']}, {record['ended'][:10]}"
    if cards > 1:
        head += f", {cards} cards"
    said = [head, ", ".join(f"{name} {version}" for name, version in record["versions"].items())]
    if failed:
        said.append(f"{failed} of {len(record['runs'])} workers failed and are left out")
    rows = peers_summary.rows(record)
    for condition in conditions:
        said += ["", CONDITIONS[condition], "", _HEAD]
        last = None
        for row in rows:
            if row.condition == condition:
                said.append(_row(row, first=row.mib != last))
                last = row.mib
    said += ["", f"{'':4}  {'claim':<62}{'measured (95 % interval)':<34}limit"]
    claims = peers_summary.lines(record)
    said += [_line(line, line.measured) for line in claims if line.measured is not None]
    if left := sum(line.measured is None for line in claims):
        said.append(f"{left} further claims are not measured in this record")
    parts = peers_summary.summary(record)["clean_cold_spread_is_made_of"]
    if parts:
        said += ["", "What gpumem clean-cold's spread between processes is made of; 'expected': if placements were independent", ""]
        said.append(
            f"{'':<18}{'placements':>10}{'between them %':>16}{'expected %':>12}{'overhead %':>12}{'found %':>10}{'the rest %':>12}"
        )
        for part in parts:
            said.append(
                f"{part['mib']:>4} MiB, {part['condition']:<8}{part['placements']:>10.0f}{100 * part['between_placements']:>16.3f}"
                f"{100 * part['expected']:>12.3f}{100 * part['overhead']:>12.3f}{100 * part['found']:>10.3f}{100 * part['rest']:>12.3f}"
            )
    return "\n".join(said)


_HEAD = f"{'arrays':<9}{'way':<28}{'processes':>9}{'value us':>11}  {'spread % (95 % interval)':<27}{'wall s':>8}{'samples':>9}"


def _row(row: Row, *, first: bool) -> str:
    size = f"{row.mib} MiB" if first else ""
    spread = "" if row.spread is None else _percent(row.spread)
    noted = f"  {row.throttled} throttled" if row.throttled else ""
    return f"{size:<9}{row.way:<28}{row.processes:>9}{row.mean * 1e6:>11.3f}  {spread:<27}{row.wall:>8.3f}{row.samples:>9.0f}{noted}"


def _percent(interval: Interval) -> str:
    return f"{100 * interval.value:.3f} ({100 * interval.low:.3f} to {100 * interval.high:.3f})"


def _line(line: Line, measured: Interval) -> str:
    mark = "ok" if line.holds else "MISS"
    ratio = "over" in line.claim
    claim = f"{line.claim}, {line.mib} MiB, {line.condition}"
    said = f"{measured.value:.3f} ({measured.low:.3f} to {measured.high:.3f})" if ratio else f"{_percent(measured)} %"
    if not line.beyond_doubt:
        said += " *"
    return f"{mark:<4}  {claim:<62}{said:<34}{f'{line.limit:.3g}' if ratio else f'{100 * line.limit:.3g} %'}"
