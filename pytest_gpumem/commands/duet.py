"""The command `gpumem duet`."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import Any

import click

from pytest_gpumem.baselines.acceptances import acceptances
from pytest_gpumem.commands import (
    base_python_option,
    examples,
    file_option,
    log,
    max_regression_option,
    pytest_arguments,
    refuse,
    terminal,
    test_option,
    write,
)
from pytest_gpumem.judging.duet import DuetRow
from pytest_gpumem.judging.finding import change, mark
from pytest_gpumem.outcomes import Exit, Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.records.schema import to_plain
from pytest_gpumem.reporting.details import name_and_driver
from pytest_gpumem.reporting.row import describe
from pytest_gpumem.reporting.terminal import STYLES, table_of_tests, wrapped
from pytest_gpumem.runs.duet import Duet, RowFilter
from pytest_gpumem.runs.processes import BASE, HEAD, Processes, ProcessRecord
from pytest_gpumem.runs.worktree import Side, two_sides
from pytest_gpumem.units import counted, format_time

SCHEMA = 4  # version of the document's layout
HEADINGS = ("base", "head", "change", "at least", "at most", "pairs")
ONE_PROCESS = "a duet measures one process at a time"
REFUSED = {
    "--benchmark-json": "--json writes the results of a duet",
    "--gpumem-report": "--json writes the results of a duet",
    "--gpumem-baseline": "a duet compares with BASE alone",
    "--gpumem-save": "a duet saves nothing into a baseline",
    "--gpumem-processes": "a duet has fresh processes of its own",
    "--numprocesses": ONE_PROCESS,
    "-n": ONE_PROCESS,
}
"""Arguments of pytest that a duet refuses, and why. Its processes ignore them."""


@click.command(
    short_help="Decide between base and head in alternating processes.",
    epilog=examples(
        "gpumem duet main                              # the working tree against main",
        "gpumem duet main --test tests/test_a.py::test_triad",
        "gpumem duet v1.2 -- -k 'not slow'",
    ),
)
@test_option
@max_regression_option
@base_python_option
@file_option("--json", "Write verdicts and all processes as JSON.", "file")
@click.option(
    "--strict", is_flag=True, help="Exit with 6 unless every verdict is PASS, and of a real GPU."
)
@click.argument("base", metavar="BASE")
@pytest_arguments
def duet(
    base: str,
    tests: tuple[str, ...],
    max_regression: str | None,
    base_python: str | None,
    file: Path | None,
    strict: bool,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Decide whether the working tree is slower than BASE, a git revision.

    Both are measured by pytest in alternating fresh processes on one GPU, until every test is
    decided: after 5 to 32 pairs. Ctrl-C prints what is decided so far.
    """
    refuse(pytest_arguments, REFUSED)
    sides = two_sides(base, Path.cwd(), python=base_python)
    with ended_by_signals(), sides as (first, second):
        added = acceptances(Path.cwd()).split_at(base)[1]
        code, run = play(
            {BASE: first, HEAD: second},
            RowFilter(frozenset(tests), old_names=added.old_names()),
            pytest_arguments,
            max_regression=max_regression,
            file=file,
            strict=strict,
        )
    if not run.rows:
        click.echo("nothing was measured: no selected test measures on the GPU")
    if file is not None:
        click.echo(printable(f"wrote {file}"))
    return code


def play(
    sides: dict[str, Side],
    wanted: RowFilter,
    arguments: Sequence[str],
    *,
    max_regression: str | None = None,
    file: Path | None = None,
    strict: bool = False,
    evidence: bool = False,
) -> tuple[int, Duet]:
    """Run a duet, print its verdicts, and write them into `file`. Return the exit code, too.

    `evidence`: record what a launch runs, for the causes of a slow-down. Other arguments are those
    of the command. Raises `UserError`: it cannot be played as it was requested.
    """
    begun = time.monotonic()
    log(f"base: {sides[BASE].title}; head: {sides[HEAD].title}")
    stopped = False
    with closing(Processes(sides, arguments, os.environ, evidence=evidence, say=log)) as processes:
        run = Duet(sides, processes, wanted, max_regression=max_regression, say=log)
        try:
            run.play()
        except KeyboardInterrupt:
            stopped = True
    code = exit_code(run, strict=strict or "--gpumem-strict" in arguments)
    seconds = time.monotonic() - begun
    click.echo(_text(run, seconds))
    if file is not None:
        requested = {
            "tests": sorted(wanted.tests),
            "max_regression": max_regression,
            "pytest": list(arguments),
        }
        document = to_json(run, requested, seconds=seconds, code=code)
        write("--json", file, json.dumps(document, allow_nan=False, indent=1) + "\n")
    if stopped:
        decided = [row for row in run.rows if row.outcome in (Outcome.PASS, Outcome.FAIL)]
        log(f"stopped; {len(decided)} of {counted(len(run.rows), 'row')} decided")
        raise KeyboardInterrupt
    return code, run


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a duet as Ctrl-C does: what was made for it is removed."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# The report


def exit_code(duet: Duet, *, strict: bool) -> int:
    """Return the exit code. Under `strict`, FINE takes a PASS of each row, of a real GPU."""
    outcomes = [row.outcome for row in duet.rows]
    if Outcome.FAIL in outcomes:
        return Exit.FAILED
    if not any(row.results for row in duet.rows):
        return Exit.NO_VERDICT
    simulated = duet.device is not None and duet.device.simulated
    if strict and (simulated or set(outcomes) != {Outcome.PASS}):
        return Exit.NO_VERDICT
    return Exit.FINE


def _text(duet: Duet, seconds: float) -> str:
    width, colour = terminal()
    lines, simulated = [], ""
    if duet.device is not None:
        lines.append(printable(name_and_driver(duet.device)))
        simulated = mark(duet.device.simulated)
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
    from rich.text import Text

    lines = []
    for row in rows:
        figures = []
        for latency in row.latencies:
            figures.append("" if latency is None else format_time(latency))
        if row.pairs is None:
            figures += [""] * 4
        else:
            figures.append(change(row.pairs.change))
            for end in row.pairs.bounds:
                figures.append(change(end) if math.isfinite(end) else "")
            figures.append(str(len(row.pairs.log_ratios)))
        outcome = row.outcome or Outcome.UNDECIDED
        verdict = Text(f"{outcome.value}{simulated}", STYLES[outcome])
        lines.append((printable(row.key), figures, verdict))
    return table_of_tests(HEADINGS, lines, width, colour)


def to_json(
    duet: Duet, arguments: Mapping[str, Any], *, seconds: float, code: int
) -> dict[str, Any]:
    """Return verdicts and processes as plain values. `seconds`: since the command was called."""
    device = None
    if duet.device is not None:
        names = ("key", "name", "driver", "uuid")
        device = {name: getattr(duet.device, name) for name in names}
    plain = {
        "kind": "gpumem duet",
        "schema": SCHEMA,
        "datetime": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "seconds": seconds,
        "exit": code,
        "arguments": arguments,
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
    for key, row in process.rows.items():
        if row.measurement is not None:
            rows[key] = list(row.measurement.medians)
    names = ("pair", "side", "attempt", "pid", "utc", "seconds", "error")
    return {name: getattr(process, name) for name in names} | {"rows": rows}
