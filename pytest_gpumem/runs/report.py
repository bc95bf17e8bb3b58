"""The report of a duet: a table, a sentence for each verdict, a JSON document, the exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.runs.duet import Duet
from pytest_gpumem.runs.pairs import DuetRow
from pytest_gpumem.runs.processes import ProcessRecord
from pytest_gpumem.units import format_time

SCHEMA = 4  # version of the document's layout
_HEADINGS = ("base", "head", "change", "from", "to", "pairs")


def exit_code(duet: Duet, *, strict: bool) -> int:
    """Return FINE, FAILED if a row fails, or NO_VERDICT if nothing was judged.

    Under `strict` it is NO_VERDICT too unless each row is a PASS of a real GPU.
    """
    outcomes = [row.outcome for row in duet.rows]
    if Outcome.FAIL in outcomes:
        return Exit.FAILED
    if not any(row.results for row in duet.rows):
        return Exit.NO_VERDICT
    simulated = duet.device is not None and duet.device.simulated
    if strict and (simulated or any(outcome is not Outcome.PASS for outcome in outcomes)):
        return Exit.NO_VERDICT
    return Exit.FINE


def text(duet: Duet, *, width: int, colour: bool, seconds: float) -> str:
    """Return the table and a sentence for each verdict, without a trailing line break."""
    lines, simulated = [], ""
    if duet.device is not None:
        lines.append(printable(duet.device.name_and_driver))
        simulated = " (simulated)" if duet.device.simulated else ""
    compared = [row for row in duet.rows if row.outcome is not None]
    if compared:
        lines.append(_table(compared, width, colour, simulated))
    for row in duet.rows:
        name = "NO VERDICT" if row.outcome is None else row.outcome.value
        lines += wrapped(printable(f"{name}{simulated} {row.key}: {row.sentence}"), width)
        for difference in row.differences:
            lines += wrapped(printable(f"  why: {describe(difference)}"), width)
    lines.append(f"{counted(len(duet.processes), 'process')} in {seconds:.0f} s")
    return "\n".join(lines)


def _table(rows: Sequence[DuetRow], width: int, colour: bool, simulated: str) -> str:
    lines = []
    for row in rows:
        figures = []
        for latency in row.latencies:
            figures.append("" if latency is None else format_time(latency))
        if row.pairs is None:
            figures += ["", "", "", ""]
        else:
            figures.append(change(row.pairs.change))
            for end in row.pairs.bounds:
                figures.append(change(end) if math.isfinite(end) else "")
            figures.append(str(len(row.pairs.log_ratios)))
        outcome = row.outcome or Outcome.UNDECIDED
        text = Text(f"{outcome.value}{simulated}", outcome.style)
        lines.append(Line(printable(row.key), figures, text))
    return Columns("test", _HEADINGS, "verdict", lines).drawn(width, colour)


def to_json(
    duet: Duet, arguments: Mapping[str, Any], *, utc: str, seconds: float, code: int
) -> dict[str, Any]:
    """Return verdicts and processes as plain values. `seconds`: since the command was called."""
    device = None
    if duet.device is not None:
        names = ("key", "name", "driver", "uuid")
        device = {name: getattr(duet.device, name) for name in names}
    plain = {
        "kind": "gpumem duet",
        "schema": SCHEMA,
        "datetime": utc,
        "seconds": seconds,
        "exit": code,
        "arguments": dict(arguments),
        "simulated": None if duet.device is None else duet.device.simulated,
        "device": device,
        "verdicts": [_verdict(row) for row in duet.rows],
        "processes": [_process(process) for process in duet.processes],
    }
    for name, side in duet.sides.items():
        plain[name] = {"what": side.title, "identity": side.identity}
    return plain


def _verdict(row: DuetRow) -> dict[str, Any]:
    paired = None
    if row.pairs is not None:
        # JSON has no infinity: a bound that so few pairs cannot have is unknown.
        low, high = [end if math.isfinite(end) else None for end in row.pairs.bounds]
        paired = {
            "change": row.pairs.change,
            "low": low,
            "high": high,
            "limit": math.expm1(row.pairs.limit),
            "pairs": len(row.pairs.log_ratios),
        }
    base_latency, head_latency = row.latencies
    return {
        "key": row.key,
        "outcome": None if row.outcome is None else row.outcome.value,
        "sentence": row.sentence,
        "limits": [to_plain(result) for result in row.results],
        "differences": [to_plain(difference) for difference in row.differences],
        "base_latency": base_latency,
        "head_latency": head_latency,
        "paired": paired,
    }


def _process(process: ProcessRecord) -> dict[str, Any]:
    rows = {}
    for row in process.rows:
        if row.measurement is not None:
            rows[row.key] = list(row.measurement.medians)
    plain: dict[str, Any] = {"pair": process.turn.round, "side": process.turn.side}
    for name in ("attempt", "pid", "utc", "seconds", "error"):
        plain[name] = getattr(process, name)
    return plain | {"rows": rows}
