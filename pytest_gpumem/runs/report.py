"""The report of a duet: a table, a sentence for each verdict, a JSON document and the exit code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.reporting.columns import Columns, Line, wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.runs.processes import BASE, HEAD, ProcessRecord
from pytest_gpumem.runs.reading import DuetVerdict
from pytest_gpumem.runs.rounds import DuetResult
from pytest_gpumem.runs.worktree import Side
from pytest_gpumem.units import format_time

SCHEMA = 2  # version of the document's layout
_NONE = "NO VERDICT"
_HEADINGS = ("base", "head", "change", "from", "to", "pairs")


def exit_code(result: DuetResult, *, strict: bool) -> int:
    """FINE, FAILED if a test got slower, NO_VERDICT if nothing was judged; under `strict` also if a row is no PASS of a real GPU."""
    if any(one.outcome is Outcome.FAIL for one in result.verdicts):
        return Exit.FAILED
    judged = [one for one in result.verdicts if one.paired is not None]
    if not judged:
        return Exit.NO_VERDICT
    simulated = any(process.simulated for process in result.processes)
    if strict and (simulated or any(one.outcome is not Outcome.PASS for one in result.verdicts)):
        return Exit.NO_VERDICT
    return Exit.FINE


def text(
    result: DuetResult,
    sides: Mapping[str, Side] | None,
    *,
    width: int,
    colour: bool,
    seconds: float,
) -> str:
    """The table and one sentence for each verdict, without a trailing line break; `sides` is None if they were printed before."""
    device = next(
        (process.device for process in result.processes if process.device is not None), None
    )
    simulated = " (simulated)" if device is not None and device.simulated else ""
    lines = [] if sides is None else [named(sides)]
    if device is not None:
        lines.append(printable(device.name_and_driver))
    # No verdict comes before NEW and PASS: a person must look.
    verdicts = sorted(
        printable(list(result.verdicts)), key=lambda one: (one.outcome or Outcome.UNDECIDED).rank
    )
    shown = [one for one in verdicts if one.paired is not None or one.outcome is not None]
    if shown:
        lines += [_table(shown, width, colour, simulated)]
    for one in verdicts:
        name = one.outcome.value if one.outcome is not None else _NONE
        lines += wrapped(f"{name}{simulated} {one.key}: {one.sentence}", width)
        for difference in one.differences:
            lines += wrapped(f"  why: {describe(difference)}", width)
    measured = f"{counted(len(result.processes), 'process')} in {seconds:.0f} s"
    resumed = f", {result.resumed} of them from the journal" if result.resumed else ""
    lines.append(f"{measured}{resumed}; intervals are of 99 %")
    return "\n".join(lines)


def named(sides: Mapping[str, Side]) -> str:
    """The two sides in words."""
    return printable(f"base: {sides[BASE].title}; head: {sides[HEAD].title}")


def _table(verdicts: list[DuetVerdict], width: int, colour: bool, simulated: str) -> str:
    lines = []
    for one in verdicts:
        paired = one.paired
        figures = [
            "" if latency is None else format_time(latency)
            for latency in (one.base_latency, one.head_latency)
        ]
        if paired is None:
            figures += [""] * 4
        else:
            ends = [change(end) if math.isfinite(end) else "" for end in paired.bounds]
            figures += [change(paired.change), *ends, str(paired.pairs)]
        name = one.outcome.value if one.outcome is not None else _NONE
        verdict = Text(f"{name}{simulated}", style=(one.outcome or Outcome.UNDECIDED).style)
        lines.append(Line(one.key, figures, verdict))
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
    """Everything as plain values: the verdicts, and each process with its pid, start and placement medians, from which they follow.
    `seconds`: since the command was called.
    """
    device = next(
        (process.device for process in result.processes if process.device is not None), None
    )
    return {
        "kind": "gpumem duet",
        "schema": SCHEMA,
        "datetime": utc,
        "seconds": seconds,
        "exit": code,
        "arguments": dict(arguments),
        "base": {"what": sides[BASE].title, "identity": sides[BASE].identity},
        "head": {"what": sides[HEAD].title, "identity": sides[HEAD].identity},
        "simulated": device.simulated if device is not None else None,
        "device": None
        if device is None
        else {"key": device.key, "name": device.name, "driver": device.driver, "uuid": device.uuid},
        "verdicts": [_verdict(one) for one in result.verdicts],
        "resumed": result.resumed,
        "processes": [_process(process) for process in result.processes],
    }


def _verdict(one: DuetVerdict) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "key": one.key,
        "outcome": one.outcome.value if one.outcome is not None else None,
        "sentence": one.sentence,
        "differences": [to_plain(difference) for difference in one.differences],
        "new_in_head": one.new,
        "base_latency": one.base_latency,
        "head_latency": one.head_latency,
        "paired": None,
    }
    if (paired := one.paired) is not None:
        # JSON has no infinity: a bound that so few pairs cannot have is unknown.
        low, high = (end if math.isfinite(end) else None for end in paired.bounds)
        figures = ("pairs", "delta", "change", "alarm", "miss", "gross", "same_code")
        plain["paired"] = {
            "outcome": paired.outcome.value if paired.outcome is not None else None,
            "low": low,
            "high": high,
        }
        plain["paired"] |= {name: getattr(paired, name) for name in figures}
    return plain


def _process(process: ProcessRecord) -> dict[str, Any]:
    rows = {
        row.key: {
            "medians": list(one.medians),
            "overhead": one.overhead,
            "sampler": one.sampler,
            "outcome": row.verdict.outcome.value,
        }
        for row in process.rows
        if (one := row.measurement) is not None
    }
    plain = {name: getattr(process, name) for name in ("attempt", "pid", "utc", "seconds", "error")}
    return {"round": process.turn.round, "side": process.turn.side, **plain, "rows": rows}


def rounded_duration(seconds: float | None) -> str:
    """ "40 s", "3 min", or nothing."""
    if seconds is None:
        return ""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
