"""The command `gpumem compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from pytest_gpumem.baselines.compare import Pair, Side, SidesCompared, compare_sides
from pytest_gpumem.commands import examples, json_option, margin, terminal, write_json
from pytest_gpumem.judging.differences import differences
from pytest_gpumem.judging.finding import change, counted
from pytest_gpumem.judging.latencies import mean_latency
from pytest_gpumem.outcomes import Outcome
from pytest_gpumem.printable import printable
from pytest_gpumem.reporting.columns import wrapped
from pytest_gpumem.reporting.differences import describe
from pytest_gpumem.reporting.row import base_of, mark, worst_first
from pytest_gpumem.reporting.table import table
from pytest_gpumem.reporting.terminal import missing_lines
from pytest_gpumem.units import sizes

MOST = 20  # rows whose figures are listed


def text(compared: SidesCompared, base: Side, head: Side, *, width: int, colour: bool) -> str:
    """Return both sides, the table of a session, a sentence for each FAIL, and what differs.

    It has no trailing line break.
    """
    compared, base, head = printable((compared, base, head))
    rows = worst_first(compared.rows)
    (facts,) = head.devices.values()
    drawn = table(rows, facts, width=width, colour=colour, every=False, saved=True, memory=True)
    sentences = []
    for row in rows:
        if row.verdict.outcome is Outcome.FAIL:
            simulated = mark(row.verdict.simulated)
            sentences.append(f"FAIL{simulated} {row.key}: {row.verdict.reason}")
    sentences += missing_lines(compared.missing)
    if any(omission.may_be_meant for omission in compared.missing):
        sentences.append("compare runs of the same tests")
    if compared.no_verdict is not None:
        sentences.append(f"no verdict: {compared.no_verdict}")
    lines = []
    for sentence in (f"base: {_what(base)}", f"head: {_what(head)}"):
        lines += wrapped(sentence, width)
    lines.append(drawn)
    lines += _differing(compared, width)
    for sentence in sentences:
        lines += wrapped(sentence, width)
    return "\n".join(lines)


# What differs


def what_differs(pair: Pair) -> list[str]:
    """Return what differs between the sides of a row: bytes, counts, kernels and code."""
    base, head = pair.before, pair.row
    if base is None:
        return []
    lines = []
    if base.footprint is not None and head.footprint is not None:
        for name in ("peak", "kept"):
            was, now = getattr(base.footprint, name), getattr(head.footprint, name)
            if was != now:
                share = f" ({change(now / was - 1)})" if was > 0 else ""
                lines.append(f"{name} {' → '.join(sizes(was, now))}{share}")
    if base.measurement is not None and head.measurement is not None:
        for difference in differences(base.measurement, head.measurement):
            lines.append(describe(difference))
    return lines


def _differing(compared: SidesCompared, width: int) -> list[str]:
    """Return what differs, by row, and the number of rows where nothing does."""
    lines = []
    rows = same = 0
    for pair in compared.pairs:
        differing = what_differs(pair)
        if pair.before is not None and not differing:
            same += 1
        if not differing:
            continue
        rows += 1
        if rows <= MOST:
            lines += wrapped(pair.row.key, width)
            for line in differing:
                lines += wrapped(f"  {line}", width)
    if rows > MOST:
        more = counted(rows - MOST, "further row")
        lines.append(f"{more} with other counts, bytes or code: --json has them")
    if same:
        lines.append(f"{counted(same, 'row')} with the same counts, bytes and code")
    return lines


# For programs


def fields(pair: Pair) -> dict[str, object]:
    """Return a row for programs: seconds, and shares as fractions."""
    row, verdict, comparison = pair.row, pair.row.verdict, pair.row.verdict.comparison
    head = None if row.measurement is None else mean_latency([row.measurement])
    return {
        "test": row.key,
        "outcome": verdict.outcome.value,
        "code": None if verdict.code is None else verdict.code.value,
        "base_s": base_of(row),
        "head_s": head,
        "change": None if comparison is None else comparison.delta,
        "reach": None if comparison is None else comparison.reach,
        "simulated": verdict.simulated,
        "reason": verdict.reason,
        "differences": what_differs(pair),
    }


def as_json(compared: SidesCompared, base: Side, head: Side, *, code: int) -> dict[str, Any]:
    """Return the comparison as plain values."""
    missing = []
    for omission in compared.missing:
        missing.append({"test": omission.key, **msgspec.to_builtins(omission)})
    return {
        "kind": "gpumem compare",
        "schema": 1,
        "base": base.name,
        "head": head.name,
        "exit": code,
        "rows": [fields(pair) for pair in compared.pairs],
        "missing": missing,
    }


def _what(side: Side) -> str:
    devices = " and ".join(side.devices)
    drivers = sorted({facts.driver for facts in side.devices.values() if facts.driver is not None})
    if drivers:
        devices += f", driver {' and '.join(drivers)}"
    return f"{side.name}, {counted(side.baseline.processes, 'process')} on {devices}"


@click.command(
    short_help="Compare result files, without a GPU.",
    epilog=examples(
        "gpumem compare base.json head.json --max-regression 1%",
        "gpumem compare 'base-*.json' 'head-*.json'    # several processes a side",
    ),
)
@click.option(
    "--max-regression",
    metavar="MARGIN",
    callback=margin,
    help='Allowed slow-down of tests without a limit of their own, such as "1%".',
)
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with 6 unless every row has a limit and is a PASS of a real GPU.",
)
@json_option("Write the comparison as JSON.")
@click.argument("sides", nargs=-1, metavar="BASE HEAD")
def compare(
    sides: tuple[str, ...], max_regression: str | None, strict: bool, file: Path | None
) -> int:
    """Judge HEAD against BASE as a session judges a run against its baseline, without a GPU.

    The limits of the tests apply to times, memory, counts and machine code. A row of BASE that HEAD
    lacks is lost. The command lists what differs. Each side is a file, a folder, or a
    quoted pattern such as "base-*.json": --benchmark-json files of sessions with --gpumem, or files
    of a baseline. Each file of BASE is a run; the files of HEAD are the processes of a run.
    """
    from pytest_gpumem.baselines.compare import side

    if len(sides) != 2:
        raise click.UsageError(
            f"BASE and HEAD are two, not {len(sides)}; put a pattern such as 'base-*.json' into "
            "quotes."
        )
    first, second = (side(given) for given in sides)
    compared = compare_sides(first, second, max_regression)
    code = compared.exit_code(strict=strict)
    width, colour = terminal()
    click.echo(text(compared, first, second, width=width, colour=colour))
    write_json(file, as_json(compared, first, second, code=code))
    return code
