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

SCHEMA = 4  # version of the document's layout
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
    device = _device_of(result)
    simulated = device is not None and device.simulated
    if strict and (simulated or any(outcome is not Outcome.PASS for outcome in outcomes)):
        return Exit.NO_VERDICT
    return Exit.FINE


def text(result: DuetResult, *, width: int, colour: bool, seconds: float) -> str:
    """Return the table and a sentence for each verdict, without a trailing line break."""
    device = _device_of(result)
    lines, simulated = [], ""
    if device is not None:
        lines.append(printable(device.name_and_driver))
        simulated = " (simulated)" if device.simulated else ""
    verdicts = printable(list(result.verdicts))
    # No verdict comes before NEW and PASS: a person must look.
    verdicts.sort(key=lambda verdict: _outcome(verdict).rank)
    compared = [verdict for verdict in verdicts if verdict.outcome is not None]
    if compared:
        lines.append(_table(compared, width, colour, simulated))
    for verdict in verdicts:
        name = "NO VERDICT" if verdict.outcome is None else verdict.outcome.value
        lines += wrapped(f"{name}{simulated} {verdict.key}: {verdict.sentence}", width)
        for difference in verdict.differences:
            lines += wrapped(f"  why: {describe(difference)}", width)
    lines.append(f"{counted(len(result.processes), 'process')} in {seconds:.0f} s")
    return "\n".join(lines)


def _device_of(result: DuetResult) -> DeviceFacts | None:
    for process in result.processes:
        if process.device is not None:
            return process.device
    return None


def _outcome(verdict: DuetVerdict) -> Outcome:
    return verdict.outcome or Outcome.UNDECIDED


def _table(verdicts: Sequence[DuetVerdict], width: int, colour: bool, simulated: str) -> str:
    lines = []
    for verdict in verdicts:
        figures = []
        for latency in verdict.latencies:
            figures.append("" if latency is None else format_time(latency))
        if verdict.pairs is None:
            figures += ["", "", "", ""]
        else:
            figures.append(change(verdict.pairs.change))
            for end in verdict.pairs.bounds:
                figures.append(change(end) if math.isfinite(end) else "")
            figures.append(str(len(verdict.pairs.log_ratios)))
        outcome = _outcome(verdict)
        text = Text(f"{outcome.value}{simulated}", outcome.style)
        lines.append(Line(verdict.key, figures, text))
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
    device = _device_of(result)
    plain_device = None
    if device is not None:
        names = ("key", "name", "driver", "uuid")
        plain_device = {name: getattr(device, name) for name in names}
    plain = {
        "kind": "gpumem duet",
        "schema": SCHEMA,
        "datetime": utc,
        "seconds": seconds,
        "exit": code,
        "arguments": dict(arguments),
        "simulated": None if device is None else device.simulated,
        "device": plain_device,
        "verdicts": [_verdict(verdict) for verdict in result.verdicts],
        "processes": [_process(process) for process in result.processes],
    }
    for name in (BASE, HEAD):
        plain[name] = {"what": sides[name].title, "identity": sides[name].identity}
    return plain


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
            rows[row.key] = list(row.measurement.medians)
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
