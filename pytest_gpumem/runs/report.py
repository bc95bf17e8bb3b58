"""The report of a duet: a table, a sentence for each verdict, a JSON document, the exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.device import DeviceFacts
from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.runs.duet import DuetResult
from pytest_gpumem.runs.pairs import DuetVerdict
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.units import format_time

SCHEMA = 3  # version of the document's layout
NO_VERDICT = "NO VERDICT"
_HEADINGS = ("base", "head", "change", "from", "to", "pairs")


def exit_code(result: DuetResult, *, strict: bool) -> int:
    """Return FINE, FAILED if a row fails, or NO_VERDICT if nothing was judged.

    Under `strict` it is NO_VERDICT too unless each row is a PASS of a real GPU.
    """
    outcomes = [verdict.outcome for verdict in result.verdicts]
    if Outcome.FAIL in outcomes:
        return Exit.FAILED
    if not any(verdict.results for verdict in result.verdicts):
        return Exit.NO_VERDICT
    simulated = any(process.simulated for process in result.processes)
    if strict and (simulated or any(outcome is not Outcome.PASS for outcome in outcomes)):
        return Exit.NO_VERDICT
    return Exit.FINE


def text(result: DuetResult, *, width: int, colour: bool, seconds: float) -> str:
    """Return the table and one sentence for each verdict, without a trailing line break."""
    lines = []
    device = device_of(result)
    simulated = ""
    if device is not None:
        lines.append(printable(device.name_and_driver))
        simulated = " (simulated)" if device.simulated else ""
    # No verdict comes before NEW and PASS: a person must look.
    verdicts = sorted(
        printable(list(result.verdicts)),
        key=lambda verdict: (verdict.outcome or Outcome.UNDECIDED).rank,
    )
    shown = [verdict for verdict in verdicts if verdict.outcome is not None]
    if shown:
        lines.append(_table(shown, width, colour, simulated))
    for verdict in verdicts:
        name = _name(verdict)
        lines += wrapped(f"{name}{simulated} {verdict.key}: {verdict.sentence}", width)
        for difference in verdict.differences:
            lines += wrapped(f"  why: {describe(difference)}", width)
    lines.append(f"{counted(len(result.processes), 'process')} in {seconds:.0f} s")
    return "\n".join(lines)


def device_of(result: DuetResult) -> DeviceFacts | None:
    """Return the device of a duet; None where nothing was measured."""
    for process in result.processes:
        if process.device is not None:
            return process.device
    return None


def sides_text(sides: Mapping[str, Side]) -> str:
    """Return the two sides in words."""
    return printable(f"base: {sides[BASE].title}; head: {sides[HEAD].title}")


def _name(verdict: DuetVerdict) -> str:
    return NO_VERDICT if verdict.outcome is None else verdict.outcome.value


def _table(verdicts: Sequence[DuetVerdict], width: int, colour: bool, simulated: str) -> str:
    lines = []
    for verdict in verdicts:
        figures = []
        for latency in verdict.latencies:
            figures.append("" if latency is None else format_time(latency))
        pairs = verdict.pairs
        if pairs is None:
            figures += ["", "", "", ""]
        else:
            figures.append(change(pairs.change))
            for end in pairs.bounds:
                figures.append(change(end) if math.isfinite(end) else "")
            figures.append(str(len(pairs.log_ratios)))
        outcome = verdict.outcome or Outcome.UNDECIDED
        lines.append(
            Line(verdict.key, figures, Text(f"{_name(verdict)}{simulated}", outcome.style))
        )
    return Columns("test", _HEADINGS, "verdict", lines).drawn(width, colour)


def to_json(
    result: DuetResult,
    sides: Mapping[str, Side],
    arguments: Mapping[str, Any],
    *,
    utc: str,
    seconds: float,
    code: int,
) -> dict[str, Any]:
    """Return verdicts and processes as plain values. `seconds`: since the command was called."""
    device = device_of(result)
    plain_device = None
    if device is not None:
        plain_device = {
            "key": device.key,
            "name": device.name,
            "driver": device.driver,
            "uuid": device.uuid,
        }
    return {
        "kind": "gpumem duet",
        "schema": SCHEMA,
        "datetime": utc,
        "seconds": seconds,
        "exit": code,
        "arguments": dict(arguments),
        "base": {"what": sides[BASE].title, "identity": sides[BASE].identity},
        "head": {"what": sides[HEAD].title, "identity": sides[HEAD].identity},
        "simulated": None if device is None else device.simulated,
        "device": plain_device,
        "verdicts": [_verdict(verdict) for verdict in result.verdicts],
        "processes": [_process(process) for process in result.processes],
    }


def _verdict(verdict: DuetVerdict) -> dict[str, Any]:
    paired = None
    if verdict.pairs is not None:
        # JSON has no infinity: a bound that so few pairs cannot have is unknown.
        low, high = [end if math.isfinite(end) else None for end in verdict.pairs.bounds]
        paired = {
            "change": verdict.pairs.change,
            "low": low,
            "high": high,
            "limit": math.expm1(verdict.pairs.limit),
            "pairs": len(verdict.pairs.log_ratios),
        }
    base_latency, head_latency = verdict.latencies
    return {
        "key": verdict.key,
        "outcome": None if verdict.outcome is None else verdict.outcome.value,
        "sentence": verdict.sentence,
        "limits": [to_plain(result) for result in verdict.results],
        "differences": [to_plain(difference) for difference in verdict.differences],
        "base_latency": base_latency,
        "head_latency": head_latency,
        "paired": paired,
    }


def _process(process: ProcessRecord) -> dict[str, Any]:
    rows = {}
    for row in process.rows:
        if row.measurement is not None:
            rows[row.key] = {
                "medians": list(row.measurement.medians),
                "overhead": row.measurement.overhead,
                "sampler": row.measurement.sampler,
                "outcome": row.verdict.outcome.value,
            }
    return {
        "pair": process.turn.round,
        "side": process.turn.side,
        "attempt": process.attempt,
        "pid": process.pid,
        "utc": process.utc,
        "seconds": process.seconds,
        "error": process.error,
        "rows": rows,
    }


def rounded_duration(seconds: float | None) -> str:
    """ "40 s", "3 min", or nothing."""
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
